"""MXNet as the reference: starts the worker process, sends feeds, receives what MXNet computes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import tvmflow
from tvmflow.errors import EnvironmentProblem, StageError
from tvmflow.frontends.mxnet._reference_worker import Array, Message, receive, send
from tvmflow.values import TensorSpec

_INSTALL: Final = "pip install 'tvmflow[mxnet]'"
_GRACE_S: Final = 5.0


class MxnetReference:
    """A running worker. Not safe for use from several threads."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self.name = "MXNet"
        self._process = process
        self._log = log
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """MXNet's outputs for one batch, by the importer's names."""
        _, arrays = self.ask({"call": "run"}, self._checked(feed))
        if len(arrays) != len(self._outputs):
            raise StageError(
                f"MXNet gives {len(arrays)} outputs, the imported model has {len(self._outputs)}"
            )
        return {spec.name: arrays[str(index)] for index, spec in enumerate(self._outputs)}

    def latency(self, feed: Mapping[str, Array], *, repeat: int, min_seconds: float) -> list[float]:
        """Seconds per call of `repeat` repeats, after two calls to warm up."""
        message, _ = self.ask(
            {"call": "latency", "repeat": repeat, "min_seconds": min_seconds}, self._checked(feed)
        )
        return [float(value) for value in message["seconds"]]

    def ask(
        self, message: Message, arrays: Mapping[str, Array] | None = None
    ) -> tuple[Message, dict[str, Array]]:
        """Send one message and wait for its answer. Raises when the worker refuses or has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, message, arrays)
            answer = receive(self._process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise StageError(
                f"MXNet's process {self._how_it_ended()}{self._last_words()}",
                fix=f"see {self._log}; `verify: against: none` leaves the reference out",
            )
        if "problem" in answer[0]:
            raise _problem(answer[0])
        return answer

    def _checked(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        checked = {}
        for spec in self._inputs:
            if spec.name not in feed:
                raise StageError(f"the reference needs a value for the input {spec.name!r}")
            value = np.asarray(feed[spec.name])
            if value.shape != spec.shape:
                raise StageError(
                    f"the input {spec.name!r} has the shape {value.shape}, not {spec.shape}"
                )
            checked[spec.name] = value
        return checked

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _problem(message: Message) -> Exception:
    if message["problem"] == "import":
        return EnvironmentProblem(
            f"MXNet is installed but cannot be imported: {message['why']}", fix=_INSTALL
        )
    return StageError(
        f"MXNet cannot run the model: {message['why']}",
        fix="run it in MXNet by itself; `verify: against: none` leaves the reference out",
    )


@contextlib.contextmanager
def start(
    files: Mapping[str, Path],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    threads: int,
    scratch: Path,
) -> Iterator[MxnetReference]:
    """A worker with the checkpoint loaded; it ends with the block, or with this process."""
    if importlib.util.find_spec("mxnet") is None:
        raise EnvironmentProblem(
            "the reference for MXNet checkpoints is MXNet, which is not installed", fix=_INSTALL
        )
    log = scratch / "mxnet-reference.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tvmflow.frontends.mxnet._reference_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(threads),
        )
    reference = MxnetReference(process, log, inputs, outputs)
    try:
        answer, _ = reference.ask(
            {
                "symbol": str(files["symbol"].resolve()),
                "params": str(files["params"].resolve()),
                "inputs": [spec.to_json() for spec in inputs],
            }
        )
        reference.name = f"MXNet {answer['version']}"
        yield reference
    finally:
        _stop(process)


def _environment(threads: int) -> dict[str, str]:
    """What MXNet reads when it is loaded. The package may be used from a source folder."""
    root = str(Path(tvmflow.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        "MXNET_SUBGRAPH_BACKEND": "NONE",
        "MXNET_CPU_WORKER_NTHREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }


def _stop(process: subprocess.Popen[Any]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
