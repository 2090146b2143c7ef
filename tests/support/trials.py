"""Records for tests of the ledger, and the target that they are about. Needs no TVM."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

from tvmflow.core.canonical_json import canonical
from tvmflow.tuning.trials import Trial, trial_id

TARGET = {"kind": "llvm", "mtriple": f"{platform.machine()}-linux-gnu", "num-cores": 2}
DEVICE = {"kind": "cpu", "class": "any"}


def trial(number: int, *, seconds: float = 1e-3, **changes: Any) -> Trial:
    """A record as good as any; two with one number are the same trial, and a higher number is a later one."""
    trace = [[["EnterPostproc", [], [number], []]], []]
    return Trial(
        id=trial_id(trace),
        trace=trace,
        run_secs=(seconds, seconds * 2, seconds * 3),
        failure=None,
        when=f"2024-01-01T00:00:{number // 1000:02d}.{number % 1000:03d}+00:00",
        tvm="0",
        host={"model": "any"},
        load=(0.0, 0.0, 0.0),
        seed=0,
    )._replace(**changes)


def sealed(pack: bytes) -> bytes:
    """Return a changed trial pack, uncompressed and of one target, with the digest and the counts that its lines have."""
    first, _, body = pack.partition(b"\n")
    header = json.loads(first)
    header.pop("digest", None)
    lines = body.splitlines(keepends=True)
    for entry in header["targets"].values():
        entry["workloads"] = sum(line.startswith(b'{"about":') for line in lines)
        entry["trials"] = sum(line.startswith(b'{"failure":') for line in lines)
        entry["failed"] = sum(line.startswith(b'{"failure":{') for line in lines)
    start = canonical(header) + b"\n"
    digest = hashlib.sha256(start + body).hexdigest()
    return canonical({**header, "digest": digest}) + b"\n" + body
