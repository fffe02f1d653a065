"""Rewards of completions: built-in ones, functions of the user's own, and the worker process that calls them.

`config.objectives` reads `objective.reward`, and `scoring.Reward` opens what it says.
"""
