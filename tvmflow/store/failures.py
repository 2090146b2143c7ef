"""Failures: how the last attempt of a stage ended that had no result. A success removes the note."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.codec import from_json
from tvmflow.core.errors import StoreError
from tvmflow.store.local import LocalStore

_FOLDER = "failures"
_VERBS = {
    "blocked": "could not run",
    "crashed": "crashed",
    "failed": "failed",
    "rejected": "was rejected",
    "timeout": "took too long",
}
"""The outcomes that are noted, as a sentence has them."""


class Failure(NamedTuple):
    """The end of an attempt without a result.

    Attributes:
        outcome: `failed`, `rejected`, `crashed`, `timeout` or `blocked` (see `report.StageReport`).
        key: The key that the stage had; empty when it was not known.
        time_s: When it ended, in seconds since 1970.
        seconds: How long it took.
        message: What happened.
        fix: What to do next; may be empty.
        log: The path of its log; empty when there is none.
    """

    outcome: str
    key: str
    time_s: float
    seconds: float
    message: str
    fix: str = ""
    log: str = ""

    @property
    def text(self) -> str:
        """The outcome as a part of a sentence: `its last attempt …`."""
        return f"its last attempt {_VERBS.get(self.outcome, self.outcome)}"


def remember_failure(store: LocalStore, stage_id: str, failure: Failure) -> None:
    """Note how the last attempt of the stage `RECIPE:LABEL` failed."""
    # the failure itself is reported in any case
    with contextlib.suppress(OSError, StoreError):
        store.notes.write(json.dumps(failure._asdict()), _FOLDER, *_names(stage_id))


def forget_failure(store: LocalStore, stage_id: str) -> None:
    """Remove the note of an earlier failure, after a success."""
    with contextlib.suppress(OSError):
        store.notes.remove(_FOLDER, *_names(stage_id))


def find_failure(store: LocalStore, stage_id: str) -> Failure | None:
    """Return how the last attempt of a stage failed; None when it succeeded, or nothing is noted."""
    text = store.notes.read(_FOLDER, *_names(stage_id))
    try:
        failure = from_json(Failure, json.loads(text or ""))
        return failure._replace(log=existing_log(failure.log))
    except ValueError:
        # there is none, or one of another version
        return None


def _names(stage_id: str) -> tuple[str, str]:
    recipe, _, label = stage_id.partition(":")
    return recipe, label


def existing_log(path: str) -> str:
    """Return the path of a log, or nothing where the file does not exist or is empty."""
    try:
        return path if path and Path(path).stat().st_size else ""
    except OSError:
        return ""
