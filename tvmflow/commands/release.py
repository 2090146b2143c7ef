"""What `tvmflow run PIPELINE` says of a release."""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmflow.commands.run import Done
from tvmflow.commands.words import say, say_json
from tvmflow.decide import surveyed
from tvmflow.errors import EXIT_OK, EXIT_VERIFY
from tvmflow.locks import make_lock, pin, read_lock
from tvmflow.recipe import Pipeline, Release
from tvmflow.releases import Released, make_release
from tvmflow.releases.folder import LOCK
from tvmflow.report import latency_text
from tvmflow.stores.local import LocalStore


def release(
    args: argparse.Namespace, done: Done, pipeline: Pipeline, wanted: Release, store: LocalStore
) -> int:
    """Make the release of a run that ended well, and say what it is; 3 when a gate is missed."""
    from tvmflow.targets.devices import machine_locks

    plan = done.prepared.plan
    survey = surveyed(plan, store)
    folder = pipeline.path.parent / wanted.folder / f"{pipeline.name}-{wanted.version}"
    kept = read_lock(Path(done.lock)) if done.lock else None
    text = make_lock(done.prepared.recipes, plan, survey, store, folder / LOCK, kept)
    found = make_release(
        pipeline, wanted, text, plan, survey.artifacts, store, Path(machine_locks())
    )
    if not found.misses:
        pin(store, found.folder / LOCK, survey)
    if args.json:
        told = {
            "event": "released",
            "folder": str(found.folder),
            "new": found.new,
            "against": found.against,
            "misses": [miss._asdict() for miss in found.misses],
            "rows": [row._asdict() for row in found.rows],
        }
        say_json(told)
    else:
        say(*_lines(found))
    return EXIT_VERIFY if found.misses else EXIT_OK


def _lines(found: Released) -> list[str]:
    lines = []
    for row in found.rows:
        if row.timed:
            now, before = row.timed
            lines.append(
                f"{row.place}: {latency_text(now)} a call, {latency_text(before)} in {found.against} "
                f"({now / before - 1:+.1%}, side by side)"
            )
        elif row.same:
            lines.append(f"{row.place}: the same library as in {found.against}")
        elif row.untimed:
            lines.append(f"{row.place}: not timed beside {found.against}: {row.untimed}")
    if found.misses:
        lines += [f"{miss.place}: {miss.gate}: {miss.text}" for miss in found.misses]
        lines.append(
            f"NOT RELEASED: {len(found.misses)} gates were missed; {found.folder} was not made"
        )
    elif found.new:
        lines.append(f"released: {found.folder}")
    else:
        lines.append(f"released before, and the same: {found.folder}")
    return lines
