"""Results that are kept: the local store, remote caches, downloads, and garbage collection. May import `core` alone."""
