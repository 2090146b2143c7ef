"""Releases: lock files and their differences, gates, release folders, reproducibility checks and retuning.

Imports pages and what is below it.
"""
