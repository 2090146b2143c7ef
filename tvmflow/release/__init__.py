"""Releases: lock files and their differences, gates, release folders, reproducibility checks and retuning.

May import every layer but the command line.
"""
