"""Values and utilities for all layers: errors, types, keys, files, locks, text. Imports none of them."""
