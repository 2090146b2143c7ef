"""What LLVM says of targets: asked once for this machine and TVM build, then read from the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tvmflow import tools
from tvmflow.keys import digest_of
from tvmflow.stores.local import LocalStore
from tvmflow.targets.host import Host
from tvmflow.targets.resolve import cpus_in_worker, query_in_worker
from tvmflow.values import Json

_VERSION: Final = 2
"""Raise it when `resolve.query` or `resolve.cpus` answers otherwise."""

Ask = Callable[[list[Json]], list[Json]]


def facts_of(
    store: LocalStore,
    mappings: Sequence[Mapping[str, Json] | None],
    host: Host,
    ask: Ask = query_in_worker,
) -> list[Json]:
    """`resolve.query` of each target; None is this machine."""
    questions = [None if mapping is None else dict(mapping) for mapping in mappings]
    return _remembered(store, questions, host.fingerprint(), ask)


def cpus_of(store: LocalStore, triple: str, ask: Ask = cpus_in_worker) -> list[str]:
    """The CPU names that LLVM knows for a triple, sorted."""
    [names] = _remembered(store, [triple], "cpus", ask)
    return list(names)


def _remembered(
    store: LocalStore, questions: Sequence[Json], circumstances: Json, ask: Ask
) -> list[Json]:
    build = tools.identity("apache-tvm")
    names = [digest_of([_VERSION, question, circumstances, build]) for question in questions]
    known = {name: store.read_note("facts", name) for name in names}
    asked = {n: q for n, q in zip(names, questions, strict=True) if known[n] is None}
    if asked:
        for name, answer in zip(asked, ask(list(asked.values())), strict=True):
            known[name] = json.dumps(answer)
            store.write_note(str(known[name]), "facts", name)
    return [json.loads(known[name] or "null") for name in names]
