"""trainer/batch"""
