"""The runtime: loading bundles and running models, all that a program needs that uses a library.

May import targets and core. Every wheel that tvmflow makes carries a copy of this folder.
"""
