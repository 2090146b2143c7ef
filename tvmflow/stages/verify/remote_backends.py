"""Remote backends, for libraries that `verify` cannot load itself: an emulator, devices behind RPC."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import tvm

from tvmflow.compiler import ScheduledModel
from tvmflow.core.errors import StageError
from tvmflow.core.files import symlink_or_copy
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.runtime.virtual_machine import list_tensors
from tvmflow.targets import browser
from tvmflow.targets.backends.webgpu import WebgpuBackend
from tvmflow.targets.emulation import (
    Emulator,
    emulator_for,
    read_tensors,
    run_emulated,
    write_tensors,
)
from tvmflow.targets.form_names import WEBGPU_PROGRAM
from tvmflow.targets.linking import export_library
from tvmflow.targets.tvm_target import with_threads
from tvmflow.tuning.measure import load_compiler
from tvmflow.tuning.rpc_device import DevicePool, RpcDevice, RpcEndpoint
from tvmflow.tuning.tuning_job import PhaseReporter, report_failure

if TYPE_CHECKING:
    from tvmflow.stages.verify_settings import MachineSettings

Feed = Mapping[str, Array]

# A session also sends the library, and starts: as much patience as for two batches more.
_SETUP_SESSIONS: Final = 2


class Signature(NamedTuple):
    """Inputs and outputs of a library, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def from_json(cls, value: Json) -> Signature:
        """Return the signature in a bundle."""
        inputs = tuple(map(TensorSpec.from_json, value["inputs"]))
        return cls(inputs, tuple(map(TensorSpec.from_json, value["outputs"])))

    def order_inputs(self, feed: Feed) -> list[Array]:
        """Return a batch in the order in which the library takes it."""
        return [feed[spec.name] for spec in self.inputs]

    def name_outputs(self, outputs: Sequence[Array]) -> dict[str, Array]:
        """Return the outputs of the library by name."""
        return dict(zip((spec.name for spec in self.outputs), outputs, strict=True))


@dataclass
class _RemoteLibrary:
    """A library for a machine that this process cannot load it on; `scratch` is a folder for files."""

    signature: Signature
    machine: MachineSettings
    scratch: Path

    parts: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Its inputs in order."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs in order."""
        return self.signature.outputs


# ---------------------------------------------------------------- under emulation


@dataclass
class EmulatedLibrary(_RemoteLibrary):
    """A library under emulation, which says nothing of its speed; `program` holds its kernels."""

    program: Path

    timed = None

    @cached_property
    def _emulator(self) -> Emulator:
        return emulator_for(self.machine.tvm)

    @property
    def ran_on(self) -> str:
        """The emulator and its CPU."""
        return str(self._emulator)

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch."""
        batches = [self.signature.order_inputs(feed) for feed in feeds]
        results = run_emulated(
            self._emulator,
            self.program,
            batches,
            threads=self.machine.threads,
            scratch=self.scratch,
        )
        return [self.signature.name_outputs(outputs) for outputs in results]


# ---------------------------------------------------------------- in a browser


@dataclass
class BrowserLibrary(_RemoteLibrary):
    """A package for browsers in Chromium; `backend` is the one to use, by default the first that works."""

    package: Path
    backend: str = "auto"
    ran_on: str = ""

    timed = None

    @property
    def fallback(self) -> BrowserLibrary | None:
        """The same package as WebAssembly, where it runs by WebGPU."""
        has_webgpu = (self.package / WEBGPU_PROGRAM).exists()
        return replace(self, backend="wasm") if has_webgpu and self.backend != "wasm" else None

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch."""
        backend = WebgpuBackend.KIND if self.fallback else "wasm"
        batches = [self.signature.order_inputs(feed) for feed in feeds]
        exports = json.loads((self.package / "package.json").read_text())["exports"]
        module = str(exports["."]["default"]).removeprefix("./")
        found = browser.run_package(self.package, module, backend, batches)
        by_gpu = "WebGPU (SwiftShader, on the CPU)"
        self.ran_on = f"{found.browser} by {by_gpu if self.fallback else 'WebAssembly'}"
        return [
            {
                spec.name: _read_output(spec, found.outputs[batch, index])
                for index, spec in enumerate(self.outputs)
            }
            for batch in range(len(feeds))
        ]


def _read_output(spec: TensorSpec, content: bytes) -> Array:
    """Return an output; an axis whose size is known after a call has the one that it was given."""
    shape = list(spec.shape)
    if spec.bounded_axis is not None:
        shape[spec.bounded_axis] = -1
    return np.frombuffer(content, spec.dtype).reshape(shape)


def link_package(inputs: Mapping[str, Path], folder: Path) -> Path:
    """Return the folder of a package for browsers, with links to the files that `export` wrote."""
    package = folder / "package"
    package.mkdir(exist_ok=True)
    for role, path in inputs.items():
        stage, _, name = role.partition("/")
        index, _, file = name.partition("/")
        if stage == "export" and index.endswith("-web") and file:
            (package / file).unlink(missing_ok=True)
            symlink_or_copy(path, package / file)
    return package


# ---------------------------------------------------------------- on devices behind RPC


@dataclass
class DeviceLibrary(_RemoteLibrary):
    """A library on the devices of a pool; each call is a session of its own."""

    library: Path
    pool: DevicePool

    def __post_init__(self) -> None:
        self.ran_on = self.pool.endpoint.key

    @property
    def timed(self) -> DeviceLibrary:
        """The library itself."""
        return self

    def load_variant(self, model: ScheduledModel) -> DeviceLibrary:
        """Return the same model with other schedules, on the same devices."""
        library = self.scratch / "variant.so"
        load_compiler(self.machine.tvm, runs=False)
        export_library(model.compile(), library, self.machine.tvm)
        return replace(self, library=library)

    def profile(self, feed: Feed) -> dict[str, float]:
        """Return nothing: a session answers with outputs and times of whole calls."""
        del feed
        return {}

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch."""
        outputs, _ = self._run_session(feeds, {})
        return [self.signature.name_outputs(batch) for batch in outputs]

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Return seconds per call, for each of `repeat` repeats, without the transfer to the device."""
        _, seconds = self._run_session([feed], {"repeat": repeat, "min_seconds": min_seconds})
        return seconds

    def _run_session(
        self, feeds: Sequence[Feed], timing: Json
    ) -> tuple[list[list[Array]], list[float]]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            inputs, outputs = Path(folder, "in"), Path(folder, "out")
            write_tensors(inputs, [self.signature.order_inputs(feed) for feed in feeds])
            request = {
                "target": with_threads(self.machine.tvm, self.machine.threads),
                "library": str(self.library),
                "inputs": str(inputs),
                "outputs": str(outputs),
                **timing,
            }
            call = f"{__name__}:{run_model.__name__}"
            session = self.pool.call(call, request, sessions=len(feeds) + _SETUP_SESSIONS)
            assert session is not None
            if session.failure is not None:
                raise StageError(
                    f"the library does not run on {self.pool.endpoint.key} at {session.server}: "
                    f"{session.failure.message}",
                    fix="check that the target in the recipe fits the device (`tvmflow device ls`)",
                )
            self.ran_on = f"{self.pool.endpoint.key} at {session.server}"
            return read_tensors(outputs), session.value["seconds"]


@contextlib.contextmanager
def open_devices(remote: Mapping[str, Json], log: Path) -> Iterator[DevicePool]:
    """Yield the devices of a target's `remote`; their sessions are children of this process.

    Raises:
        StageError: when there is no such device.
    """
    with ForkServer.fork() as fork_server:
        pool = DevicePool(RpcEndpoint.from_settings(remote), fork_server, log)
        pool.size()
        yield pool


def run_model(payload: Json, emit: Emit) -> Json:
    """Run a library on every batch, on the device of the session: the entry point of a child.

    Args:
        payload: `library`, `inputs` and `outputs` (paths), `target`, `session`, and, to time the
            first batch, `repeat` and `min_seconds`.
        emit: Sends the event of each phase.
    """

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("send"):
            session = RpcDevice(payload)
            library = session.load_library(Path(payload["library"]))
            batches = read_tensors(Path(payload["inputs"]))
        with phases.phase("run"):
            machine = tvm.relax.VirtualMachine(library, session.device)
            outputs = [_run(machine, session.device, batch) for batch in batches]
            is_timed = "repeat" in payload
            seconds = _time(machine, session.device, batches[0], payload) if is_timed else []
        write_tensors(Path(payload["outputs"]), outputs)
        return {"seconds": seconds}

    return report_failure(emit, work)


def _run(machine: Any, device: Any, batch: Sequence[Array]) -> list[Array]:
    result = machine["main"](*[tvm.runtime.tensor(array, device) for array in batch])
    return [tensor.numpy() for tensor in list_tensors(result)]


def _time(machine: Any, device: Any, batch: Sequence[Array], timing: Json) -> list[float]:
    machine.set_input("main", *[tvm.runtime.tensor(array, device) for array in batch])
    timer = machine.time_evaluator(
        "invoke_stateful",
        device,
        number=1,
        repeat=timing["repeat"],
        min_repeat_ms=int(timing["min_seconds"] * 1000),
    )
    return [float(seconds) for seconds in timer("main").results]
