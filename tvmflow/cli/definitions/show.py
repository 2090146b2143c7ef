"""Options and help: `tvmflow show`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, pipeline_option, store_option
from tvmflow.cli.options import Options, argument, flag

_SUBJECT: Final = "RECIPE|RUN"
_SUBJECT_HELP: Final = "a recipe that was run, or a run (see `tvmflow runs`)"


class ShowRunOptions(Options):
    """Show what a run was asked for, and what each of its stages did and said.

    Examples:
        tvmflow show run
        # the run before the last one
        tvmflow show run latest~1
        # with the recipes as they were, and the facts of each stage
        tvmflow show run --json
    """

    run_id: str | None = argument(
        "RUN", "its id or the beginning of it, `latest` (the default), or `latest~1`", "?"
    )
    json: bool = flag("print the record as one line of JSON")
    store: StoreOption = store_option()


class ShowKernelsOptions(Options):
    """Show the kernels of libraries: share of the time, schedule, workload, and nodes of the model.

    The slowest comes first. `show kernel` shows all that is known of one, and its code.

    Examples:
        tvmflow show kernels net.yaml
        tvmflow show kernels net.yaml host --json
    """

    what: str = argument(_SUBJECT, _SUBJECT_HELP)
    target: str | None = argument("TARGET", "only this target", "?")
    pipeline: str | None = pipeline_option()
    json: bool = flag(JSON_HELP)
    store: StoreOption = store_option()


class ShowKernelOptions(Options):
    """Show all that is known of one kernel: nodes of the model, schedule, time, roofline, and its code.

    Its code is made again from the stored results, as `build` made it.

    Examples:
        tvmflow show kernel net.yaml fused_conv2d
        # what the schedule does, and what LLVM made of it
        tvmflow show kernel net.yaml fused_conv2d --schedule --asm
        # in the last run but one
        tvmflow show kernel latest~1 fused_conv2d host --record
    """

    what: str = argument(_SUBJECT, _SUBJECT_HELP)
    kernel: str = argument("KERNEL", "its name, or the beginning of it")
    target: str | None = argument("TARGET", "only this target", "?")
    tir: bool = flag("show the scheduled kernel as TVMScript")
    schedule: bool = flag("show the instructions of its schedule as Python")
    record: bool = flag("show the trial behind its schedule, or else the best one")
    asm: bool = flag("show its assembly; for a GPU, its CUDA C")
    pipeline: str | None = pipeline_option()
    json: bool = flag(JSON_HELP)
    store: StoreOption = store_option()


COMMANDS: Final = {
    "show": {"run": ShowRunOptions, "kernels": ShowKernelsOptions, "kernel": ShowKernelOptions}
}
