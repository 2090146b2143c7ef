"""Prefetch: the results that a plan needs and a remote cache has, fetched before any worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tvmflow.core.types import Plan, StageSpec
from tvmflow.planning.decisions import PlanState
from tvmflow.store.local import LocalStore
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.remote.result_reader import Fetched

_log = logging.getLogger(__name__)

_PARALLEL_STAGES: Final = 8


def estimate_work(stages: Sequence[StageSpec], store: LocalStore) -> float | None:
    """Return how long stages take, as they did when they last ran here; None when one is not known."""
    seconds = 0.0
    for spec in stages:
        key = store.last_key(spec.recipe, spec.label)
        record = store.record(key) if key else None
        if record is None:
            return None
        seconds += record.seconds
    return seconds


def prefetch(
    plan: Plan,
    state: PlanState,
    remote_client: RemoteCacheClient,
    on_fetched: Callable[[StageSpec, Fetched], None],
) -> None:
    """Fetch results level by level: what was fetched determines the keys of the stages after it.

    No key is claimed: two runs that fetch the same result get the same bytes.

    Args:
        plan: The plan.
        state: Its state; afterwards it contains what was fetched.
        remote_client: The client of the remote cache.
        on_fetched: Called for every stage whose result was fetched.
    """
    requested: set[str] = set()
    with ThreadPoolExecutor(_PARALLEL_STAGES) as pool:
        while True:
            missing = [
                spec
                for spec in plan.stages
                if state.decisions[spec.id].kind == "run" and spec.id not in state.forced
            ]
            keys = {state.keys[spec.id].digest: state.keys[spec.id] for spec in missing}
            new = [key for digest, key in keys.items() if digest not in requested]
            requested.update(keys)
            results = pool.map(remote_client.fetch, new)
            fetched = {
                key.digest: result for key, result in zip(new, results, strict=True) if result
            }
            _log.debug("fetched %d of %d missing results", len(fetched), len(new))
            for spec in missing:
                digest = state.keys[spec.id].digest
                if digest in fetched:
                    on_fetched(spec, fetched[digest])
            if not fetched:
                return
            state.decide_all(plan)
