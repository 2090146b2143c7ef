"""Compilation of imported Relax modules: the lowering pipeline, its passes, and the schedules of untuned kernels.

Owns everything between an imported model and object code, except tuning. May import runtime,
targets, store and core.
"""
