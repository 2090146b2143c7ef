"""Facts of targets: what LLVM answers for this machine and TVM build.

LLVM is queried once, then its answers are read from the store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Final

from tvmflow.core import packages
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json
from tvmflow.core.slow_steps import IDENTITY_WAIT, explain_wait
from tvmflow.core.types import Json
from tvmflow.store.local import LocalStore
from tvmflow.targets.host import Host
from tvmflow.targets.llvm_query import TargetFacts, query_cpus_in_process, query_targets_in_process
from tvmflow.targets.tvm_target import TvmTarget

_WAIT: Final = (
    "asking LLVM about the targets: a few seconds, once for each target and version of TVM"
)

_log = logging.getLogger(__name__)

_VERSION: Final = 3
"""Raise it when `llvm_query` answers in another way."""

Query = Callable[[Sequence[Json]], list[Json]]


def load_target_facts(
    store: LocalStore,
    targets: Sequence[TvmTarget | None],
    host: Host,
    query: Query = query_targets_in_process,
) -> list[TargetFacts]:
    """Return the facts of each target; None is this machine."""
    queries = [None if target is None else dict(target) for target in targets]
    answers = _load_answers(store, queries, host.fingerprint(), query)
    return [from_json(TargetFacts, answer) for answer in answers]


def load_cpus(store: LocalStore, triple: str, query: Query = query_cpus_in_process) -> list[str]:
    """Return the names of the CPUs that LLVM knows for a triple, sorted."""
    [names] = _load_answers(store, [triple], "cpus", query)
    return list(names)


def _load_answers(
    store: LocalStore, queries: Sequence[Json], context: Json, query: Query
) -> list[Json]:
    """Return the answer to each query: from the store, else from `query`, whose answers go to the store."""
    with explain_wait(IDENTITY_WAIT.format("apache-tvm")):
        build = packages.identity("apache-tvm")
    names = [digest_of([_VERSION, value, context, build]) for value in queries]
    notes = {name: store.notes.read("facts", name) for name in names}
    queries_by_name = dict(zip(names, queries, strict=True))
    missing = {name: value for name, value in queries_by_name.items() if notes[name] is None}
    if missing:
        _log.debug("LLVM is queried about %s: the store has no answer", list(missing.values()))
        with explain_wait(_WAIT):
            answers = query(list(missing.values()))
        for name, answer in zip(missing, answers, strict=True):
            notes[name] = json.dumps(answer)
            store.notes.keep(str(notes[name]), "facts", name)
    return [json.loads(notes[name] or "null") for name in names]
