"""Where a result came from and who signed it, as the store that took it in remembers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.values import Json

if TYPE_CHECKING:
    from tvmflow.signing import PublicKey

_SHOWN_KEYS: Final = 3


def origin_of(
    place: str, signatures: Sequence[Json], signers: Sequence[PublicKey]
) -> dict[str, Json]:
    """What is kept with a result from a `place`: all signatures, and those of the trusted keys whose it was checked to be."""
    names = [f"{Path(each.name).name.removesuffix('.pub')} ({_short(each.id)})" for each in signers]
    return {"place": place, "signatures": list(signatures), "signers": names}


def origin_text(origin: Mapping[str, Any]) -> str:
    """Where a result came from and who signed it, as far as that is known."""
    signers = list(origin.get("signers") or ())
    if signers:
        return f"{origin['place']}, signed by {' and '.join(signers)}"
    others = _keys(origin)
    if others:
        return f"{origin['place']}, signed by key {' and '.join(others)} (not checked)"
    return f"{origin['place']}, not signed"


def signed_by(origin: Mapping[str, Any]) -> tuple[str, ...]:
    """For each key whose signature a result came with, as one line: its first digits, and whether that was checked."""
    checked = " ".join(origin.get("signers") or ())
    return tuple(
        key if f"({key})" in checked else f"{key} (not checked)"
        for key in dict.fromkeys(_keys(origin))
    )


def _keys(origin: Mapping[str, Any]) -> list[str]:
    signatures = (origin.get("signatures") or ())[:_SHOWN_KEYS]
    return [_short(re.sub("[^0-9a-f]", "", str(each.get("keyid")))) for each in signatures]


def _short(key_id: str) -> str:
    return key_id[:12]
