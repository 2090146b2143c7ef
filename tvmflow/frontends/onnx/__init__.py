"""ONNX models: opset 7 and up, external data, any naming of weights.

Imports nothing of tvmflow, because the process of the reference loads this package, and little else.
"""

from typing import Final

EXTERNAL: Final = "external/"
"""The role of an external data file is this prefix and the file's location in the model."""
