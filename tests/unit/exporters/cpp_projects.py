"""C++ projects, and programs that use them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from tests.support.exports import Exported
from tests.support.recipes import ROOT

PROGRAMS: Final = ROOT / "tests" / "support" / "cpp"


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    # an empty environment: there is no TVM and no Python to be found
    return subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, check=False, env={}
    )


def project_of(exported: Exported) -> Path:
    return exported.dist / "digits-cpp"
