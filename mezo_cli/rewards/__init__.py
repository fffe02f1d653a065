"""Rewards of completions: built-in ones, functions of the user's own, and the worker process that calls them.

`spec` says what `objective.reward` stands for, and `scoring.Reward` opens what it says.
"""
