"""The options of `tvmflow run-model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import StoreOptions
from tvmflow.cli.options import argument, flag, option, positive_int

RANDOM: Final = "random"

FILLS: Final[Mapping[str, int]] = {"zeros": 0, "ones": 1}


class RunModelOptions(StoreOptions):
    """Run a bundle on images, arrays, or random numbers.

    Examples:
        # the classes of images
        tvmflow run-model dist/net/host/net.tvmflow cat.jpg dog.jpg --top 3
        # all samples of an npz file; write the outputs
        tvmflow run-model net.tvmflow in.npz --output out.npz
        # a file for each of two inputs, an array and numbers as text
        tvmflow run-model net.tvmflow ids=ids.npy scale=scale.txt
        # random inputs with a size for a dynamic dimension, timed
        tvmflow run-model net.tvmflow --size seq=37 --print-time
        # compare with another runtime
        tvmflow run-model net.tvmflow --compare onnxruntime
        # when each kernel ran, and which nodes it computes, for Perfetto
        tvmflow run-model net.tvmflow --trace trace.json
    """

    bundle: Path = argument("BUNDLE", "a delivered .tvmflow file")
    files: tuple[str, ...] = argument(
        "INPUT",
        "files with inputs, FILE or NAME=FILE: npz (an array for each input, by name), npy, numbers as text, images; - is the standard input",
        nargs="*",
    )
    trusted: tuple[Path, ...] = option(
        "KEYS",
        "run only what one of these keys signed: a .pub file or a folder of them (may be repeated)",
        default=(),
    )
    input: tuple[str, ...] = option(
        "INPUT",
        "the same as a file without this option; more samples than a batch holds run in batches (may be repeated)",
        default=(),
    )
    fill: str = option(
        None,
        f"the values of inputs where no file is given ({RANDOM})",
        default=RANDOM,
        choices=(RANDOM, *FILLS),
    )
    size: tuple[str, ...] = option(
        "NAME=N",
        "the size of a dynamic dimension of random inputs; without it, one in the middle of its range (may be repeated)",
        default=(),
    )
    seed: int = option("N", "the seed of random inputs (0)", default=0)
    output: Path | None = option("NPZ", "write the outputs to this file, by name")
    top: int | None = option(
        "N",
        "show the indices of the N largest elements of each sample's outputs; for images the N best classes (5)",
        type=positive_int,
    )
    threads: int | None = option(
        "N",
        "threads of kernels (TVM_NUM_THREADS, else one for each core that may be used)",
        type=positive_int,
    )
    print_time: bool = flag("show the latency of a call")
    repeat: int = option(
        "N", "repeats of a measurement, and calls in a trace (10)", default=10, type=positive_int
    )
    profile: bool = flag("show the time of each operator")
    trace: Path | None = option(
        "FILE",
        "write when each kernel of some calls (--repeat) ran, and the nodes that it computes, for Perfetto and other viewers; gzipped if it ends in .gz",
    )
    compare: tuple[str, ...] = option(
        "RUNTIME",
        "run the model in onnxruntime, openvino, pytorch or tensorrt, too, and compare outputs and latency (may be repeated)",
        default=(),
    )
    model: Path | None = option(
        "FILE",
        "the model's file for --compare; without it, the one that the library was built from, if this machine still has it",
    )
