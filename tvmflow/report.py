"""What a run did, as values; and as text and JSON for people and programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_VERIFY
from tvmflow.values import Decision, StageKey

# More stages or files than anybody reads one by one; `--json` has them all.
MANY: Final = 200

_EXITS: Final[Mapping[str, int]] = {
    "hit": EXIT_OK,
    "fetched": EXIT_OK,
    "ran": EXIT_OK,
    "blocked": EXIT_ENVIRONMENT,
    "cancelled": EXIT_INTERRUPTED,
    "rejected": EXIT_VERIFY,
}
_SEVERITY: Final = (EXIT_INTERRUPTED, EXIT_FAILED, EXIT_ENVIRONMENT, EXIT_VERIFY, EXIT_OK)


class StageReport(NamedTuple):
    """How one stage of a run ended.

    `outcome` is `hit`, `fetched` (made elsewhere), `ran`, `failed`, `blocked` (this machine is in the way),
    `crashed`, `timeout`, `rejected` (verify found the library wanting), `cancelled`, or `skipped`
    (because of one before it).
    """

    stage_id: str
    outcome: str
    reason: str
    seconds: float
    facts: dict[str, Any]
    message: str = ""
    fix: str = ""
    log: str = ""


class Traffic(NamedTuple):
    """What went between the store and its remote: results and bytes, how many wait to be sent, what was wrong."""

    place: str
    fetched: int
    fetched_bytes: int
    sent: int
    sent_bytes: int
    waiting: int
    problems: tuple[str, ...]


class RunReport(NamedTuple):
    """A whole run."""

    stages: tuple[StageReport, ...]
    delivered: tuple[str, ...]
    damage: tuple[str, ...]
    seconds: float
    remote: Traffic | None = None

    @property
    def exit_code(self) -> int:
        """The worst of what happened."""
        codes = {_EXITS.get(s.outcome, EXIT_FAILED) for s in self.stages if s.outcome != "skipped"}
        return next((code for code in _SEVERITY if code in codes), EXIT_OK)

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": [stage._asdict() for stage in self.stages],
            "delivered": list(self.delivered),
            "damage": list(self.damage),
            "seconds": self.seconds,
            "remote": self.remote and self.remote._asdict(),
            "exit_code": self.exit_code,
        }


def render(report: RunReport, *, as_json: bool) -> str:
    """The end of a run, for people or as one line of JSON."""
    if as_json:
        return json.dumps({"event": "run_finished", **report.to_json()}) + "\n"
    return summary(report) + "\n"


def seconds_text(seconds: float) -> str:
    """A duration for people: 12 ms, 3.4 s, 2 min 05 s, 3 h 10 min."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def latency_text(seconds: float) -> str:
    """A latency for people: 31.2 µs, 4.56 ms, 1.23 s."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def summary(report: RunReport) -> str:
    """The last lines of a run: what it did, what is wrong, what was measured, and where the files are."""
    lines = [*_failures(report), *_findings(_told(report.stages))]
    ran = sum(stage.outcome == "ran" for stage in report.stages)
    hits = sum(stage.outcome == "hit" for stage in report.stages)
    fetched = _fetched(report)
    if ran or fetched:
        counts = [*([f"{ran} ran"] if ran else []), *fetched, f"{hits} up to date"]
    else:
        counts = [f"all {hits} stages are up to date"]
    for outcome in ("failed", "blocked", "crashed", "timeout", "rejected", "cancelled", "skipped"):
        number = sum(stage.outcome == outcome for stage in report.stages)
        counts += [f"{number} {outcome}"] if number else []
    if not ran and len(counts) == 1:
        counts.append("nothing to run")
    lines.append(f"{', '.join(counts)}  ({seconds_text(report.seconds)})")
    lines += _sent(report.remote)
    lines += [f"  {path}" for path in _grouped(report.delivered)]
    return "\n".join(lines)


def _fetched(report: RunReport) -> list[str]:
    number = sum(stage.outcome == "fetched" for stage in report.stages)
    size = report.remote.fetched_bytes if report.remote else 0
    return [f"{number} fetched ({size_text(size)})"] if number else []


def _sent(remote: Traffic | None) -> list[str]:
    if remote is None:
        return []
    lines = []
    if remote.sent:
        lines.append(
            f"{results_text(remote.sent)} sent to {remote.place} ({size_text(remote.sent_bytes)})"
        )
    if remote.waiting:
        lines.append(
            f"not yet sent to {remote.place}: {results_text(remote.waiting)}; "
            "the next run that may write does it, or `tvmflow cache push`"
        )
    return lines


def results_text(number: int) -> str:
    """So many results, for people."""
    return "1 result" if number == 1 else f"{number} results"


def size_text(size: float) -> str:
    """A size for people: 12.3 MB, 4.5 kB, 678 B."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def printable(text: str) -> str:
    """Text that may be anybody's, from a shared store or another machine's file, without its control signs."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def can_be_shown(stage: str, facts: Mapping[str, Any]) -> bool:
    """Whether facts that came from elsewhere are such as that stage gives, and hold no control signs."""
    report = StageReport(f"recipe:{stage}/target", "fetched", "", 0.0, dict(facts))
    preimage = {"stage": stage, "settings": {}, "inputs": {}, "tools": {}, "machine": ""}
    try:
        text = summary(RunReport((report,), (), (), 0.0))
        text += explanation(
            Decision(report.stage_id, "hit", ""), StageKey("", preimage), report.facts
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return all(sign.isprintable() or sign in "\n\t" for sign in text)


def _told(stages: Sequence[StageReport]) -> Sequence[StageReport]:
    """Those whose findings are shown: of very many stages, only those that ran."""
    if len(stages) <= MANY:
        return stages
    return [stage for stage in stages if stage.outcome != "hit"]


def _grouped(paths: Sequence[str]) -> list[str]:
    """The paths; of very many, how many are in each recipe's folder, or in all of them."""
    if len(paths) <= MANY:
        return list(paths)
    for above in (2, 3):
        folders = Counter(path.rsplit("/", above)[0] for path in paths)
        if len(folders) <= MANY:
            break
    return [f"{folder}/: {number} files" for folder, number in folders.items()]


def explanation(
    decision: Decision,
    key: StageKey | None,
    facts: Mapping[str, Any] | None = None,
    *,
    many: bool = False,
    origin: str = "",
) -> str:
    """Why a stage must run or need not, all that its result depends on, and what is in it (`facts`) where it is there.

    It is named with its recipe where there are many of those. `origin` is where it came from, if not from here.
    """
    label = decision.stage_id if many else decision.stage_id.partition(":")[2]
    if key is None:
        return f"{label}: cannot be told yet: {decision.reason}"
    lines = [f"{label}: must run" if decision.kind == "run" else f"{label}: up to date"]
    lines += [f"  because {cause}" for cause in decision.causes]
    lines += [f"  made elsewhere: {origin}"] if origin else []
    lines.append("  it depends on")
    rows = [("tvmflow", f"{key.preimage['stage']} as this version does it", "")]
    rows += [
        ("setting", ".".join(path), json.dumps(value))
        for path, value in _leaves(key.preimage["settings"])
    ]
    rows += [("file", name, digest[:12]) for name, digest in sorted(key.preimage["inputs"].items())]
    rows += [("package", name, found) for name, found in sorted(key.preimage["tools"].items())]
    rows.append(("machine", key.preimage["machine"], ""))
    width = max(len(name) for _, name, _ in rows)
    lines += [f"    {kind:<8} {name:<{width}}  {value}".rstrip() for kind, name, value in rows]
    for road, kernels in (facts or {}).get("roads", {}).items():
        lines.append(f"  kernels {_ROADS.get(road, 'without a schedule')}")
        lines += [f"    {name}" for name in kernels]
    if tolerance := (facts or {}).get("tolerance"):
        lines.append(f"  {_allowed(tolerance)}")
    lines.append(f"  key {key.digest}")
    return "\n".join(lines)


def _allowed(tolerance: Mapping[str, Any]) -> str:
    """What `verify` lets outputs differ by, and why so much."""
    share = tolerance["of_largest"]
    more = f", or {share:.2%} of an output's largest value where that is more" if share else ""
    return (
        f"outputs may differ by atol {tolerance['atol']:g}{more}, and rtol {tolerance['rtol']:g} "
        f"(the model computes in {_ARITHMETIC[tolerance['for']]})"
    )


_ARITHMETIC: Final = {
    "float32": "float32",
    "float16": "float16, wholly or in part",
    "quantised": "whole numbers",
}


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every setting with its path; lists are leaves."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name in sorted(value):
        yield from _leaves(value[name], (*path, name))


def _failures(report: RunReport) -> list[str]:
    lines = [f"damaged and set aside, made again: {path}" for path in report.damage]
    for stage in report.stages:
        if not stage.message:
            continue
        lines.append(f"{stage.stage_id}: {stage.outcome}: {stage.message}")
        lines += [f"  fix: {stage.fix}"] if stage.fix else []
        lines += [f"  log: {stage.log}"] if stage.log else []
    return lines


def _findings(stages: Iterable[StageReport]) -> list[str]:
    """What tuning and verify found out, for each recipe and target."""
    lines = []
    seconds: dict[str, float] = {}
    for stage in stages:
        _, _, label = stage.stage_id.partition(":")
        name, _, target = label.partition("/")
        if not stage.facts or name not in _DESCRIBE:
            continue
        facts = stage.facts
        if name == "tune":
            spent = facts.get("workloads", ())
            seconds.update({f"{target}/{each['name']}": each["seconds"] for each in spent})
        elif name == "pick_best":
            kernels = [
                {**each, "seconds": seconds.get(f"{target}/{each['name']}", 0.0)}
                for each in facts["kernels"]
            ]
            facts = {**facts, "kernels": kernels}
        lines += [f"{stage.stage_id}: {text}" for text in _DESCRIBE[name](facts)]
    return lines


def _describe_verify(facts: Mapping[str, Any]) -> list[str]:
    if "not_run" in facts:
        return [f"NOT VERIFIED (verify.against: none): {facts['not_run']}"]
    lines = _describe_outputs(facts, facts)
    for name, part in facts.get("parts", {}).items():
        lines += [f"{name}: {line}" for line in _describe_outputs(part, facts)]
    if "ran_on" in facts:
        lines.append(f"ran on {facts['ran_on']}")
    if "latency_not_measured" in facts:
        lines.append(f"latency is not measured: {facts['latency_not_measured']}")
    if facts["against"] == "none":
        lines.append("NOT VERIFIED against a reference (verify.against: none)")
    if "accuracy" in facts:
        theirs = facts.get("reference_accuracy")
        beside = f" (the reference: {theirs:.2%})" if theirs is not None else ""
        lines.append(
            f"accuracy {facts['accuracy']:.2%} on {facts['samples']} held-out samples{beside}"
        )
    return lines + _describe_latency(facts)


def _describe_outputs(found: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Of a model or of a part of it, how its outputs agree."""
    return [
        f"{name} agrees with {facts['reference']} on {facts['samples']} samples "
        f"(largest error: absolute {each['max_abs_error']:.2g}, relative {each['max_rel_error']:.2g}; "
        f"allowed: atol {each['atol']:.2g}, rtol {each['rtol']:.2g})"
        for name, each in found.get("outputs", {}).items()
    ]


def _describe_join(facts: Mapping[str, Any]) -> list[str]:
    """What one part hands to another, and where that has to be copied."""
    lines = []
    for each in facts["handed_over"]:
        there, here = each["devices"]
        way = f"copied from {there} to {here}" if there != here else f"where it is ({here})"
        size = f"{each['bytes'] / 1e3:,.1f} kB"
        lines.append(f"{each['from']} hands {each['tensor']} to {each['to']}: {size}, {way}")
    return lines


def _describe_latency(facts: Mapping[str, Any]) -> list[str]:
    names = {
        "library": "this library",
        "untuned": "untuned",
        "reference": facts.get("reference", ""),
    }
    timed = [(names[which], row) for which, row in facts.get("latency", {}).items()]
    for name, part in facts.get("parts", {}).items():
        timed += [(f"its part {name}", part["latency"])] if "latency" in part else []
    rows = [
        f"    {name:<24} {latency_text(row['median']):>9} {latency_text(row['mean']):>9} "
        f"{latency_text(row['min']):>9} {latency_text(row['max']):>9} {latency_text(row['std']):>9}"
        for name, row in timed
    ]
    head = f"    {'':<24} {'median':>9} {'mean':>9} {'min':>9} {'max':>9} {'std':>9}"
    return ["latency of one call\n" + "\n".join([head, *rows])] if rows else []


def _describe_tasks(facts: Mapping[str, Any]) -> list[str]:
    lines = [f"{facts['workloads']} workloads, {facts['tunable']} of them tunable"]
    if facts["not_tunable"]:
        told = [f"{name} ({why})" for name, why in facts["not_tunable"].items()]
        lines[0] += f"; not: {_named(told)}"
    return lines


_ROADS: Final = {
    "tuned": "tuned",
    "tiled": "in register tiles",
    "rows": "row by row",
    "flat": "element by element",
    "loops": "with their loops shared among the cores",
}


def _describe_build(facts: Mapping[str, Any]) -> list[str]:
    roads = facts["roads"]
    parts = [f"{len(roads[road])} {text}" for road, text in _ROADS.items() if road in roads]
    lines = [f"{facts['kernels']} kernels: {', '.join(parts)}"] if parts else []
    if "none" in roads:
        lines.append(f"WITHOUT A SCHEDULE, so slow: {_named(roads['none'])}")
    return lines


def _describe_tune(facts: Mapping[str, Any]) -> list[str]:
    if not facts["trials"]:
        return ["not tuned (tune.trials is 0)"]
    done = facts["measured"] + facts["reused"]
    failed = f", {facts['failed']} failed" if facts["failed"] else ""
    asked = "" if facts["stopped"] == "time" else f"of {facts['trials']} "
    took = f" in {seconds_text(facts['seconds'])}" if facts["measured"] else ""
    lines = [
        f"{done} {asked}trials "
        f"({facts['measured']} measured{took}, {facts['reused']} known before{failed})"
    ]
    lines += [_STOPPED[facts["stopped"]]] if facts["stopped"] in _STOPPED else []
    if facts["drift"] > _DRIFT:
        lines.append(
            f"the machine changed while it was measured on: one kernel's time by {facts['drift']:.0%}"
        )
    lines += [f"note: {text}" for text in facts["repairs"]]
    if facts["exhausted"]:
        lines.append(f"nothing more to try: {_named(facts['exhausted'])}")
    if facts["untunable"]:
        lines.append(f"no candidate worked: {_named(facts['untunable'])}")
    return lines


def _describe_pick_best(facts: Mapping[str, Any]) -> list[str]:
    if not facts["untuned_us"]:
        return []
    lines = [
        f"{facts['tuned']} of {facts['tunable']} workloads tuned, {facts['coverage']:.0%} of their time; "
        f"all of them: {latency_text(facts['untuned_us'] / 1e6)} untuned, "
        f"{latency_text(facts['tuned_us'] / 1e6)} tuned ({facts['speedup']:.3g} times as fast)"
    ]
    peak = facts["peak_gflops"]
    ceiling = f" (this machine can do {peak:.0f} GFLOPS)" if peak else ""
    rows = facts["kernels"][:_SHOWN_KERNELS]
    if rows:
        lines.append(
            f"what each kernel takes in one inference, the longest first{ceiling}\n"
            + _kernel_table(rows, peak)
        )
    if facts["untried"]:
        lines.append(f"{facts['untried']} workloads have no trial that worked: they stay untuned")
    return lines + [f"not measured again: {name}: {why}" for name, why in facts["errors"].items()]


def _kernel_table(kernels: Sequence[Mapping[str, Any]], peak: float | None) -> str:
    head = f"    {'':<48} {'calls':>5} {'untuned':>9} {'tuned':>9} {'gain':>6} {'GFLOPS':>11} {'saved a minute':>15}"
    lines = [head]
    for kernel in kernels:
        name, calls, untuned = kernel["name"], kernel["calls"], kernel["untuned_us"]
        tuned = untuned if kernel["tuned_us"] is None else kernel["tuned_us"]
        gain = f"{untuned / tuned:.3g}×" if kernel["tuned_us"] is not None else "–"
        short = name if len(name) <= 48 else f"{name[:45]}..."
        lines.append(
            f"    {short:<48} {calls:>5} {latency_text(calls * untuned / 1e6):>9} "
            f"{latency_text(calls * tuned / 1e6):>9} {gain:>6} {_reached(kernel, peak):>11} "
            f"{_rate(kernel, untuned - tuned):>15}"
        )
    return "\n".join(lines)


def _reached(kernel: Mapping[str, Any], peak: float | None) -> str:
    from tvmflow.tuning.roofline import gflops, gflops_text

    value = gflops(kernel)
    return "–" if value is None or value < 1 else gflops_text(value, peak)


def _rate(kernel: Mapping[str, Any], saved_us: float) -> str:
    """What an inference became shorter by, for each minute of tuning in this run."""
    if not kernel["seconds"] or saved_us <= 0:
        return "–"
    return latency_text(kernel["calls"] * saved_us / 1e6 / (kernel["seconds"] / 60))


def _named(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


_STOPPED: Final = {
    "time": "stopped at tune.minutes; raise it and run again to go on",
    "end": "stopped before the budget was spent: no kernel has anything left to try",
}
_SHOWN_NAMES: Final = 3
_SHOWN_KERNELS: Final = 5
_DRIFT: Final = 0.1
_DESCRIBE: Final = {
    "extract_tasks": _describe_tasks,
    "tune": _describe_tune,
    "pick_best": _describe_pick_best,
    "build": _describe_build,
    "join": _describe_join,
    "verify": _describe_verify,
}
