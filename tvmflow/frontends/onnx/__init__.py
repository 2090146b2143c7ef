"""ONNX models: opset 7 and up, external data, any naming of weights.

Imports nothing of tvmflow: the process of the reference imports modules of this folder, and little else.
"""

from typing import Final

EXTERNAL: Final = "external/"
"""The prefix of the role of an external data file; its location in the model follows."""
