"""Faults of stages, injected through the environment of their processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support.project import Project

FAULT_INJECTION = Path(__file__).resolve().parents[1] / "support" / "fault_injection"


def inject_fault(project: Project, stage: str, fault: str, target: str = "") -> None:
    """Make a stage misbehave in its worker: `segfault`, `hang`, `full-disk`."""
    project.environment["PYTHONPATH"] += f":{FAULT_INJECTION}"
    project.environment["INJECTED_FAULT"] = f"{stage}:{fault}:{target}"


def remove_fault(project: Project) -> None:
    project.environment["INJECTED_FAULT"] = ""


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one, each before its own children."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield int(child)
            yield from descendants(int(child))
