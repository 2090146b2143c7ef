"""Compilation of imported Relax modules: lowering pipeline, passes, schedules of untuned kernels.

Owns everything between an imported model and object code, except tuning. May import runtime, targets, store and core.
"""
