"""Tuning: the trial ledger, the search for schedules, and measurements on this and remote machines.

Owns everything about trials, from the budget to the choice of finalists. May import compiler,
runtime, targets, store and core.
"""
