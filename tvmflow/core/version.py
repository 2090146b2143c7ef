"""The version of tvmflow, for every layer. Imports nothing: it is part of an up-to-date run."""

VERSION = "0.1.0"
