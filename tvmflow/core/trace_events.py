"""Traces in the JSON format of Chrome's viewer, which Perfetto reads: tracks, slices, flows.

A name may be that of a model or of a user: it is written as `printable` text, by `canonical`.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tvmflow.core.canonical_json import canonical
from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Json

PACKED_SUFFIX: Final = ".gz"

_MAX_TEXT: Final = 400
_NS: Final = 1_000_000_000
_ROUNDING_NS: Final = 1000
# Processes are numbered from 1, tracks from here on: Perfetto takes a track with the number of its process
# for the main one.
_FIRST_TRACK: Final = 1000


@dataclass
class Slice:
    """An interval on a track, in nanoseconds since the trace began; of no length, it is an instant."""

    track: Track
    name: str
    began_ns: int
    ended_ns: int
    arguments: Mapping[str, Json]


@dataclass
class Track:
    """A row of slices, which viewers show below those of the same process. Slices on it nest."""

    process: int
    number: int
    name: str
    slices: list[Slice] = field(default_factory=list)

    def slice(
        self, name: str, began_s: float, seconds: float, arguments: Mapping[str, Json] | None = None
    ) -> Slice:
        """Add an interval, which began so many seconds after the trace."""
        began_ns = max(round(began_s * _NS), 0)
        ended_ns = max(round((began_s + seconds) * _NS), began_ns)
        added = Slice(
            track=self,
            name=name,
            began_ns=began_ns,
            ended_ns=ended_ns,
            arguments=arguments or {},
        )
        self.slices.append(added)
        return added

    def nest(self) -> list[Slice]:
        """Return the slices as viewers need them: sorted, and each ends with the one that it began in.

        Clocks of several machines differ, and several threads may have one name.
        """
        nested: list[Slice] = []
        open_slices: list[Slice] = []
        for item in sorted(self.slices, key=lambda one: (one.began_ns, -one.ended_ns)):
            while open_slices and open_slices[-1].ended_ns <= item.began_ns + _ROUNDING_NS:
                before = open_slices.pop()
                before.ended_ns = max(min(before.ended_ns, item.began_ns), before.began_ns)
            if open_slices:
                item.ended_ns = min(item.ended_ns, open_slices[-1].ended_ns)
            nested.append(item)
            open_slices.append(item)
        return nested


class Trace:
    """A trace: processes and their tracks are shown in the order in which they are named."""

    def __init__(self, about: Mapping[str, Json]) -> None:
        self._about = about
        self._tracks: dict[str, dict[str, Track]] = {}
        self._flows: list[tuple[Slice, Slice]] = []

    def track(self, process: str, name: str) -> Track:
        """Return a track of a process, both of which may be new."""
        tracks = self._tracks.setdefault(process, {})
        if name not in tracks:
            place = list(self._tracks).index(process) + 1
            number = _FIRST_TRACK + sum(map(len, self._tracks.values()))
            tracks[name] = Track(place, number, name)
        return tracks[name]

    def flow(self, first: Slice, second: Slice) -> None:
        """Draw an arrow from the end of a slice to the beginning of a later one."""
        self._flows.append((first, second))

    def to_json(self) -> Json:
        """Return the trace as viewers read it."""
        return {
            "traceEvents": list(self._list_events()),
            "displayTimeUnit": "ms",
            "otherData": _shown(self._about),
        }

    def to_bytes(self, path: Path) -> bytes:
        """Return the content of the file of this name, which is gzipped if it ends in `.gz`."""
        content = canonical(self.to_json())
        return gzip.compress(content, mtime=0) if path.suffix == PACKED_SUFFIX else content

    def _list_events(self) -> Iterator[dict[str, Json]]:
        for place, (process, tracks) in enumerate(self._tracks.items(), 1):
            # viewers show the number behind the name
            name = excerpt(process.removesuffix(f" {place}"))
            yield _name("process_name", place, 0, {"name": name})
            yield _name("process_sort_index", place, 0, {"sort_index": place})
            for track in tracks.values():
                yield _name("thread_name", place, track.number, {"name": excerpt(track.name)})
                yield _name("thread_sort_index", place, track.number, {"sort_index": track.number})
        for tracks in self._tracks.values():
            for track in tracks.values():
                for item in track.nest():
                    yield _describe(item)
        for number, (first, second) in enumerate(self._flows, 1):
            # the arrow begins within the slice, not at its end, which belongs to the next one
            leaves_ns = max(first.ended_ns - 1, first.began_ns)
            begin = {"ph": "s", **_place(first.track, min(leaves_ns, second.began_ns))}
            end = {"ph": "f", "bp": "e", **_place(second.track, second.began_ns)}
            for event in (begin, end):
                yield {"name": "needs", "cat": "needs", "id": number, **event}


def _name(kind: str, process: int, track: int, arguments: Mapping[str, Json]) -> dict[str, Json]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": dict(arguments)}


def _place(track: Track, at_ns: int) -> dict[str, Json]:
    return {"pid": track.process, "tid": track.number, "ts": at_ns / 1000}


def _describe(item: Slice) -> dict[str, Json]:
    event = {
        "name": excerpt(item.name, _MAX_TEXT),
        "cat": "tvmflow",
        **_place(item.track, item.began_ns),
        "args": _shown(item.arguments),
    }
    if item.ended_ns == item.began_ns:
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": (item.ended_ns - item.began_ns) / 1000}


def _shown(arguments: Mapping[str, Json]) -> dict[str, Json]:
    """Return arguments as text and numbers; those without a value are left out."""
    return {
        excerpt(name): excerpt(value, _MAX_TEXT) if isinstance(value, str) else value
        for name, value in arguments.items()
        if value not in (None, "")
    }
