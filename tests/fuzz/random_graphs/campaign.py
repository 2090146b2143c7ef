"""Judges many graphs in child processes, shrinks those that fail, and reports.

    python -m tests.fuzz.random_graphs.campaign [--first SEED] [--count N] [--jobs N] [--operator NAME] [--replay CHOICES]

Prints how many graphs were right, refused, skipped and deviated, and a reproducer for each failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

BATCH: Final = 64
_SECONDS_PER_GRAPH: Final = 60
_SHRINKING_STEPS: Final = 60
FAILURES: Final = ("wrong", "raised", "crashed", "undrawn")


class Finding(NamedTuple):
    """A graph that failed.

    Attributes:
        seed: Its seed.
        operator: Its operator.
        outcome: How it failed.
        reason: In what.
        text: A reproducer.
    """

    seed: int
    operator: str
    outcome: str
    reason: str
    text: str


class Report(NamedTuple):
    """What a campaign found.

    Attributes:
        outcomes: How many graphs ended in each way.
        reasons: The reasons of refusals and the deviations, with how often.
        findings: The failures.
    """

    outcomes: Mapping[str, int]
    reasons: Mapping[str, int]
    findings: Sequence[Finding]

    def __str__(self) -> str:
        lines = [", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))]
        lines += [f"{count:5} {reason}" for reason, count in Counter(self.reasons).most_common()]
        lines += [
            f"\nseed {f.seed}: {f.operator} {f.outcome}: {f.reason}\n{f.text}"
            for f in self.findings
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------- the child


def serve() -> None:
    """Judge what is asked in lines of JSON, each in a fork, and answer with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    # what takes seconds to import, once
    from tests.fuzz.random_graphs import judging

    with tempfile.TemporaryDirectory() as name:
        for line in sys.stdin:
            asked = json.loads(line)
            step = Path(name) / "step.json"
            step.unlink(missing_ok=True)
            if (pid := os.fork()) == 0:
                seconds = asked.pop("seconds")
                # of the CPU's time, which other processes do not shorten; and against deadlocks
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.alarm(20 * seconds)
                # TVM's handler of a crash writes a traceback, again and again
                for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS):
                    signal.signal(number, signal.SIG_DFL)
                print(
                    json.dumps(judging.answer(**asked, folder=Path(name))), file=answers, flush=True
                )
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            if status:
                at = json.loads(step.read_text()) if step.exists() else None
                died = f"the process ended with {os.waitstatus_to_exitcode(status)}"
                print(json.dumps({"died": died, "at": at}), file=answers, flush=True)


# ---------------------------------------------------------------- the parent


class Died(Exception):
    """The process died: how, and at what step."""

    def __init__(self, text: str, at: Any) -> None:
        super().__init__(text)
        self.at = at


class _Child:
    """A process that judges in forks."""

    def __init__(self) -> None:
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.random_graphs.campaign", "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, what: str, seconds: int = _SECONDS_PER_GRAPH, **asked: Any) -> Any:
        """Return the answer.

        Raises:
            Died: when the fork died, or its time was over.
        """
        self._process.stdin.write(json.dumps({"what": what, "seconds": seconds, **asked}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if isinstance(answer, dict) and "died" in answer:
            raise Died(answer["died"], answer["at"])
        return answer

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()
        self._process.wait()


def _judge(child: _Child, seeds: Sequence[int]) -> dict[int, list[str]]:
    """Return the verdict of each seed; graphs that are beside one that crashes are judged again."""
    verdicts: dict[int, list[str]] = {}
    left = list(seeds)
    while left:
        try:
            answers = child.ask("batch", _SECONDS_PER_GRAPH + 3 * len(left), seeds=left)
            return verdicts | {int(seed): verdict for seed, verdict in answers.items()}
        except Died as died:
            stage, suspects = died.at or ("drawing", left)
            if len(suspects) == 1:
                ending = (
                    ["skipped", "ONNX Runtime crashes"]
                    if stage == "peers"
                    else ["crashed", str(died)]
                )
                verdicts[suspects[0]] = ending
            else:
                for seed in suspects:
                    verdicts |= _judge(child, [seed])
            left = [seed for seed in left if seed not in verdicts]
    return verdicts


def _judge_choices(child: _Child, seed: int, choices: Sequence[int]) -> list[str]:
    try:
        answer: list[str] = child.ask("one", seeds=[seed], choices=list(choices))
    except Died as died:
        return ["skipped" if died.at and died.at[0] == "peers" else "crashed", str(died)]
    return answer


def _candidates(choices: Sequence[int]) -> Iterator[list[int]]:
    """Yield plainer choices, the plainest first."""
    length = len(choices)
    for size in (length // 2, length // 4, length // 8, 4, 2, 1):
        for start in range(0, length, max(size, 1)):
            part = choices[start : start + size]
            if any(part):
                yield [*choices[:start], *[0] * len(part), *choices[start + size :]]
    for place, value in enumerate(choices):
        if value > 1:
            yield [*choices[:place], value // 2, *choices[place + 1 :]]


def _shrink(child: _Child, seed: int, outcome: str) -> list[int]:
    """Return plainer choices that fail alike."""
    choices: list[int] = child.ask("choices", seeds=[seed])
    steps, tried = 0, set()
    is_plainer = True
    while is_plainer and steps < _SHRINKING_STEPS:
        is_plainer = False
        for candidate in _candidates(choices):
            if steps >= _SHRINKING_STEPS or tuple(candidate) in tried:
                continue
            tried.add(tuple(candidate))
            steps += 1
            if _judge_choices(child, seed, candidate)[0] == outcome:
                choices, is_plainer = candidate, True
                break
    while choices and choices[-1] == 0:
        choices.pop()
    return choices


def _reproduce(child: _Child, seed: int, outcome: str) -> str:
    """Return the text of a small graph that fails alike."""
    if outcome == "undrawn":
        return ""
    choices = _shrink(child, seed, outcome)
    replay = ",".join(map(str, choices))
    text = child.ask("text", seeds=[seed], choices=choices)
    verdict = _judge_choices(child, seed, choices)
    return f"{text}\n{verdict}\nagain: python -m tests.fuzz.random_graphs.campaign --first {seed} --replay {replay or 0}"


def run(seeds: Sequence[int], jobs: int = 1, *, shrinks: bool = True) -> Report:
    """Judge the graphs of some seeds in so many processes at once."""
    batches = [seeds[first : first + BATCH] for first in range(0, len(seeds), BATCH)]
    parts = [batches[n::jobs] for n in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        reports = list(pool.map(lambda part: _run_batches(part, shrinks), parts))
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for report in reports:
        outcomes += Counter(report.outcomes)
        reasons += Counter(report.reasons)
    return Report(outcomes, reasons, [f for report in reports for f in report.findings])


def _explain_known(name: str, outcome: str, reason: str) -> str:
    """Return what is known of a failure, or an empty string."""
    from tests.fuzz.random_graphs.judging import KNOWN

    if outcome not in ("wrong", "raised", "crashed"):
        return ""
    found = (
        why for which, what, why in KNOWN if re.search(which, name) and re.search(what, reason)
    )
    return next(found, "")


def _run_batches(batches: Sequence[Sequence[int]], shrinks: bool) -> Report:
    from tests.fuzz.random_graphs.operators import name_of

    child = _Child()
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    findings = []
    started = time.monotonic()
    for number, batch in enumerate(batches):
        for seed, verdict in _judge(child, batch).items():
            outcome, reason = verdict
            name = name_of(seed)
            if known := _explain_known(name, outcome, reason):
                outcome, reason = "known", known
            outcomes[outcome] += 1
            if outcome in FAILURES:
                text = _reproduce(child, seed, outcome) if shrinks else ""
                findings.append(Finding(seed, name, outcome, reason, text))
                print(f"seed {seed}: {name} {outcome}: {reason[:300]}", file=sys.stderr, flush=True)
            elif outcome != "right":
                reasons[f"{outcome}: {name}: {reason}"] += 1
        done = sum(len(part) for part in batches[: number + 1])
        print(
            f"{done} graphs in {time.monotonic() - started:.0f} s: {dict(outcomes)}",
            file=sys.stderr,
            flush=True,
        )
    child.close()
    return Report(outcomes, reasons, findings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000, help="how many graphs")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--operator", help="only graphs of this operator")
    parser.add_argument("--replay", help="choices of the first seed's operator, with commas")
    parser.add_argument("--plain", action="store_true", help="shrink nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve()
        return
    if args.replay is not None:
        choices = [int(n) for n in args.replay.split(",")]
        child = _Child()
        print(child.ask("text", seeds=[args.first], choices=choices))
        print(_judge_choices(child, args.first, choices))
        child.close()
        return
    from tests.fuzz.random_graphs.operators import RULES

    seeds = list(range(args.first, args.first + args.count))
    if args.operator:
        names = sorted(RULES)
        place = names.index(args.operator)
        start = args.first - args.first % len(names) + place
        seeds = [start + len(names) * n for n in range(args.count)]
    print(run(seeds, args.jobs, shrinks=not args.plain))


if __name__ == "__main__":
    main()
