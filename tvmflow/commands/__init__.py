"""The commands of `tvmflow` that have modules of their own: their words, and what they say."""
