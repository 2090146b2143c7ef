"""A strict check of traces in Chrome's format, as Perfetto reads them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from tvmflow.core.types import Json


class CheckedTrace(NamedTuple):
    """What a valid trace has: slices by `PROCESS/TRACK`, sorted, and the names at both ends of each flow."""

    slices: dict[str, list[dict[str, Any]]]
    flows: list[tuple[str, str]]

    def names(self, track: str) -> list[str]:
        return [item["name"] for item in self.slices.get(track, [])]


def check_trace(trace: Json) -> CheckedTrace:
    """Check the events of a trace: tracks are named, slices nest, and flows join slices forward in time."""
    events = trace["traceEvents"]
    processes = _names(events, "process_name")
    threads = _names(events, "thread_name")
    assert len({number for _, number in threads}) == len(threads), "a track has a number of its own"
    assert not {number for _, number in threads} & {pid for pid, _ in processes}
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        assert event["name"].isprintable()
        assert event["name"]
        if event["ph"] == "M":
            continue
        place = (event["pid"], event["tid"])
        assert place in threads
        assert (event["pid"], 0) in processes
        assert event["ts"] >= 0
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]], "one begin and one end"
            assert event.get("bp") == {"s": None, "f": "e"}[event["ph"]]
            flows[event["id"]][event["ph"]] = event
            continue
        assert event["ph"] in "Xi"
        assert event.get("dur", 1) > 0
        slices[place].append(event)
    for items in slices.values():
        _check_nesting(items)
    joined = []
    for ends in flows.values():
        first, second = ends["s"], ends["f"]
        assert first["ts"] <= second["ts"]
        joined.append((_slice_at(slices, first), _slice_at(slices, second)))
    named = {
        f"{processes[pid, 0]} {pid}/{threads[pid, tid]}": items
        for (pid, tid), items in slices.items()
    }
    return CheckedTrace(named, joined)


def _names(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    found = [event for event in events if event["ph"] == "M" and event["name"] == kind]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found}
    assert len(names) == len(found), "no track has two names"
    return names


def _ends(item: dict[str, Any]) -> tuple[int, int]:
    began_ns = round(item["ts"] * 1000)
    return began_ns, began_ns + round(item.get("dur", 0) * 1000)


def _check_nesting(items: list[dict[str, Any]]) -> None:
    """Check that slices come in order, and that each is within or after the ones before it."""
    assert [_ends(item)[0] for item in items] == sorted(_ends(item)[0] for item in items)
    open_ends: list[int] = []
    for item in items:
        began, ended = _ends(item)
        while open_ends and open_ends[-1] <= began:
            open_ends.pop()
        assert not open_ends or ended <= open_ends[-1], item
        open_ends.append(ended)


def _slice_at(slices: dict[tuple[int, int], list[dict[str, Any]]], event: dict[str, Any]) -> str:
    """Return the innermost slice at the time of a flow's end, which viewers join it to."""
    at = round(event["ts"] * 1000)
    around = [
        item
        for item in slices[event["pid"], event["tid"]]
        if _ends(item)[0] <= at < max(_ends(item)[1], _ends(item)[0] + 1)
    ]
    return str(around[-1]["name"])
