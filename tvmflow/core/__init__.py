"""The values and utilities that every layer shares: errors, types, keys, files, locks, text. Imports nothing else of tvmflow."""
