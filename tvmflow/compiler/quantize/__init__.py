"""Quantization of float models: which tensors become integers, and with which scales.

Imports compiler.ir, compiler.passes and what is below them; knows nothing of data sets and stages.
"""
