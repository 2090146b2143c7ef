"""The C compiler in the `ziglang` wheel, as a check of generated C."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tvmflow.targets import zig


def find_c_error(source: Path, includes: Sequence[Path]) -> str:
    """Return a C compiler's first error in a file, as `LINE: message`; empty when the file compiles."""
    options = ["-c", "-O0", "-w", *(f"-I{folder}" for folder in includes)]
    # not -fsyntax-only: zig's cc then looks for an object file and fails
    with tempfile.TemporaryDirectory() as scratch:
        done = zig.run(Path(scratch), "cc", *options, str(source.resolve()), "-o", "unused.o")
    if done.returncode == 0:
        return ""
    errors = re.findall(r"^.*?:(\d+):\d+: (?:fatal )?error: (.*)$", done.stderr, re.MULTILINE)
    return f"{errors[0][0]}: {errors[0][1]}" if errors else done.stderr.strip()
