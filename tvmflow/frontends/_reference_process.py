"""Reference processes, isolated from the comparing process.

Both sides exchange JSON and arrays, not pickles. Imports no framework except numpy, because some frameworks need
setup before other imports.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, NamedTuple, NoReturn

import numpy as np

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.core.formatting import count_text, last_line, names_text
from tvmflow.core.generated_text import yaml_key
from tvmflow.core.logs import explain_wait
from tvmflow.core.processes import module_command
from tvmflow.core.types import Array, TensorSpec, shape_text
from tvmflow.custom_operators.definition import ADVICE, Operator
from tvmflow.runtime.arrays import unpack_rows

_log = logging.getLogger(__name__)

_GRACE_S: Final = 5.0
_OTHERWISE: Final = "disable the comparison with `verify: {against: none}`"
# Frameworks' messages about an invalid divisor or index.
_WRONG_OPERAND: Final = re.compile("by zero|out of (?:data )?(?:range|bounds)", re.I)


class ReferenceProcess:
    """A running reference process, for use by a single thread; see `base.Reference`."""

    def __init__(
        self,
        framework: str,
        install: str,
        process: subprocess.Popen[bytes],
        log: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self.name, self.note, self.can_observe = framework, "", False
        self._framework, self._install = framework, install
        self._process, self._log = process, log
        self._inputs, self._outputs = inputs, outputs

    def run_as_timed(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        return self.run(feed, as_timed=True)

    def run(self, feed: Mapping[str, Array], *, as_timed: bool = False) -> dict[str, Array]:
        call = {"call": "run", "as_timed": as_timed}
        _, arrays = self.request(call, self._check_inputs(feed))
        if len(arrays) != len(self._outputs):
            returned = f"{self._framework} returned {count_text(len(arrays), 'output')}"
            raise StageError(f"{returned}, but the imported model has {len(self._outputs)}")
        return {spec.name: arrays[str(index)] for index, spec in enumerate(self._outputs)}

    def observe(self, feed: Mapping[str, Array]) -> list[ObservedNode]:
        answer, _ = self.request({"call": "observe"}, self._check_inputs(feed))
        return [ObservedNode(*entry) for entry in answer["nodes"]]

    def latency(self, feed: Mapping[str, Array], *, repeat: int, min_seconds: float) -> list[float]:
        """Return the seconds per call of each repeat, after two warm-up calls."""
        call = {"call": "latency", "repeat": repeat, "min_seconds": min_seconds}
        answer, _ = self.request(call, self._check_inputs(feed))
        return [float(value) for value in answer["seconds"]]

    def request(
        self, message: Message, arrays: Mapping[str, Array] | None = None
    ) -> tuple[Message, dict[str, Array]]:
        """Send a message and return the answer; raise the error that the process reports, if any."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, message, arrays)
            answer = receive(self._process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            text = self._exit_text()
            lines = self._log.read_text(errors="replace").strip().splitlines()
            last = f": {lines[-1]}" if lines else ""
            fix = self._suggest_range() if signal.SIGFPE.name in text else ""
            fix = fix or f"see {self._log}, or {_OTHERWISE}"
            raise StageError(f"the process of {self._framework} {text}{last}", fix=fix)
        if "problem" in answer[0]:
            raise self._error(answer[0])
        return answer

    def _check_inputs(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        checked = {}
        for spec in self._inputs:
            if spec.name not in feed:
                raise StageError(f"the reference needs a value for input {spec.name!r}")
            value = np.asarray(feed[spec.name])
            if spec.dtype == "float32" and value.dtype in (np.float16, np.int8):
                # the dtype in which a library stores a state
                value = unpack_rows(value) if value.dtype == np.int8 else value.astype(spec.dtype)
            if not _fits(value.shape, spec):
                needed = shape_text(spec.to_json()) if spec.sizes else spec.shape
                raise StageError(
                    f"input {spec.name!r} has shape {value.shape}, but the model needs {needed}"
                )
            checked[spec.name] = value
        return checked

    def _exit_text(self) -> str:
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _error(self, message: Message) -> Exception:
        name, reason = self._framework, message["reason"]
        if message["problem"] == "stage":
            return StageError(reason, fix=message["fix"])
        if message["problem"] == "import":
            return EnvironmentProblem(f"{name} cannot be imported: {reason}", fix=self._install)
        if _WRONG_OPERAND.search(reason) and (fix := self._suggest_range()):
            return StageError(f"{name} cannot run the model on these inputs: {reason}", fix=fix)
        return StageError(
            f"{name} cannot run the model: {reason}",
            fix=f"check that {name} itself can run it, or {_OTHERWISE}",
        )

    def _suggest_range(self) -> str:
        """Return the fix for invalid random integers, or an empty string without integer inputs."""
        integers = [spec.name for spec in self._inputs if spec.dtype.startswith(("int", "uint"))]
        if not integers:
            return ""
        example = f"`inputs: {{{yaml_key(integers[0])}: {{range: [1, 9]}}}}`"
        which = f" (its inputs with integers are {names_text(integers)})" if integers[1:] else ""
        return f"give integers that the model is made for{which}, such as {example}, or set verify.data"


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    """Return whether a shape matches the fixed sizes of an input; the framework checks dynamic sizes."""
    sizes = spec.sizes or spec.shape
    return len(shape) == len(sizes) and all(
        isinstance(size, str) or size == actual for size, actual in zip(sizes, shape, strict=True)
    )


@contextlib.contextmanager
def start(
    framework: str,
    install: str,
    worker: str,
    first: Message,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    scratch: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ReferenceProcess]:
    """Run a reference process while the block runs; it also ends with this process.

    The module `worker` must call `serve` and load the model described by the message `first`. The log is in `scratch`.

    Raises:
        StageError: if the framework rejects the model.
        EnvironmentProblem: if the framework cannot be imported; `install` is the command that installs it.
    """
    log = scratch / f"{worker.rpartition('.')[0].rpartition('.')[2]}-reference.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            module_command(worker),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=worker_environment(environment),
        )
    reference = ReferenceProcess(framework, install, process, log, inputs, outputs)
    try:
        with explain_wait(f"starting {framework}: a few seconds, more the first time"):
            answer, _ = reference.request(first)
        reference.name, reference.note = answer["name"], answer["note"]
        reference.can_observe = answer["can_observe"]
        _log.debug("reference: %s in process %d, log %s", reference.name, process.pid, log)
        yield reference
    finally:
        _stop(process)


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that imports this tvmflow, even from a source folder."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root, **extra}


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


# ---------------------------------------------------------------- messages, and the process that answers them
# A message is a line of JSON, then the bytes of each array in its `arrays`.

Message = dict[str, Any]


class ObservedNode(NamedTuple):
    """A piecewise operator, and the share of elements in each branch."""

    node: str
    operator: str
    branches: Mapping[str, float]


class LoadedReference(ABC):
    """A model loaded by its framework, in the reference process; for the attributes see `base.Reference`."""

    name: str
    note: str = ""
    can_observe: bool = False

    @abstractmethod
    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        """Run the model on inputs by name, and return the outputs in order."""

    def run_as_timed(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs of the model as it is timed; its framework may optimize that graph."""
        return self.run(arrays)

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        """Return a function, to be timed, that runs one inference on these inputs."""
        return functools.partial(self.run, arrays)

    def observe(self, arrays: Mapping[str, Array]) -> Sequence[ObservedNode]:
        """Return the share of elements in each branch of each operator; empty if it cannot be observed."""
        return ()


def send(stream: IO[bytes], message: Message, arrays: Mapping[str, Array] | None = None) -> None:
    arrays = arrays or {}
    kinds = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    stream.write(json.dumps({**message, "arrays": kinds}).encode() + b"\n")
    for array in arrays.values():
        stream.write(array.tobytes())
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[Message, dict[str, Array]] | None:
    """Return one message, or None if the other process has ended."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    message: Message = json.loads(line)
    arrays: dict[str, Array] = {}
    for name, (dtype, shape) in message.pop("arrays").items():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        content = bytearray(stream.read(size))
        if len(content) < size:
            return None
        arrays[name] = np.ndarray(shape, dtype, content)
    return message, arrays


def serve(load: Callable[[Message], LoadedReference]) -> NoReturn:
    """Answer requests on stdin until it ends, and end the process; the main function of a reference.

    `load` loads the model of the first message. It raises ImportError if the framework cannot be imported, and any
    other exception if the framework rejects the model. The process skips cleanup, which takes 0.2 s in ONNX Runtime.
    """
    incoming = sys.stdin.buffer
    # Redirect stdout to stderr, so that what a framework prints does not corrupt the messages to the parent process.
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        _answer(load, incoming, outgoing)
        code = 0
    except Exception:
        # The parent shows the last line of the log.
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def check_reference(operator: Operator, name: str, runtime: str) -> None:
    """Raise StageError if a custom operator, which `runtime` does not have, has no reference."""
    if operator.reference is None:
        raise StageError(
            f"{operator.where}: the operator {operator} (node {name}) has no reference, and {runtime} lacks it",
            fix=f"give it one: `@operator(…, reference=FUNCTION)`, a function with numpy; {ADVICE}",
        )


def _answer(
    load: Callable[[Message], LoadedReference], incoming: IO[bytes], outgoing: IO[bytes]
) -> None:
    first = receive(incoming)
    if first is None:
        return
    try:
        model = load(first[0])
    except Exception as error:
        send(outgoing, _problem("model", error))
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
                infer, least = model.prepare(arrays), message["min_seconds"]
                for _ in range(2):
                    infer()
                repeats = range(message["repeat"])
                send(outgoing, {"seconds": [_seconds_per_call(infer, least) for _ in repeats]})
        except Exception as error:
            send(outgoing, _problem("run", error))


def _problem(kind: str, error: Exception) -> Message:
    """Return the message about an error; a StageError includes its fix."""
    if isinstance(error, StageError):
        return {"problem": "stage", "reason": error.message, "fix": error.fix}
    if isinstance(error, ImportError) and kind == "model":
        return {"problem": "import", "reason": f"{type(error).__name__}: {error}"}
    return {"problem": kind, "reason": last_line(error)}


def _seconds_per_call(infer: Callable[[], object], min_seconds: float) -> float:
    calls, start = 0, time.perf_counter()
    while True:
        infer()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= min_seconds:
            return elapsed / calls
