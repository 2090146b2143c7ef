"""Contractions: matrix products, convolutions and their like; the register tiles that rules choose and tuning measures."""
