"""The process in which MXNet runs: `python -m tvmflow.frontends.mxnet._reference_worker`, frames on stdin and stdout.

MXNet 1.9 needs NumPy aliases that were removed long ago, reads its settings from the environment,
and may crash; none of that may touch the user's process. The process ends when stdin does.

A frame is a length (8 bytes, little-endian) and that many bytes; a message is a frame of JSON,
then one frame in NumPy's npy format for each name in its `arrays`.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, Any]
Message = dict[str, Any]


def send(stream: IO[bytes], message: Message, arrays: Mapping[str, Array] | None = None) -> None:
    """Write one message."""
    arrays = arrays or {}
    _send_frame(stream, json.dumps({**message, "arrays": list(arrays)}).encode())
    for array in arrays.values():
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
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


def _import_mxnet() -> Any:
    warnings.simplefilter("ignore")
    for alias in (bool, int, float, complex, object, str):
        if alias.__name__ not in vars(np):
            setattr(np, alias.__name__, alias)
    import mxnet

    return mxnet


class _Model:
    """A bound checkpoint."""

    def __init__(self, mx: Any, start: Message) -> None:
        symbol = mx.sym.load(start["symbol"])
        weights = {
            name.removeprefix("arg:").removeprefix("aux:"): value
            for name, value in mx.nd.load(start["params"]).items()
        }
        shapes = {spec["name"]: tuple(spec["shape"]) for spec in start["inputs"]}
        dtypes = {name: np.dtype(value.dtype).name for name, value in weights.items()}
        dtypes.update({spec["name"]: spec["dtype"] for spec in start["inputs"]})
        known = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
        self._executor = symbol.simple_bind(
            mx.cpu(),
            grad_req="null",
            type_dict={name: dtype for name, dtype in dtypes.items() if name in known},
            **shapes,
        )
        self._executor.copy_params_from(weights, weights, allow_extra_params=True)
        self._feeds = {name: self._executor.arg_dict[name] for name in shapes}

    def feed(self, arrays: Mapping[str, Array]) -> None:
        for name, value in arrays.items():
            self._feeds[name][:] = value

    def call(self) -> list[Any]:
        outputs: list[Any] = self._executor.forward(is_train=False)
        for output in outputs:
            output.wait_to_read()
        return outputs

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        self.feed(arrays)
        return {str(index): value.asnumpy() for index, value in enumerate(self.call())}

    def latency(self, arrays: Mapping[str, Array], repeat: int, min_seconds: float) -> list[float]:
        self.feed(arrays)
        for _ in range(2):
            self.call()
        return [self._seconds_per_call(min_seconds) for _ in range(repeat)]

    def _seconds_per_call(self, min_seconds: float) -> float:
        calls, start = 0, time.perf_counter()
        while True:
            self.call()
            calls += 1
            elapsed = time.perf_counter() - start
            if elapsed >= min_seconds:
                return elapsed / calls


def main() -> None:
    incoming = sys.stdin.buffer
    # whatever else writes to standard output must not end up between frames
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    first = receive(incoming)
    if first is None:
        return
    try:
        mx = _import_mxnet()
    except Exception as error:
        send(outgoing, {"problem": "import", "why": f"{type(error).__name__}: {error}"})
        return
    try:
        model = _Model(mx, first[0])
    except Exception as error:
        send(outgoing, {"problem": "model", "why": _last_line(error)})
        return
    send(outgoing, {"version": mx.__version__})

    answers: dict[str, Callable[[Message, Mapping[str, Array]], None]] = {
        "run": lambda message, arrays: send(outgoing, {}, model.run(arrays)),
        "latency": lambda message, arrays: send(
            outgoing,
            {"seconds": model.latency(arrays, message["repeat"], message["min_seconds"])},
        ),
    }
    while (call := receive(incoming)) is not None:
        message, arrays = call
        try:
            answers[message["call"]](message, arrays)
        except Exception as error:
            send(outgoing, {"problem": "run", "why": _last_line(error)})


def _last_line(error: Exception) -> str:
    """MXNet puts a stack trace before the sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


if __name__ == "__main__":
    main()
