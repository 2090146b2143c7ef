"""Passes over a model's graph and kernels, by topic; `compiler.pipeline` has their order."""
