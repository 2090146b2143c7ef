"""Options and help: `tvmflow init`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import StoreOption, store_option
from tvmflow.cli.options import Options, argument, flag, minutes, option, shape
from tvmflow.core.generated_text import shell_word


class ModelOptions(Options):
    """A model, and what is to be built of it."""

    model: str = argument(
        "MODEL",
        "an ONNX or TFLite file, an archive of torch.export (.pt2), PREFIX-symbol.json, or an address",
    )
    targets: tuple[str, ...] = option(
        "T", "build for this target (may be repeated; this machine)", default=(), name="--target"
    )
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = option(
        "NAME=SIZES",
        "the shape of an input, such as data=1,3,224,224 (may be repeated)",
        default=(),
        name="--shape",
        type=shape,
    )
    minutes: float | None = option(
        "M", "search for faster kernels for so long; 0: no search", type=minutes
    )

    def command(self, name: str) -> str:
        """Return the command line of another command with the same options."""
        words = [name, self.model]
        words += [word for target in self.targets for word in ("--target", target)]
        for input_name, sizes in self.shapes:
            words += ["--shape", f"{input_name}={','.join(map(str, sizes))}"]
        words += [] if self.minutes is None else ["--minutes", f"{self.minutes:g}"]
        return f"tvmflow {' '.join(map(shell_word, words))}"


class InitOptions(Options):
    """Write the recipe of a model.

    The inputs are those of the model; the rest are defaults, with comments on what one may change.

    Examples:
        # NAME.tvmflow.yaml in the current folder
        tvmflow init model.onnx
        # sizes that the model leaves open; for another machine, too
        tvmflow init model.onnx --shape data=1,3,224,224 --target host --target cortex-a72
        # to look at it
        tvmflow init model.onnx --stdout
        # a PyTorch model: runs `make` of nets/small.py, which returns (module, example inputs)
        tvmflow init nets.small:make --archive small.pt2
    """

    model: ModelOptions
    output: Path | None = option("FILE", "the recipe to write (NAME.tvmflow.yaml in this folder)")
    archive: Path | None = option(
        "FILE",
        "write what torch.export makes of a PyTorch model to FILE (.pt2); MODEL is then PACKAGE.MODULE:FUNCTION, "
        "whose code runs and returns (module, example inputs)",
    )
    stdout: bool = flag("print the recipe, and write no file")
    force: bool = flag("replace a recipe that exists")
    store: StoreOption = store_option()
    verbosity: int


COMMANDS: Final = {"init": InitOptions}
