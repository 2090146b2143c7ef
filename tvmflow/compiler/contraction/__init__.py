"""Contractions, such as matmuls and convolutions: candidates and their estimated cost."""
