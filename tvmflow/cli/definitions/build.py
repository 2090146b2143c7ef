"""Options and help: `tvmflow build`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import (
    ExecutionOptions,
    OutputOptions,
    StoreOption,
    store_option,
)
from tvmflow.cli.definitions.init import ModelOptions
from tvmflow.cli.options import Options


class BuildOptions(Options):
    """Build a model without a recipe: import, compile, verify and deliver it.

    The recipe is that of `tvmflow init`, which keeps it; without --minutes, nothing is tuned.

    Examples:
        # for this machine
        tvmflow build model.onnx
        # search for faster kernels for ten minutes
        tvmflow build model.onnx --minutes 10
        # sizes that the model leaves open
        tvmflow build model.onnx --shape data=1,3,224,224
    """

    model: ModelOptions
    execution: ExecutionOptions
    output: OutputOptions
    store: StoreOption = store_option()
    argv: tuple[str, ...]


COMMANDS: Final = {"build": BuildOptions}
