"""Pages of the documentation: their blocks, the commands in these, and a folder in which they run.

A comment before a block says what a reader need not see:

- `<!-- file: NAME -->`: the block is the content of a file, which later commands find.
- `<!-- exit code: N -->`: the exit code of the block's last command, where it is not 0.
- `<!-- setup: COMMAND -->`, anywhere on a page: a command that a test runs there, for what follows.
- `<!-- not run: REASON -->`: the block cannot run in a test; its commands are parsed all the same.

In an output, `…` stands for any text, or alone on a line for any lines. Times, sizes, dates, digests,
measured figures, how often something was measured and waits for a lock may differ: see `mask`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.targets.host import CPU_VARIABLE

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = tuple(
    sorted(
        path.relative_to(ROOT)
        for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"))
        if path.name not in ("first-hour.md", "first-hour-models.md")
    )
)
"""All pages; the page of the first hour is the output of its script."""

_BLOCK: Final = re.compile(
    r"^<!-- setup: (?P<setup>[^\n]*) -->$|(?:^ *<!-- (?P<name>file|exit code|not run): (?P<value>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<kind>[a-z+-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_HEREDOC: Final = re.compile(r"<<-?\s*'?(\w+)'?")
_SENTINEL: Final = "=== end of a command, exit code "
_TRIALS: Final = re.compile(r"trials: \d+")
_MASKS: Final = (
    (r"\x1b\[[0-9;]*m", ""),
    # another command of this machine holds the lock
    (r"(?m)^.*\bwaiting for .+, held by .+\n", ""),
    (r"\b(?:[0-9a-f]{64}|[0-9a-f]{12})\b", "DIGEST"),
    (r"\b\d{4}-\d\d-\d\d(?:T[\d:+]+| [\d:]+)?", "DATE"),
    (r"\b\d[\d,.]*(?:e-?\d+)? ?(?:ns|µs|ms|s|min|h|d)\b", "TIME"),
    (r"\bTIME(?: TIME)+\b", "TIME"),
    (r"\b\d[\d,.]* ?(?:B|kB|MB|GB|KiB|MiB|GiB|bytes)\b", "SIZE"),
    (r"[-+]?\b\d[\d,.]*(?:e-?\d+)? ?(?:GFLOPS|×|x|times|%)", "FIGURE"),
    (r"\b\d+ (?=(?:pairs|repeats)\b)", "COUNT "),
    (r"\b\d+(?:\.\d+){2,}[\w.+]*", "VERSION"),
    (r"\b\d[\d.]*e-\d+", "FIGURE"),
    (r"\b\d+\.\d+\b", "FIGURE"),
    (r"[ \t]+", " "),
)
"""What may differ from run to run, and what it is replaced by; widths of columns differ with it."""


class Block(NamedTuple):
    """A block of code of a page.

    Attributes:
        place: `file:line` of its fence.
        kind: The word after the fence: `console`, `yaml`, …
        text: Its lines.
        marker: The name of the comment before it, or an empty string.
        value: What the comment says.
    """

    place: str
    kind: str
    text: str
    marker: str
    value: str

    @property
    def runs(self) -> bool:
        """True if a test runs its commands."""
        return self.kind == "console" and self.marker != "not run"


class Command(NamedTuple):
    """A command of a console block with the output that the page shows."""

    place: str
    line: str
    output: str
    exit_code: int


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, which is a path from the root of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    listed = []
    for match in _BLOCK.finditer(text):
        if match["setup"]:
            line = text.count("\n", 0, match.start()) + 1
            listed.append(Block(f"{page}:{line}", "console", f"$ {match['setup']}\n", "setup", ""))
            continue
        line = text.count("\n", 0, match.start("kind")) + 1
        indent = len(match["indent"])
        lines = "".join(row[indent:] or "\n" for row in match["text"].splitlines(keepends=True))
        listed.append(
            Block(f"{page}:{line}", match["kind"], lines, match["name"] or "", match["value"] or "")
        )
    return listed


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block: what follows `$ `, with continued lines."""
    listed: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            listed.append(Command(block.place, _whole_command(line[2:], lines), "", 0))
        elif not listed:
            raise AssertionError(f"{block.place}: a console block begins with a command: `$ …`")
        else:
            listed[-1] = listed[-1]._replace(output=f"{listed[-1].output}{line}\n")
    if block.marker == "exit code":
        listed[-1] = listed[-1]._replace(exit_code=int(block.value))
    return listed


def _whole_command(line: str, lines: Iterator[str]) -> str:
    while line.endswith("\\"):
        line += "\n" + next(lines)
    if word := _HEREDOC.search(line):
        while not line.endswith(f"\n{word[1]}"):
            line += "\n" + next(lines)
    return line


def tvmflow_arguments(block: Block) -> Iterator[list[str]]:
    """Give the arguments of each command line of tvmflow in a block."""
    for command in commands(block):
        first = command.line.replace("\\\n", " ").splitlines()[0]
        for part in re.split(r"\s(?:\|\|?|&&?|;|>)\s|^\(|\)$", first):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words[:1] == ["tvmflow"]:
                yield words[1:]


def mask(text: str) -> str:
    """Return an output without what may differ from run to run."""
    for pattern, name in _MASKS:
        text = re.sub(pattern, name, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def matches(shown: str, output: str) -> bool:
    """Return whether an output is the one that a page shows."""
    parts = []
    for line in mask(shown).splitlines():
        if line.strip() == "…":
            parts.append("(?:.*\n)*?")
        else:
            parts.append(re.escape(line).replace("…", ".*") + "\n")
    return re.fullmatch("".join(parts), mask(output)) is not None


class Sandbox:
    """A folder with the repository's recipes and pipelines, and a home of its own."""

    def __init__(self, folder: Path, store: Path | None = None) -> None:
        """Make the folder; tuning budgets are cut to a few trials."""
        self.folder = folder
        for name in ("recipes", "pipelines"):
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pt2", "squeezenet1*")
            )
        for path in folder.glob("*/*.yaml"):
            path.write_text(_TRIALS.sub("trials: 8", path.read_text()))
        tools = folder / ".tools"
        tools.mkdir()
        (tools / "tvmflow").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tvmflow "$@"\n')
        (tools / "tvmflow").chmod(0o755)
        # a symbolic link to it would not find the packages of a virtual environment
        (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (tools / "python").chmod(0o755)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == CPU_VARIABLE or not name.startswith("TVMFLOW_")
        }
        search_path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **kept,
            "HOME": str(folder),
            "PATH": search_path,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
        }
        if store:
            self.environment["TVMFLOW_STORE"] = str(store)

    def run(self, page: Path, timeout_s: float) -> list[str]:
        """Run all commands of a page in one shell, in order, and return what differs from the page."""
        script, expected = ["exec 2>&1"], []
        for block in blocks(page):
            if block.marker == "file":
                target = shlex.quote(str(self.folder / block.value))
                script.append(f"mkdir -p $(dirname {target})\ncat > {target} <<'END OF FILE'")
                script += [block.text.rstrip("\n"), "END OF FILE"]
            elif block.runs:
                for command in commands(block):
                    script += [command.line, f"printf '\\n{_SENTINEL}%s\\n' $?"]
                    expected.append(command)
        path = self.folder / ".tools" / "page.sh"
        path.write_text("\n".join(script) + "\n", encoding="utf-8")
        done = subprocess.run(
            ["bash", str(path)],
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        outputs = re.split(rf"\n{_SENTINEL}(\d+)\n", done.stdout)
        results = zip(outputs[::2], outputs[1::2], strict=False)
        problems = [
            problem
            for command, (output, code) in zip(expected, results, strict=True)
            if (problem := _difference(command, output, int(code)))
        ]
        return problems


def _difference(command: Command, output: str, code: int) -> str:
    if code == command.exit_code and (not command.output or matches(command.output, output)):
        return ""
    return (
        f"{command.place}: $ {command.line}\n--- the page\n{command.output}"
        f"--- now (exit code {code}, expected {command.exit_code})\n{output}"
    )
