"""The ranks of the trainer on one machine or several: how they meet, agree, exchange values, and end."""
