"""trainer/step"""
