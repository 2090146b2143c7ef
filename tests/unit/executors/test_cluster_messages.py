"""What crosses the wire to a cluster is plain JSON, and comes back as it was."""

from __future__ import annotations

import json

from tvmflow.core.codec import from_json, to_json
from tvmflow.core.types import RunTraits, StageCall, StageResult
from tvmflow.executors.cluster_worker import (
    InputBlob,
    StageRequest,
    StageResponse,
    call_without_paths,
)
from tvmflow.store.remote.connection import BlobRef

CALL = StageCall(
    "tune",
    {"tune": {"trials": 3}},
    {"import/model.json": "/store/ab"},
    "/out",
    "/work",
    "/ledger",
    "/locks",
    60.0,
    {"apache-tvm": "1+x"},
    RunTraits(measures=True, uses_ledger=True, unlocked_settings=("target",)),
    ("cpu",),
)


def test_a_request_comes_back_as_it_was() -> None:
    """Through JSON, as dask sends it."""
    request = StageRequest(
        "token", "key", "url", 2.0, call_without_paths(CALL), {"model": InputBlob("d", 3, "/m")}, {}
    )
    assert from_json(StageRequest, json.loads(json.dumps(to_json(request)))) == request


def test_a_response_comes_back_as_it_was() -> None:
    """With the result and the files."""
    result = StageResult("failed", "it failed", "try again", {}, 1.5, "log")
    response = StageResponse(result, {"deep/more.bin": BlobRef("d", 0)}, "w1")
    assert from_json(StageResponse, json.loads(json.dumps(to_json(response)))) == response


def test_a_call_travels_without_the_paths_of_a_machine() -> None:
    """The worker gives it its own; all else is as it was."""
    fields = json.loads(json.dumps(call_without_paths(CALL)))
    assert not any("/" in str(value) for value in fields.values())
    paths = {"inputs": CALL.inputs, "out": "/o", "work": "/w", "ledger": "/l", "locks": "/k"}
    moved = CALL._replace(out="/o", work="/w", ledger="/l", locks="/k")
    assert from_json(StageCall, {**fields, **paths}) == moved
