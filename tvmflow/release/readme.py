"""The README of a release: what is where, and how to check it."""

from __future__ import annotations

from typing import Final

from tvmflow.provenance.delivered import README
from tvmflow.provenance.write import MEASUREMENTS_STATEMENT, RELEASE_STATEMENT
from tvmflow.recipe.lock_file import LockFile
from tvmflow.release.measurements import LOCK, MEASUREMENTS, MEASUREMENTS_PAGE
from tvmflow.release.page import REPORT
from tvmflow.release.previous import SUMS

_FILES: Final = (
    (REPORT, "what the release has, for a browser"),
    (MEASUREMENTS_PAGE, "what was measured, beside the previous release, for a browser"),
    (MEASUREMENTS, "the same for programs"),
    (LOCK, f"`tvmflow run PIPELINE --locked --lock {LOCK}` builds the same files again"),
    (SUMS, f"`sha256sum --check {SUMS}`"),
    (RELEASE_STATEMENT, "a statement about the whole folder, which may be signed"),
    (MEASUREMENTS_STATEMENT, "the same about the measurements"),
)


def make_readme(name: str, lock: LockFile) -> str:
    """Return the README of a release: the same text for the same lock file.

    Args:
        name: Name of the release.
        lock: The lock file of the release.
    """
    folders = [
        f"- [`{recipe}/{target}`]({recipe}/{target}/{README})"
        for recipe, locked in lock.recipes.items()
        for target in locked.targets
    ]
    rows = [f"| [`{file}`]({file}) | {text} |" for file, text in _FILES]
    return "\n".join(
        [
            f"# {name}",
            "",
            "Tuned and verified libraries, made by tvmflow. Each folder has a README of its own:",
            "",
            *folders,
            "",
            "| file | purpose |",
            "|---|---|",
            *rows,
            "",
            "`tvmflow verify .` in this folder compares every file with the statements about them; "
            "`--trusted KEY.pub` asks for signatures as well.",
            "",
        ]
    )
