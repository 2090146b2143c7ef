"""Options and help: `tvmflow doctor`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import DistOption, StoreOption, dist_option, store_option
from tvmflow.cli.options import Options


class DoctorOptions(Options):
    """Check this installation piece by piece.

    Each piece is tried in a process that may crash. A piece is good (ok), not good (BAD), or not good
    and needed by some recipes only (--). The exit code is 4 when a required piece is not good.

    Examples:
        tvmflow doctor
        # and the disks that a run would write to
        tvmflow doctor --store /fast/cache --dist /shared/dist
    """

    store: StoreOption = store_option()
    dist: DistOption = dist_option()
    verbosity: int


COMMANDS: Final = {"doctor": DoctorOptions}
