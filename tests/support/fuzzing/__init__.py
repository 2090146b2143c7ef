"""Fuzz tests: what strangers may send, mutated from seeds; each case in a child process with limits."""
