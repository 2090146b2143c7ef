"""The runtime: what a program needs to load bundles and run models.

May import targets and core. Every wheel that tvmflow makes carries a copy of this folder.
"""
