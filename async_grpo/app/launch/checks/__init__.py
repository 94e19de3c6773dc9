"""Checks of a run before anything is started, which `plan.start_checks` puts in order.

data     rows of the data files, and lengths of their prompts
trials   reward functions and workflow, tried on the first rows
"""
