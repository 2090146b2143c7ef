"""The state of a run as its events tell it: what is done, what runs, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tvmflow.executors.base import Event

RUNNING: Final = "running"
PENDING: Final = "pending"


class StageProgress:
    """One stage of a run.

    Attributes:
        stage_id: The stage.
        state: `pending`, `running`, or its outcome.
        started: The time when it began; 0 before.
        seconds: How long it ran, at its end.
        latest: Its last event of progress; empty before.
        workloads: The last event of each workload, by name.
        note: What it waits for or downloads; empty for nothing.
    """

    def __init__(self, stage_id: str) -> None:
        self.stage_id = stage_id
        self.recipe, _, self.label = stage_id.partition(":")
        self.stage, _, self.target = self.label.partition("/")
        self.state = PENDING
        self.started = 0.0
        self.seconds = 0.0
        self.latest: Event = {}
        self.workloads: dict[str, Event] = {}
        self.note = ""


class RunProgress:
    """All stages of a run, in the order of the plan.

    Times are those of any clock that only the caller reads.
    """

    def __init__(self) -> None:
        self.stages: dict[str, StageProgress] = {}
        self.started = 0.0
        self._estimates: Mapping[str, Sequence[float] | None] = {}

    @property
    def running(self) -> list[StageProgress]:
        """The stages that run now, in the order in which they began."""
        running = [stage for stage in self.stages.values() if stage.state == RUNNING]
        return sorted(running, key=lambda stage: stage.started)

    @property
    def finished(self) -> int:
        """The number of stages that have ended."""
        return sum(stage.state not in (PENDING, RUNNING) for stage in self.stages.values())

    def apply(self, event: Event, now: float) -> None:
        """Take an event of the run into account."""
        kind = event["event"]
        if kind == "run_started":
            self.stages = {
                entry["stage_id"]: StageProgress(entry["stage_id"]) for entry in event["stages"]
            }
            self._estimates = {entry["stage_id"]: entry["seconds"] for entry in event["stages"]}
            self.started = now
            return
        stage_id = event.get("stage_id")
        if not isinstance(stage_id, str):
            return
        stage = self.stages.setdefault(stage_id, StageProgress(stage_id))
        if kind == "stage_started":
            stage.state, stage.started = RUNNING, now
        elif kind == "stage_finished":
            stage.state, stage.seconds, stage.note = event["outcome"], event["seconds"], ""
        elif kind == "progress":
            stage.latest, stage.note = event, ""
            stage.workloads[event["workload"]] = event

    def seconds_left(self, now: float) -> tuple[float, float] | None:
        """Return the least and the most that the rest will probably take; None when one stage is not known."""
        least = most = 0.0
        for stage in self.stages.values():
            if stage.state not in (PENDING, RUNNING):
                continue
            left = self._stage_seconds_left(stage, now)
            if left is None:
                return None
            least, most = least + left[0], most + left[1]
        return (least, most) if most else None

    def _stage_seconds_left(self, stage: StageProgress, now: float) -> tuple[float, float] | None:
        reported = stage.latest.get("seconds_left")
        if stage.state == RUNNING and reported is not None:
            return reported, reported
        estimate = self._estimates.get(stage.stage_id)
        if estimate is None:
            return None
        elapsed = now - stage.started if stage.state == RUNNING else 0.0
        if elapsed > estimate[1]:
            # The past said nothing about this run.
            return None
        return max(estimate[0] - elapsed, 0.0), estimate[1] - elapsed


def done_share(event: Mapping[str, Any]) -> float:
    """Return the part that is done, from 0 to 1: of the trials, or else of the time."""
    if event["total"] is None:
        return 1.0 - float(event["seconds_left"]) / float(event["limit_s"])
    return float(event["done"]) / max(float(event["total"]), 1.0)
