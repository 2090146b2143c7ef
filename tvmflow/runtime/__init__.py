"""The runtime: loads bundles and runs models.

May import targets and core. Every wheel that tvmflow makes carries a copy of this folder.
"""
