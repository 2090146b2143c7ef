"""Releases: lock files, gates, release folders, reproducibility checks and retuning.

Differences between lock files are found here, too.

Imports pages and what is below it.
"""
