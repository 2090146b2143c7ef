"""Kept results: local store, remote caches, downloads, garbage collection. May import only `core`."""
