"""Passes over a model's graph and kernels, a topic in each module; `compiler.pipeline` has their order."""
