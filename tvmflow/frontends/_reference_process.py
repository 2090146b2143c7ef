"""A framework as the reference, in a process of its own: whatever it needs or breaks stays there."""

from __future__ import annotations

import contextlib
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
from tvmflow.frontends._frames import Array, Message, receive, send
from tvmflow.values import TensorSpec

_GRACE_S: Final = 5.0


class ReferenceProcess:
    """A running worker. Not safe for use from several threads."""

    def __init__(
        self,
        framework: str,
        install: str,
        process: subprocess.Popen[bytes],
        log: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self.name = framework
        self._framework = framework
        self._install = install
        self._process = process
        self._log = log
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The framework's outputs for one batch, by the importer's names."""
        _, arrays = self.ask({"call": "run"}, self._checked(feed))
        if len(arrays) != len(self._outputs):
            raise StageError(
                f"{self._framework} gives {len(arrays)} outputs, "
                f"the imported model has {len(self._outputs)}"
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
                f"{self._framework}'s process {self._how_it_ended()}{self._last_words()}",
                fix=f"see {self._log}; `verify: against: none` leaves the reference out",
            )
        if "problem" in answer[0]:
            raise self._problem(answer[0])
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

    def _problem(self, message: Message) -> Exception:
        if message["problem"] == "import":
            return EnvironmentProblem(
                f"{self._framework} cannot be imported: {message['why']}", fix=self._install
            )
        return StageError(
            f"{self._framework} cannot run the model: {message['why']}",
            fix=f"run it in {self._framework} by itself; "
            "`verify: against: none` leaves the reference out",
        )


@contextlib.contextmanager
def start(
    framework: str,
    worker: str,
    first: Message,
    environment: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    scratch: Path,
    install: str,
) -> Iterator[ReferenceProcess]:
    """A worker (`python -m worker`, see `_frames.serve`) with the model loaded; it ends with the block, or with this process."""
    log = scratch / f"{worker.rpartition('.')[0].rpartition('.')[2]}-reference.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=worker_environment(environment),
        )
    reference = ReferenceProcess(framework, install, process, log, inputs, outputs)
    try:
        answer, _ = reference.ask(first)
        reference.name = f"{framework} {answer['version']}"
        yield reference
    finally:
        _stop(process)


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a Python process of ours. The package may be used from a source folder."""
    root = str(Path(tvmflow.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        **extra,
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
