"""Explanations: why a stage must run or need not, and everything that its result depends on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping

from tvmflow.core.formatting import age_text
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Decision, Json, StageKey
from tvmflow.stages import STAGES
from tvmflow.store.failures import Failure


def explain_stage(
    decision: Decision,
    key: StageKey | None,
    facts: Mapping[str, Json] | None = None,
    *,
    with_recipe: bool = False,
    origin: str = "",
    failure: Failure | None = None,
) -> str:
    """Return why a stage must run or need not, and everything that its result depends on.

    Args:
        decision: Whether it must run, and the causes.
        key: Its key; None when stages before it must run first.
        facts: Those of its result, if there is one.
        with_recipe: Name the stage with its recipe.
        origin: Where the result came from; empty when it was made here.
        failure: The end of the last attempt, if it failed.
    """
    label = decision.stage_id if with_recipe else decision.stage_id.partition(":")[2]
    if key is None:
        lines = [f"{label}: not known yet: {decision.reason}"]
        return "\n".join(lines + _describe_failure(failure, key))
    lines = [f"{label}: must run" if decision.kind == "run" else f"{label}: up to date"]
    lines += [f"  because {cause}" for cause in decision.causes]
    lines += _describe_failure(failure, key) if decision.kind == "run" else []
    lines += [f"  fetched: {origin}"] if origin else []
    lines += ["  depends on", *_list_inputs(key.preimage)]
    stage = STAGES.get(key.preimage["stage"])
    if facts and stage:
        lines += [f"  {line}" for line in stage.explain(facts)]
    lines.append(f"  key {key.digest}")
    return "\n".join(lines)


def _describe_failure(failure: Failure | None, key: StageKey | None) -> list[str]:
    """Return when and how the last attempt failed, with its remedy and its log."""
    if failure is None:
        return []
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time_s))
    age = age_text(time.time() - failure.time_s)
    before = "" if key is None or failure.key in ("", key.digest) else ", before it changed"
    lines = [f"{failure.text} on {when} ({age} ago){before}: {failure.message}"]
    lines += [f"fix: {failure.fix}"] if failure.fix else []
    lines += [f"log: {shortest_path(failure.log)}"] if failure.log else []
    first, *rest = "\n".join(lines).split("\n")
    return [f"  {first}", *(f"    {line}" for line in rest)]


def _list_inputs(preimage: Mapping[str, Json]) -> list[str]:
    """Return a line for each setting, file, package and machine that a key is made of."""
    rows = [("tvmflow", f"version {preimage.get('version')} of {preimage['stage']}", "")]
    rows += [
        ("setting", ".".join(path), json.dumps(value))
        for path, value in _leaves(preimage["settings"])
    ]
    rows += [("file", name, digest[:12]) for name, digest in sorted(preimage["inputs"].items())]
    rows += [("package", name, identity) for name, identity in sorted(preimage["tools"].items())]
    rows.append(("machine", preimage["machine"], ""))
    width = max(len(name) for _, name, _ in rows)
    return [f"    {kind:<8} {name:<{width}}  {value}".rstrip() for kind, name, value in rows]


def _leaves(value: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Yield every setting with its path; lists are leaves."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name in sorted(value):
        yield from _leaves(value[name], (*path, name))
