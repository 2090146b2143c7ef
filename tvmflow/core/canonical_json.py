"""Canonical JSON: equal values have equal bytes and digests."""

import hashlib
import json

from tvmflow.core.types import Json

_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def canonical(value: Json) -> bytes:
    """Return a JSON value with sorted keys, without spaces, in ASCII; ValueError for NaN and infinities."""
    return _ENCODE(value).encode()


def digest_of(value: Json) -> str:
    """Return the sha256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()


def document(value: Json) -> str:
    """Return a value as indented JSON with sorted keys and a final newline."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
