"""Contractions, such as matrix products and convolutions: candidates and their estimated cost."""
