"""Checks the subject of a commit: `python tools/check_subject.py MESSAGE_FILE`, as Git's hook commit-msg calls it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

MAX_SUBJECT_LENGTH: Final = 72
"""Characters that `git log --oneline` and most web pages show without wrapping."""
_SUBJECT: Final = re.compile(r"[\w./-][\w ,./-]*: \S")
_WRITTEN_BY_GIT: Final = re.compile(r"(?:fixup|squash|amend)! |Merge |Revert \"|Reapply \"")
"""What `git commit --fixup`, `git merge` and `git revert` write."""


def subject_problems(subject: str) -> list[str]:
    """Return what is wrong with the subject of a commit, each with the remedy; empty if it is good."""
    if _WRITTEN_BY_GIT.match(subject):
        return []
    problems = []
    if not _SUBJECT.match(subject):
        problems.append("it names no area: write `area: what changes`, such as `onnx: import Det`")
    if len(subject) > MAX_SUBJECT_LENGTH:
        problems.append(
            f"it has {len(subject)} characters: write at most {MAX_SUBJECT_LENGTH}, and the rest in the body"
        )
    if ", and" in subject:
        problems.append('it has ", and": make a commit of each change')
    return problems


def main(path: Path) -> int:
    """Print the problems of the subject in a file with a commit's message, and return the exit code."""
    lines = path.read_text(encoding="utf-8").splitlines()
    subject = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    problems = subject_problems(subject)
    for problem in problems:
        print(f"subject {subject!r}: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
