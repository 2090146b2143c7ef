"""The end of a run's output: problems, a row per build, a headline, counts, delivered files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from tvmflow.core.codec import to_json
from tvmflow.core.formatting import (
    count_text,
    duration_text,
    excerpt,
    find_width,
    latency_text,
    names_text,
    printable,
    printable_lines,
    shorten,
    size_text,
)
from tvmflow.core.text import table
from tvmflow.engine.builds import Build, Peer, Speedup, list_builds
from tvmflow.engine.report import MAX_SHOWN, STOPPED, ReportedFacts, RunReport, StageReport
from tvmflow.stages import STAGES
from tvmflow.stages.base import name_some
from tvmflow.store.remote.client import Traffic

_PROBLEMS: Final = ("failed", "blocked", "crashed", "timeout", "rejected", STOPPED, "skipped")
_MAX_ROWS: Final = 30
# With more builds than this, only the table is printed, without details.
_MAX_DESCRIBED: Final = 3
_MAX_NAME: Final = 40
_MAX_LINE: Final = 120
_NUMBERS: Final = ("error", "error vs float", "accuracy", "untuned", "latency", "library")
# A narrow terminal omits these columns in this order, and then other runtimes.
_EXPENDABLE: Final = ("stages", "inputs", "error", "untuned")
_UNKNOWN: Final = "–"
# Columns that are hidden if all rows have the same value, and columns that may have empty cells.
_TELLING: Final = ("inputs", "stages")
_MARKS: Final = ("stages", "")
# Suffixes of the documentation files that are delivered beside libraries.
_ABOUT: Final = (".json", ".jsonl", ".svg", ".md", ".html")


def render(report: RunReport, *, as_json: bool, quiet: bool = False, verbose: bool = False) -> str:
    """Return the end of a run's output, for people (see `summary`) or as one line of JSON."""
    if as_json:
        builds = to_json(list_builds(report))
        return json.dumps({"event": "run_finished", **report.to_json(), "builds": builds}) + "\n"
    text = summary(report, quiet=quiet, verbose=verbose, width=find_width())
    return f"{text}\n" if text else ""


def summary(
    report: RunReport, *, quiet: bool = False, verbose: bool = False, width: int | None = None
) -> str:
    """Return the last lines of a run.

    `quiet` prints only problems and a line per delivery; `verbose` adds each stage's text and every delivered file.
    """
    lines = list(_list_problems(report))
    builds = list_builds(report)
    if quiet:
        for build in builds:
            parts = [verdict_text(build), f"{build.folder}/" if build.folder else ""]
            lines += [f"{build.name}: {', '.join(filter(None, parts))}"] if any(parts) else []
        return printable_lines("\n".join(lines))
    is_stopped = any(stage.outcome == STOPPED for stage in report.stages)
    stopped = "; the same command continues from here" if is_stopped else ""
    if verbose:
        lines += _describe_results(report.stages)
    lines += describe_builds(builds, width)
    lines += [
        f"{count_stages(report.stages, report.remote)}  ({duration_text(report.seconds)}){stopped}",
        *_describe_uploads(report.remote),
    ]
    paths = report.delivered if verbose else _list_folders(report.delivered, builds)
    lines += [f"  {path}" for path in _group_paths(paths)]
    return printable_lines("\n".join(lines))


def _list_problems(report: RunReport) -> Iterator[str]:
    for path in report.damage:
        yield f"damaged file set aside, and what was in it made again: {path}"
    for stage in report.stages:
        if stage.outcome == STOPPED:
            traits = STAGES[stage.stage].TRAITS.run if stage.stage in STAGES else None
            kept = "; its measured trials are kept" if traits and traits.uses_ledger else ""
            yield f"{stage.stage_id}: stopped{kept}"
        elif stage.message:
            yield f"{stage.stage_id}: {stage.outcome}: {stage.message}"
            if stage.fix:
                yield f"  fix: {stage.fix}"
            if stage.log:
                yield f"  log: {stage.log}"


def _describe_results(stages: Sequence[StageReport]) -> list[str]:
    """Return each stage's text about its result; with very many stages, only for those that ran."""
    shown = [stage for stage in stages if stage.facts]
    if len(stages) > MAX_SHOWN:
        shown = [stage for stage in shown if stage.outcome != "hit"]
    facts = ReportedFacts(stages)
    return [f"{stage.stage_id}: {line}" for stage in shown for line in facts.describe(stage)]


def describe_builds(builds: Sequence[Build], width: int | None) -> Iterator[str]:
    """Yield the builds' warnings, their table, details of a few builds, and the headline."""
    yield from _list_warnings(builds)
    measured = [build for build in builds if verdict_text(build) or build.size_bytes is not None]
    if measured:
        yield from _format_table(_select_rows(measured), width)
    if len(measured) > _MAX_ROWS:
        yield f"… and {len(measured) - _MAX_ROWS} more; --json has all of them"
    if len(measured) <= _MAX_DESCRIBED:
        yield from _list_slowest_kernels(measured, width)
        details = {
            "quantized: ": [build.quantization for build in measured],
            "never exercised: ": ["; ".join(build.unexercised) for build in measured],
            "": [build.search for build in measured],
        }
        for kind, texts in details.items():
            for build, text in zip(measured, texts, strict=True):
                yield from [f"{build.name}: {kind}{text}"] if text else []
    # If all builds failed, the table has already said so.
    if any(build.verdict or build.size_bytes is not None for build in measured):
        yield make_headline(measured)


def _list_warnings(builds: Sequence[Build]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for build in builds:
        for warning in build.warnings:
            names.setdefault(warning, []).append(build.name)
    for warning, own in names.items():
        yield f"{names_text(own, _MAX_DESCRIBED)}: {warning}"


def _list_slowest_kernels(builds: Sequence[Build], width: int | None) -> Iterator[str]:
    """Yield the slowest kernels with their nodes; with several builds, only the slowest of each."""
    timed = [build for build in builds if build.slowest_kernels]
    if not timed:
        return
    yield "slowest kernels, by their share of the time"
    for build in timed:
        for kernel in build.slowest_kernels[: 1 if len(builds) > 1 else None]:
            owner = f"{build.name}  " if len(builds) > 1 else ""
            nodes = f"  {name_some(kernel.nodes)}" if kernel.nodes else ""
            text = f"{kernel.share:5.0%}  {owner}{kernel.name}{nodes}"
            yield excerpt(text, (width or _MAX_LINE) - 1)


def _select_rows(builds: Sequence[Build]) -> list[Build]:
    """Return the builds for the table; if there are too many, those with problems and new ones first."""
    if len(builds) <= _MAX_ROWS:
        return list(builds)
    order = sorted(builds, key=lambda build: (build.verdict == "verified", build.reused))
    chosen = {build.name for build in order[:_MAX_ROWS]}
    return [build for build in builds if build.name in chosen]


def tabulate_builds(builds: Sequence[Build]) -> list[dict[str, str]]:
    """Return a row per build, as cells by heading; columns that are empty in all rows are left out."""
    peers = _list_peers(builds)
    names = [shorten(build.name, _MAX_NAME) for build in builds]
    if len(set(names)) < len(names):
        names = [printable(build.name) for build in builds]
    rows = [_cells(name, build, peers) for name, build in zip(names, builds, strict=True)]
    known = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    # A value that all rows share appears in the counts instead.
    known = [name for name in known if name not in _TELLING or len({row[name] for row in rows}) > 1]
    return [
        {name: row[name] or ("" if name in _MARKS else _UNKNOWN) for name in known} for row in rows
    ]


def _list_peers(builds: Sequence[Build]) -> list[str]:
    return list(dict.fromkeys(peer.name for build in builds for peer in build.peers))


def _format_table(builds: Sequence[Build], width: int | None) -> list[str]:
    peers = _list_peers(builds)
    expendable = (*_EXPENDABLE, *reversed(peers), "accuracy")
    rows = tabulate_builds(builds)
    return table(rows, right=(*_NUMBERS, *peers), expendable=expendable, width=width)


def _cells(name: str, build: Build, peers: Sequence[str]) -> dict[str, str]:
    latencies = {peer.name: peer.latency_s for peer in build.peers}
    return {
        "build": name,
        "inputs": excerpt(build.inputs, _MAX_NAME),
        "result": verdict_text(build),
        "error": _known(build.error, "{:.1e}".format),
        "error vs float": _known(build.quantization_error, "{:.2%}".format),
        "accuracy": _known(build.accuracy, "{:.2%}".format),
        "untuned": _known(build.untuned_latency_s, latency_text),
        "latency": _known(build.latency_s, latency_text),
        **{name: _known(latencies.get(name), latency_text) for name in peers},
        "library": _known(build.size_bytes, size_text),
        "stages": "up to date" if build.reused else "",
        "": "Pareto-optimal" if build.is_pareto_optimal else "",
    }


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _list_folders(paths: Sequence[str], builds: Sequence[Build]) -> list[str]:
    """Return a line for each build's files, which names its libraries, and the paths of all other files."""
    groups: dict[str, list[str]] = {f"{build.folder}/": [] for build in builds if build.folder}
    others = []
    for path in paths:
        ends = [index + 1 for index, char in enumerate(path) if char == "/"]
        prefix = next((path[:end] for end in ends if path[:end] in groups), "")
        groups[prefix].append(path.removeprefix(prefix)) if prefix else others.append(path)
    return [f"{prefix}: {_name_files(own)}" for prefix, own in groups.items() if own] + others


def _name_files(paths: Sequence[str]) -> str:
    """Return the names of a build's libraries, and how many other files it has."""
    libraries = dict.fromkeys(
        "".join(path.partition("/")[:2]) for path in paths if not path.endswith(_ABOUT)
    )
    about = sum(path.endswith(_ABOUT) for path in paths)
    if not libraries:
        return count_text(about, "file")
    return ", ".join([*libraries, *([count_text(about, "metadata file")] if about else [])])


def count_stages(reports: Sequence[StageReport], remote: Traffic | None = None) -> str:
    """Return how many stages had which outcome: `2 ran, 5 up to date, 1 failed`."""
    outcomes = Counter(stage.outcome for stage in reports)
    hits, ran, fetched = outcomes["hit"], outcomes["ran"], outcomes["fetched"]
    problems = [
        f"{outcomes[outcome]} {'stopped' if outcome == STOPPED else outcome}"
        for outcome in _PROBLEMS
        if outcomes[outcome]
    ]
    if not (ran or fetched or problems):
        stages = "1 stage is" if hits == 1 else f"all {hits} stages are"
        return f"{stages} up to date, nothing to run"
    size = f" ({size_text(remote.fetched_bytes)})" if remote else ""
    counts = [f"{ran} ran"] if ran else []
    counts += [f"{fetched} fetched{size}"] if fetched else []
    return ", ".join([*counts, f"{hits} up to date", *problems])


def _describe_uploads(remote: Traffic | None) -> Iterator[str]:
    if remote and remote.uploaded:
        results = count_text(remote.uploaded, "result")
        yield f"{results} uploaded to {remote.address} ({size_text(remote.uploaded_bytes)})"
    if remote and remote.waiting:
        results = count_text(remote.waiting, "result")
        later = "the next run that may write uploads them, and so does `tvmflow cache push`"
        yield f"{results} not yet uploaded to {remote.address}: {later}"


def _group_paths(paths: Sequence[str]) -> list[str]:
    """Return the paths; if there are very many, the number of files in each target's or recipe's folder."""
    if len(paths) <= MAX_SHOWN:
        return list(paths)
    for levels in (2, 3):
        folders = Counter(path.rsplit("/", levels)[0] for path in paths)
        if len(folders) <= MAX_SHOWN:
            break
    return [f"{folder}/: {count_text(number, 'file')}" for folder, number in folders.items()]


# From this ratio on, a speedup is shown like `1.1×` rather than as a percentage.
_MIN_FACTOR: Final = 1.095
_WHOLE_FACTOR: Final = 9.95
# If the limits of a speedup differ by this factor, the headline shows them beside the median.
_WIDE: Final = 1.5
_UNTUNED: Final = "the same model untuned"
_REJECTED: Final = "rejected"
_VERDICTS: Final = {"verified": "verified", _REJECTED: "REJECTED", "not verified": "NOT VERIFIED"}


def make_headline(builds: Sequence[Build]) -> str:
    """Return the headline for some builds; empty if nothing is known about them."""
    if len(builds) == 1:
        parts = headline_parts(builds[0])
        return f"{builds[0].name}: {', '.join(parts)}" if parts else ""
    return "; ".join(_summarize(builds)) if any(map(headline_parts, builds)) else ""


def headline_parts(build: Build) -> tuple[str, ...]:
    """Return the headline's parts about a build, as far as known: speed, verdict, accuracy, size."""
    parts = [_speed_text(build), verdict_text(build)]
    if build.accuracy is not None:
        parts.append(f"accuracy {build.accuracy:.2%}")
    if build.size_bytes is not None:
        parts.append(size_text(build.size_bytes))
    return tuple(part for part in parts if part)


def verdict_text(build: Build) -> str:
    """Return the verdict on a library, in capitals if it is bad; empty if unknown."""
    if build.verdict:
        return _VERDICTS[build.verdict]
    if build.problems:
        return "FAILED"
    if build.is_stopped:
        return "stopped"
    return "skipped" if build.is_skipped else ""


def _speed_text(build: Build) -> str:
    """Return a library's speedup over the fastest peer, else over untuned; without both, its latency."""
    if build.verdict == _REJECTED:
        return ""
    peer = choose_peer(build)
    if peer is not None and peer.speedup is not None:
        return speedup_text(peer.speedup, peer.name)
    if build.tuning_speedup is not None:
        return speedup_text(build.tuning_speedup, _UNTUNED)
    return "" if build.latency_s is None else f"{latency_text(build.latency_s)} per call"


def choose_peer(build: Build) -> Peer | None:
    """Return the fastest runtime whose outputs agree with the reference's; None if there is none."""
    compared = [peer for peer in build.peers if peer.speedup is not None and not peer.differs]
    return min(compared, key=lambda peer: peer.latency_s, default=None)


def speedup_text(speedup: Speedup, name: str) -> str:
    """Return a speedup in words; a difference within the noise is not claimed."""
    judgement, median, low, high = speedup.judgement, speedup.median, speedup.low, speedup.high
    if judgement == "equal":
        return f"as fast as {name}, within the noise"
    if judgement == "unclear":
        limits = f"{low:.2g} to {high:.2g} times as fast"
        return f"the machine was too noisy to compare it with {name} ({limits})"
    is_faster = judgement == "more"
    factor, low, high = (median, low, high) if is_faster else (1 / median, 1 / high, 1 / low)
    if factor < _MIN_FACTOR:
        return f"{factor - 1:.0%} {'faster' if is_faster else 'slower'} than {name}"
    noise = f" (noisy: {_round_factor(low)}–{_round_factor(high)})" if high > low * _WIDE else ""
    if is_faster:
        return f"{_round_factor(factor)} times as fast as {name}{noise}"
    return f"SLOWER: {_round_factor(factor)} times the time of {name}{noise}"


def _round_factor(factor: float) -> str:
    return f"{factor:.{1 if factor < _WHOLE_FACTOR else 0}f}"


def _summarize(builds: Sequence[Build]) -> Iterator[str]:
    """Yield how many builds have which verdict, and the best and the worst build."""
    verdicts = Counter(verdict_text(build) for build in builds)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items() if verdict)
    number = count_text(len(builds), "build")
    yield f"{number}: {counts}" if counts else number
    compared = _ranked(builds, lambda build: (peer := choose_peer(build)) and peer.speedup)
    ranked = compared or _ranked(builds, lambda build: build.tuning_speedup)
    if len(ranked) > 1:
        yield f"best: {ranked[-1].name}, {_speed_text(ranked[-1])}"
        yield f"worst: {ranked[0].name}, {_speed_text(ranked[0])}"


def _ranked(
    builds: Iterable[Build], find_speedup: Callable[[Build], Speedup | None]
) -> list[Build]:
    """Return the builds that have a speedup and were not rejected, slowest first."""
    known = [
        (speedup.median, build)
        for build in builds
        if build.verdict != _REJECTED and (speedup := find_speedup(build))
    ]
    return [build for _, build in sorted(known, key=lambda entry: entry[0])]
