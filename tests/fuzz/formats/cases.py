"""Runs the cases of a suite, each in a forked child with limits, and judges how each ended.

`python -m tests.fuzz.formats.cases SUITE FOLDER FIRST COUNT REPORT` writes a report as JSON. A
process of its own because forks need one thread: nothing that starts threads may run before them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Protocol

from tvmflow.core.errors import EXIT_BUG, EXIT_CODES, EXIT_FAILED, EXIT_OK, TvmflowError

SECONDS: Final = 30.0
MEMORY_BYTES: Final = 2 * 2**30
TEXT_CHARACTERS: Final = 20_000
# `plan --json` has a document for each stage of each target.
DOCUMENT_CHARACTERS: Final = 100_000
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Ending(NamedTuple):
    """The end of a case: its exit code (negative for a signal), its whole output, its cost."""

    code: int
    text: str
    seconds: float


class Case(NamedTuple):
    """A case: what the child runs, a further check of how it ended (an empty text is good), and what is counted."""

    action: Callable[[], int]
    check: Callable[[Ending], str] = lambda ending: ""
    counts: Callable[[], Mapping[str, int]] = dict


class Suite(Protocol):
    """A module of this folder: `prepare` imports and writes what all cases share."""

    def prepare(self, folder: Path) -> None: ...

    def make_case(self, draw: random.Random, folder: Path) -> Case: ...


def expecting_refusals(action: Callable[[], object]) -> int:
    """Return 0, or 1 after a TvmflowError, which is printed; any other exception is a bug."""
    try:
        action()
    except TvmflowError as error:
        print(error)
        return EXIT_FAILED
    return EXIT_OK


def run_in_child(action: Callable[[], int], folder: Path) -> Ending:
    """Run an action in a fork, in a folder, under the limits; it is killed when its time is over."""
    output = folder.with_suffix(".txt")
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_child(action, folder, output)
    descriptor = os.pidfd_open(pid)
    ready, _, _ = select.select([descriptor], [], [], SECONDS)
    os.close(descriptor)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    text = output.read_text(errors="backslashreplace")
    output.unlink()
    if not ready:
        text += f"\nstill ran after {SECONDS:g} s"
    return Ending(os.waitstatus_to_exitcode(status), text, time.monotonic() - started)


def _be_child(action: Callable[[], int], folder: Path, output: Path) -> NoReturn:
    code = EXIT_BUG
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _virtual_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        code = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _virtual_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def judge(ending: Ending) -> str:
    """Return what is wrong with how a case ended, else an empty text."""
    if ending.code < 0:
        return f"killed by {signal.Signals(-ending.code).name}"
    if ending.code == EXIT_BUG or "Traceback (most recent call last)" in ending.text:
        return "a bug"
    if ending.code not in EXIT_CODES:
        return f"the exit code {ending.code} is not documented"
    if ending.code != EXIT_OK and not ending.text.strip():
        return "refused without a word"
    if control := _CONTROL.search(ending.text):
        return f"prints a control character: {control[0]!r}"
    if len(ending.text) > (DOCUMENT_CHARACTERS if ending.code == EXIT_OK else TEXT_CHARACTERS):
        return f"prints {len(ending.text)} characters"
    return ""


def run_suite(suite: Suite, folder: Path, first: int, count: int) -> dict[str, object]:
    """Run cases by the numbers of their seeds, and return the counts of exit codes, and all findings."""
    suite.prepare(folder)
    codes: Counter[int] = Counter()
    counts: Counter[str] = Counter()
    findings = []
    slowest = 0.0
    for seed in range(first, first + count):
        place = folder / f"case{seed}"
        place.mkdir()
        case = suite.make_case(random.Random(seed), place)
        ending = run_in_child(case.action, place)
        slowest = max(slowest, ending.seconds)
        codes[ending.code] += 1
        counts.update(case.counts())
        if problem := judge(ending) or case.check(ending):
            findings.append({"seed": seed, "problem": problem, "text": ending.text[-3000:]})
        else:
            shutil.rmtree(place)
    return {"codes": dict(codes), "counts": dict(counts), "findings": findings, "slowest": slowest}


if __name__ == "__main__":
    name, base, start, number, report = sys.argv[1:]
    module = importlib.import_module(f"tests.fuzz.formats.{name}")
    result = run_suite(module, Path(base), int(start), int(number))
    Path(report).write_text(json.dumps(result))
