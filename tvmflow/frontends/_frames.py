"""Messages between a stage and its reference process: framed JSON and arrays, no pickle.

A frame is a length (8 bytes, little-endian) and that many bytes; a message is a frame of JSON,
then one frame in NumPy's npy format for each name in its `arrays`. Imports no framework but numpy,
because some must be set up before anything else is imported.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import last_line

Array = np.ndarray[Any, Any]
Message = dict[str, Any]


class ObservedNode(NamedTuple):
    """The branches that inputs take through a node that computes piecewise.

    Attributes:
        node: Its label.
        operator: Its operator.
        branches: The share of elements that take each.
    """

    node: str
    operator: str
    branches: Mapping[str, float]


class LoadedReference(ABC):
    """A model loaded by its framework, in the reference process.

    Attributes:
        name: What runs it, with its version, as reports show it.
        note: What a report must say of it besides: that it is a stand-in, and why; or nothing.
        can_observe: Whether `observe` tells anything.
    """

    name: str
    note: str = ""
    can_observe: bool = False

    @abstractmethod
    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs in their order for inputs by name."""

    def run_as_timed(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs as timed inferences compute them, whose graph a framework may rewrite."""
        return self.run(arrays)

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        """Return a function that makes one inference on these inputs, to be timed."""
        return functools.partial(self.run, arrays)

    def observe(self, arrays: Mapping[str, Array]) -> Sequence[ObservedNode]:
        """Return the branches of operators that inputs take; nothing where the framework cannot tell."""
        return ()


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
    """Return one message, or None when the other process has ended."""
    header = _receive_frame(stream)
    if header is None:
        return None
    message: Message = json.loads(header)
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
    length = int.from_bytes(size, "little")
    body = stream.read(length)
    return body if len(body) == length else None


def serve(load: Callable[[Message], LoadedReference]) -> NoReturn:
    """Answer requests on stdin until it ends, and end the process: a reference's main function.

    It ends at once, without what Python and a framework tidy up in memory that is freed anyway: a fifth of a second
    of ONNX Runtime.

    Args:
        load: Loads the model that the first message describes. It raises ImportError when the
            framework cannot be imported, and any other exception when it rejects the model.
    """
    incoming = sys.stdin.buffer
    # What a framework prints to standard output must not end up between frames.
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        _answer(load, incoming, outgoing)
        code = 0
    except Exception:
        # the last line of the log says why
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _answer(
    load: Callable[[Message], LoadedReference], incoming: IO[bytes], outgoing: IO[bytes]
) -> None:
    """Answer the requests of a stream."""
    first = receive(incoming)
    if first is None:
        return
    try:
        model = load(first[0])
    except StageError as error:
        send(outgoing, _stage_problem(error))
        return
    except ImportError as error:
        send(outgoing, {"problem": "import", "reason": f"{type(error).__name__}: {error}"})
        return
    except Exception as error:
        send(outgoing, {"problem": "model", "reason": last_line(error)})
        return
    send(outgoing, {"name": model.name, "note": model.note, "can_observe": model.can_observe})
    while (call := receive(incoming)) is not None:
        message, arrays = call
        try:
            if message["call"] == "run":
                results = (model.run_as_timed if message["as_timed"] else model.run)(arrays)
                named = {str(index): np.asarray(array) for index, array in enumerate(results)}
                send(outgoing, {}, named)
            elif message["call"] == "observe":
                send(outgoing, {"nodes": model.observe(arrays)})
            else:
                infer = model.prepare(arrays)
                seconds = _latencies(infer, message["repeat"], message["min_seconds"])
                send(outgoing, {"seconds": seconds})
        except StageError as error:
            send(outgoing, _stage_problem(error))
        except Exception as error:
            send(outgoing, {"problem": "run", "reason": last_line(error)})


def _stage_problem(error: StageError) -> Message:
    """Return the message of an error that says by itself what to do."""
    return {"problem": "stage", "reason": error.message, "fix": error.fix}


def _latencies(infer: Callable[[], object], repeat: int, min_seconds: float) -> list[float]:
    for _ in range(2):
        infer()
    return [_seconds_per_call(infer, min_seconds) for _ in range(repeat)]


def _seconds_per_call(infer: Callable[[], object], min_seconds: float) -> float:
    calls, start = 0, time.perf_counter()
    while True:
        infer()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= min_seconds:
            return elapsed / calls
