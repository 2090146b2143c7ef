"""Messages between a run and the workers of a cluster: plain JSON, never a file's content."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tvmflow.core.codec import from_json, to_json
from tvmflow.core.types import Json, StageCall, StageResult
from tvmflow.store.remote.base import BlobRef

TOPIC: Final = "tvmflow"
"""The topic of dask's events under which workers report progress."""

_PATHS: Final = ("inputs", "out", "work", "ledger", "locks")


class InputBlob(NamedTuple):
    """A file that a stage reads, by its content in the remote cache.

    `path` is what the user knows a file from outside by; empty for a file that another stage made.
    """

    digest: str
    size: int
    path: str


class StageRequest(NamedTuple):
    """A stage to run on a worker.

    `token` marks its events, `key` names everything that the stage gets, `call` is a StageCall
    without paths, and `resources` are those that dask gave the worker for.
    """

    token: str
    key: str
    remote_url: str
    remote_timeout_s: float
    call: dict[str, Json]
    inputs: dict[str, InputBlob]
    resources: dict[str, float]


class StageResponse(NamedTuple):
    """The end of a stage on a worker: its result with the end of its log, and its files by name."""

    result: StageResult
    files: dict[str, BlobRef]
    worker: str


def call_without_paths(call: StageCall) -> dict[str, Json]:
    """Return the JSON of a call, without what is of one machine."""
    return {name: value for name, value in to_json(call).items() if name not in _PATHS}


def call_with_paths(fields: dict[str, Json], **paths: Any) -> StageCall:
    """Return the call of a request with the paths of this machine."""
    return from_json(StageCall, {**fields, **paths})
