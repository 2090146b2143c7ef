"""Targets: presets, backends (CPU, CUDA), the host, linkers, devices behind RPC, emulation.

May import store and core.
"""
