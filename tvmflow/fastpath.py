"""Answers `tvmflow run` when there is nothing to do, before anything heavy is imported."""

import os
import sys
import time
from collections.abc import Sequence

from tvmflow import delivery, plancache
from tvmflow.decide import Survey
from tvmflow.errors import TvmflowError
from tvmflow.provenance import beside
from tvmflow.report import RunReport, StageReport, render
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import FORMAT, LocalStore

DEFAULT_STORE = "cache"
STORE_VARIABLE = "TVMFLOW_STORE"
MODE_VARIABLE = "TVMFLOW_REMOTE_MODE"


def store_of(argv: Sequence[str]) -> str:
    """The store that a command line means: `--store DIR`, $TVMFLOW_STORE, or `cache` in this folder."""
    chosen = os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    for index, word in enumerate(argv):
        if word == "--store" and index + 1 < len(argv):
            chosen = argv[index + 1]
        elif word.startswith("--store="):
            chosen = word.partition("=")[2]
    return os.path.abspath(chosen)


def must_send(store: LocalStore, argv: Sequence[str]) -> bool:
    """Whether this run may write to a remote, and results wait for that."""
    modes = {*argv, os.environ.get(MODE_VARIABLE), *(word.partition("=")[2] for word in argv)}
    return bool(modes & {"write", "both"}) and any(
        store.notes("spool", at) for at in store.notes("spool")
    )


def answer(argv: Sequence[str]) -> int | None:
    """The exit code of a run that has nothing to do; None when it must be looked at properly."""
    started = time.monotonic()
    store = LocalStore(store_of(argv))
    digests = FileDigests(store)
    try:
        if store.read_note("format") != FORMAT or must_send(store, argv):
            return None
        planned = plancache.load(store, argv, digests)
        if planned is None:
            return None
        survey = Survey(store, digests)
        survey.look(planned.plan)
        if any(decision.kind != "hit" for decision in survey.decisions.values()):
            return None
        # a recipe that went back to what it was: only a run may say that it needs that again
        if any(
            store.last_key(spec.recipe, spec.label) != survey.artifacts[spec.id].key
            for spec in planned.plan.stages
        ):
            return None
        delivered = delivery.delivered(planned.plan, survey.artifacts, store, planned.dist)
        if delivered is None:
            return None
        described = beside.found(planned.plan, survey.artifacts, store, planned.dist)
        if described is None:
            return None
    except (TvmflowError, OSError):
        # the long way meets the same trouble and explains it
        return None
    stages = tuple(
        StageReport(spec.id, "hit", "unchanged", 0.0, survey.artifacts[spec.id].facts)
        for spec in planned.plan.stages
    )
    report = RunReport(stages, (*delivered, *described), (), time.monotonic() - started)
    sys.stdout.write(render(report, as_json=planned.json))
    return report.exit_code
