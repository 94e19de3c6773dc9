"""Checks of a run before anything is started. `plan.start_checks` orders them.

data     rows of the data files, and lengths of their prompts
trials   reward functions and workflow, tried on the first rows
"""
