"""Options and help: `tvmflow targets`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, store_option
from tvmflow.cli.options import Options, flag, option


class TargetsOptions(Options):
    """List targets, and what this machine can do for each.

    Examples:
        tvmflow targets
        # the values of `mcpu` for one architecture
        tvmflow targets --cpus aarch64
    """

    cpus: str | None = option("ARCH", "list the CPUs that LLVM knows for an architecture instead")
    json: bool = flag(JSON_HELP)
    store: StoreOption = store_option("facts about targets are")


COMMANDS: Final = {"targets": TargetsOptions}
