"""Keys of small results for tests of the store: each is the digest of its pre-image, as a real one."""

from __future__ import annotations

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.types import Json, StageKey


def stage_key(name: object, stage: str = "build", inputs: dict[str, str] | None = None) -> StageKey:
    """Return the key of a result; two with other names have other keys."""
    preimage: dict[str, Json] = {
        "stage": stage,
        "settings": {"name": name},
        "inputs": inputs or {},
    }
    return StageKey(digest_of(preimage), preimage)
