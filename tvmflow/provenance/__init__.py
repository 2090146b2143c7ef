"""Provenance of delivered files: written beside them, signed, shown, and checked later.

Owns statements, bills of materials and their checks. May import executors, planning, stages,
recipe, exporters, frontends, tuning, compiler, runtime, targets, store and core.
"""
