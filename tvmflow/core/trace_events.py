"""Traces in Chrome's trace event format (JSON), which Perfetto reads: tracks, slices and flows.

Names may come from models or users, so they are escaped to printable text.
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

_MAX_TEXT: Final = 400
_ROUNDING_NS: Final = 1000
# Processes are numbered from 1. Perfetto treats a track with its process's number as the main thread.
_FIRST_TRACK: Final = 1000


@dataclass
class Slice:
    """An interval on a track, in nanoseconds since the trace began; an empty interval is an instant."""

    track: Track
    name: str
    began_ns: int
    ended_ns: int
    arguments: Mapping[str, Json]


@dataclass
class Track:
    """A row of slices of a process."""

    process: int
    number: int
    slices: list[Slice] = field(default_factory=list)

    def slice(
        self, name: str, began_s: float, seconds: float, arguments: Mapping[str, Json] | None = None
    ) -> Slice:
        """Add an interval of `seconds`, which began `began_s` seconds after the trace."""
        began_ns, ended_ns = (max(round(at_s * 1e9), 0) for at_s in (began_s, began_s + seconds))
        self.slices.append(Slice(self, name, began_ns, max(began_ns, ended_ns), arguments or {}))
        return self.slices[-1]

    def nest(self) -> Iterator[Slice]:
        """Return the slices in order, each cut at the end of its enclosing slice, as viewers require.

        Slices may overlap because clocks of machines differ and threads may share a name.
        """
        outer: list[Slice] = []
        ordered = sorted(self.slices, key=lambda one: (one.began_ns, -one.ended_ns))
        for item in ordered:
            while outer and outer[-1].ended_ns <= item.began_ns + _ROUNDING_NS:
                before = outer.pop()
                before.ended_ns = max(min(before.ended_ns, item.began_ns), before.began_ns)
            if outer:
                item.ended_ns = min(item.ended_ns, outer[-1].ended_ns)
            outer.append(item)
        return iter(ordered)


class Trace:
    """A trace; processes and their tracks are shown in order of creation."""

    def __init__(self, about: Mapping[str, Json]) -> None:
        self._about = about
        self._tracks: dict[str, dict[str, Track]] = {}
        self._flows: list[tuple[Slice, Slice]] = []

    def track(self, process: str, name: str) -> Track:
        """Return a track of a process; create the process or the track if missing."""
        tracks = self._tracks.setdefault(process, {})
        if name not in tracks:
            number = _FIRST_TRACK + sum(map(len, self._tracks.values()))
            tracks[name] = Track(list(self._tracks).index(process) + 1, number)
        return tracks[name]

    def flow(self, first: Slice, second: Slice) -> None:
        """Draw an arrow from the end of a slice to the beginning of a later one."""
        self._flows.append((first, second))

    def to_json(self) -> Json:
        """Return the trace in the trace event format."""
        events = [*self._list_names(), *self._list_slices(), *self._list_flows()]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _shown(self._about)}

    def to_bytes(self, path: Path) -> bytes:
        """Return the content for the file `path`, gzipped if its name ends in `.gz`."""
        content = canonical(self.to_json())
        return gzip.compress(content, mtime=0) if path.suffix == ".gz" else content

    def _list_names(self) -> Iterator[dict[str, Json]]:
        for pid, (process, tracks) in enumerate(self._tracks.items(), 1):
            # Viewers append the number to the name.
            names = [("process", 0, pid, process.removesuffix(f" {pid}"))]
            names += [("thread", item.number, item.number, name) for name, item in tracks.items()]
            for kind, number, order, name in names:
                base = {"ph": "M", "pid": pid, "tid": number}
                yield {**base, "name": f"{kind}_name", "args": {"name": excerpt(name)}}
                yield {**base, "name": f"{kind}_sort_index", "args": {"sort_index": order}}

    def _list_slices(self) -> Iterator[dict[str, Json]]:
        for tracks in self._tracks.values():
            for item in (item for track in tracks.values() for item in track.nest()):
                length_us = (item.ended_ns - item.began_ns) / 1000
                yield {
                    "name": excerpt(item.name, _MAX_TEXT),
                    "cat": "tvmflow",
                    "args": _shown(item.arguments),
                    **_place(item.track, item.began_ns),
                    **({"ph": "X", "dur": length_us} if length_us else {"ph": "i", "s": "t"}),
                }

    def _list_flows(self) -> Iterator[dict[str, Json]]:
        for number, (first, second) in enumerate(self._flows, 1):
            base = {"name": "needs", "cat": "needs", "id": number}
            # The arrow begins inside the slice: its end already belongs to the next slice.
            leaves_ns = min(max(first.ended_ns - 1, first.began_ns), second.began_ns)
            yield {**base, "ph": "s", **_place(first.track, leaves_ns)}
            yield {**base, "ph": "f", "bp": "e", **_place(second.track, second.began_ns)}


def _place(track: Track, at_ns: int) -> dict[str, Json]:
    return {"pid": track.process, "tid": track.number, "ts": at_ns / 1000}


def _shown(arguments: Mapping[str, Json]) -> dict[str, Json]:
    return {
        excerpt(name): excerpt(value, _MAX_TEXT) if isinstance(value, str) else value
        for name, value in arguments.items()
        if value not in (None, "")
    }
