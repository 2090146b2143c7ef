"""Provenance of delivered files: written beside them, signed, shown, and checked later.

Owns statements, bills of materials and their checks. Imports executors and what is below it.
"""
