"""trainer/checkpoint"""
