"""What a plan needs and a remote has, fetched before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tvmflow.decide import Survey
from tvmflow.stores.remote.tier import Fetched, Tier
from tvmflow.values import Plan, StageSpec

_STAGES_AT_ONCE: Final = 8


def fetch_ahead(
    plan: Plan, survey: Survey, tier: Tier, on_fetched: Callable[[StageSpec, Fetched], None]
) -> None:
    """Fetch level by level: what came tells the keys of the stages after it. The survey is up to date afterwards.

    No key is claimed: of two runs that fetch the same, both get the same bytes.
    """
    asked: set[str] = set()
    with ThreadPoolExecutor(_STAGES_AT_ONCE) as pool:
        while True:
            ready = {
                survey.keys[spec.id].digest: survey.keys[spec.id]
                for spec in plan.stages
                if survey.decisions[spec.id].kind == "run"
            }
            new = [key for digest, key in ready.items() if digest not in asked]
            asked.update(ready)
            found = {key.digest: it for key, it in zip(new, pool.map(tier.fetch, new), strict=True)}
            for spec in plan.stages:
                if survey.decisions[spec.id].kind == "run":
                    fetched = found.get(survey.keys[spec.id].digest)
                    if fetched is not None:
                        on_fetched(spec, fetched)
            if not any(found.values()):
                return
            survey.look(plan)
