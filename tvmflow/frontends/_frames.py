"""Messages between a stage and its reference process: JSON and arrays, framed, no pickle.

A frame is a length (8 bytes, little-endian) and that many bytes; a message is a frame of JSON,
then one frame in NumPy's npy format for each name in its `arrays`. Imports nothing but numpy,
because some references need their environment set before anything else.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Message = dict[str, Any]


class Runner(Protocol):
    """A model loaded in the reference process."""

    version: str

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by position (`"0"`, `"1"`, …) for inputs by name."""
        ...

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        """One call on these inputs, ready to be timed."""
        ...


def send(stream: IO[bytes], message: Message, arrays: Mapping[str, Array] | None = None) -> None:
    """Write one message."""
    arrays = arrays or {}
    _send_frame(stream, json.dumps({**message, "arrays": list(arrays)}).encode())
    for array in arrays.values():
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
        _send_frame(stream, buffer.getvalue())
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[Message, dict[str, Array]] | None:
    """Read one message; None when the other side is gone."""
    head = _receive_frame(stream)
    if head is None:
        return None
    message: Message = json.loads(head)
    arrays = {}
    for name in message["arrays"]:
        body = _receive_frame(stream)
        if body is None:
            return None
        arrays[name] = np.load(io.BytesIO(body), allow_pickle=False)
    return message, arrays


def _send_frame(stream: IO[bytes], body: bytes) -> None:
    stream.write(len(body).to_bytes(8, "little"))
    stream.write(body)


def _receive_frame(stream: IO[bytes]) -> bytes | None:
    size = stream.read(8)
    if len(size) < 8:
        return None
    wanted = int.from_bytes(size, "little")
    body = stream.read(wanted)
    return body if len(body) == wanted else None


def serve(load: Callable[[Message], Runner]) -> None:
    """Be a reference process: load what the first message names, then answer until stdin ends.

    `load` raises ImportError when the framework cannot be imported, anything else when it
    refuses the model.
    """
    incoming = sys.stdin.buffer
    # whatever else writes to standard output must not end up between frames
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    first = receive(incoming)
    if first is None:
        return
    try:
        runner = load(first[0])
    except ImportError as error:
        send(outgoing, {"problem": "import", "why": f"{type(error).__name__}: {error}"})
        return
    except Exception as error:
        send(outgoing, {"problem": "model", "why": _last_line(error)})
        return
    send(outgoing, {"version": runner.version})
    while (call := receive(incoming)) is not None:
        message, arrays = call
        try:
            if message["call"] == "run":
                send(outgoing, {}, runner.run(arrays))
            else:
                once = runner.prepare(arrays)
                seconds = _latencies(once, message["repeat"], message["min_seconds"])
                send(outgoing, {"seconds": seconds})
        except Exception as error:
            send(outgoing, {"problem": "run", "why": _last_line(error)})


def _latencies(once: Callable[[], object], repeat: int, min_seconds: float) -> list[float]:
    for _ in range(2):
        once()
    return [_seconds_per_call(once, min_seconds) for _ in range(repeat)]


def _seconds_per_call(once: Callable[[], object], min_seconds: float) -> float:
    calls, start = 0, time.perf_counter()
    while True:
        once()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= min_seconds:
            return elapsed / calls


def _last_line(error: Exception) -> str:
    """Frameworks put their stack before the sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
