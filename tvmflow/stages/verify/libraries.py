"""Loading and calls of libraries for `verify`: in this process or remotely, whole or in parts."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol, cast

import numpy as np
import tvm

from tvmflow.compiler import ScheduledModel, load_c_library
from tvmflow.core.dimensions import specs_at
from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.files import symlink_or_copy
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.types import Array, Dimension, Feed, Json, TensorSpec
from tvmflow.runtime import bundles, loading
from tvmflow.runtime.bundles import C_RUNTIME, Bundle, read_bundle, runtime_of
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.runtime.module import Module
from tvmflow.runtime.programs import Program
from tvmflow.runtime.virtual_machine import VirtualMachine, list_tensors, load_library
from tvmflow.stages.base import StageContext, describe_signature
from tvmflow.stages.verify.comparison import Tolerance, compare_outputs, has_same_bits
from tvmflow.stages.verify.verdict import CallVerdict
from tvmflow.stages.verify_settings import (
    CHROMIUM,
    LOCAL,
    QEMU,
    RPC,
    MachineSettings,
    VerifySettings,
)
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

_PROFILED_CALLS: Final = 3
# Thread counts to compare: three threads also divide loops of an even length unevenly.
_THREADS: Final = (1, 2, 3)


class Timed(Protocol):
    """Something whose calls can be timed."""

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Return seconds per call, for each of `repeat` repeats of at least `min_seconds`."""
        ...


class TimedLibrary(Timed, Protocol):
    """A library on a machine as fast as the target."""

    def load_variant(self, model: ScheduledModel) -> Timed:
        """Load the same model with other schedules, for the same runtime and machine."""
        ...

    def profile(self, feed: Feed) -> dict[str, float]:
        """Return the seconds of each kernel in one call, by name; empty if unknown."""
        ...


class Library(Protocol):
    """A library that can be run, on any backend."""

    @property
    def timed(self) -> TimedLibrary | None:
        """The library for timing; None if this machine is not as fast as the target."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Its inputs in order."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs in order."""

    @property
    def parts(self) -> Mapping[str, Library]:
        """The parts of a partitioned model by name, in order; empty for other models."""

    @property
    def ran_on(self) -> str:
        """The machine or emulator that ran the library; set after `run_all`."""

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch of inputs by name."""
        ...


class LocalLibrary:
    """A library in this process."""

    ran_on = "this machine"

    def __init__(self, module: Module) -> None:
        self.module = module
        self.inputs, self.outputs = module.inputs, module.outputs
        self.latency = module.latency
        self.parts: dict[str, Library] = {
            name: LocalLibrary(part) for name, part in module.parts.items()
        }

    @property
    def timed(self) -> TimedLibrary:
        """The library itself."""
        return self

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch of inputs by name."""
        return [self.module.run(feed) for feed in feeds]

    def profile(self, feed: Feed) -> dict[str, float]:
        """Return the seconds of each kernel and each runtime step, by name."""
        times = self.module.profile(feed, repeat=_PROFILED_CALLS)
        return {operator.name: operator.seconds for operator in times}

    def load_variant(self, model: ScheduledModel) -> Timed:
        """Load the same model with other schedules, for the same runtime, in this process."""
        return self.load_variant_of(model, self.inputs, self.outputs, self.module.dimensions)

    def load_at(self, sizes: Mapping[str, int], model: ScheduledModel) -> Timed:
        """Load a fixed-shape model for some sizes, for the same runtime, in this process."""
        return self.load_variant_of(
            model, specs_at(self.inputs, sizes), specs_at(self.outputs, sizes)
        )

    def load_variant_of(
        self,
        model: ScheduledModel,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        dimensions: Sequence[Dimension] = (),
    ) -> Module:
        """Load a variant of the model for the same runtime; it may have other inputs and outputs."""
        signature = describe_signature(inputs, outputs, dimensions)
        program = self.module.program
        if isinstance(program, NativeProgram):
            variant: Program = load_c_library(model, signature, program.threads)
        else:
            variant = _load_on_vm(model, cast("VirtualMachine", program), self.module, inputs)
        return Module(variant, signature, self.module.manifest)


def _load_on_vm(
    model: ScheduledModel, like: VirtualMachine, module: Module, inputs: Sequence[TensorSpec]
) -> VirtualMachine:
    """Load a model into TVM's virtual machine, with the device and the threads of `like`."""
    load_compiler(model.target.export())
    built = model.compile()
    if like.device.is_host:
        library = built.jit()
    else:
        with tempfile.TemporaryDirectory() as folder:
            linked = Path(folder, "variant.so")
            export_library(built, linked, module.manifest["target"]["tvm"])
            library = load_library(linked, like.device)
    return VirtualMachine(library, inputs, like.device, pool=like.pool)


class PartitionedLibrary:
    """The parts of a partitioned model on remote backends, run one after the other."""

    timed = None

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        parts: Mapping[str, Library],
    ) -> None:
        self.inputs, self.outputs, self.parts = inputs, outputs, parts

    @property
    def ran_on(self) -> str:
        """The machines or emulators that ran the parts, in order, without repetition."""
        return ", then ".join(dict.fromkeys(part.ran_on for part in self.parts.values()))

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch; each part reads the outputs of earlier parts."""
        batches = [dict(feed) for feed in feeds]
        for part in self.parts.values():
            names = [spec.name for spec in part.inputs]
            part_feeds = [{name: batch[name] for name in names} for batch in batches]
            for batch, outputs in zip(batches, part.run_all(part_feeds), strict=True):
                batch.update(outputs)
        return [{spec.name: batch[spec.name] for spec in self.outputs} for batch in batches]


def load_local(bundle: Path, settings: VerifySettings) -> LocalLibrary:
    """Load the library of a bundle into this process."""
    return LocalLibrary(loading.load(bundle, threads=settings.threads))


def load_with_other_threads(
    bundle: Path, settings: VerifySettings
) -> Iterator[tuple[int, Library]]:
    """Yield (thread count, library) of a bundle for other thread counts.

    Yields nothing for a library that runs elsewhere, or on TVM's virtual machine, because all libraries of a
    process share its threads.
    """
    bundled = read_bundle(bundle, with_libraries=False) if settings.run_on == LOCAL else None
    if bundled is None or bundled.parts or runtime_of(bundled.manifest) != C_RUNTIME:
        return
    for count in _THREADS:
        if count != settings.threads:
            yield count, LocalLibrary(loading.load(bundle, threads=count))


def compare_threads(
    library: Library, others: Iterable[tuple[int, Library]], feed: Feed
) -> dict[str, bool]:
    """Return, by thread count, whether the outputs have the same bits as those of `library`."""
    outputs: Mapping[str, Array] = {}
    is_same = {}
    for count, other in others:
        outputs = outputs or library.run_all([feed])[0]
        is_same[str(count)] = has_same_bits(other.run_all([feed])[0], outputs)
    return is_same


def check_call(
    library: Library, feed: Feed, expected: Mapping[str, Array], tolerance: Tolerance
) -> tuple[CallVerdict, dict[str, Array] | None]:
    """Return the verdict on one call of a library, and its outputs; None for outputs if the call fails."""
    try:
        [outputs] = library.run_all([feed])
    except (BundleError, StageError) as error:
        return {"passed": False, "failure": error.message}, None
    compared = compare_outputs(outputs, expected, tolerance)
    is_passed = all(output["passed"] for output in compared.values())
    return {"passed": is_passed, "outputs": compared}, outputs


@contextlib.contextmanager
def open_library(settings: VerifySettings, context: StageContext) -> Iterator[Library]:
    """Yield the exported library, ready to run on its backend; StageError if it cannot be loaded."""
    bundle = context.inputs["export/module.tvmflow"]
    if settings.run_on == LOCAL:
        yield load_local(bundle, settings)
        return
    if settings.run_on == CHROMIUM:
        # no program on this machine can load the package, so read the signature of the import
        signature = json.loads(context.inputs["import/signature.json"].read_text())
        (machine,) = settings.machines.values()
        package = link_package(context.inputs, context.work)
        yield BrowserLibrary(*read_specs(signature), machine, context.work, package)
        return
    # an emulation program already contains the library
    whole = bundles.read_bundle(bundle, with_libraries=settings.run_on == RPC)
    with contextlib.ExitStack() as stack:
        libraries = {
            name: _open_remote(part, name, settings, context, stack)
            for name, part in (whole.parts or {"": whole}).items()
        }
        if whole.parts:
            yield PartitionedLibrary(*read_specs(whole.signature), libraries)
        else:
            yield libraries[""]


def _open_remote(
    bundle: Bundle,
    part: str,
    settings: VerifySettings,
    context: StageContext,
    stack: contextlib.ExitStack,
) -> Library:
    """Load one library on a remote backend; `part` is empty for a model that is not partitioned."""
    specs, machine, work = (
        read_specs(bundle.signature),
        settings.machines[part],
        context.work / part,
    )
    work.mkdir(exist_ok=True)
    if settings.run_on == QEMU:
        role = f"emulation_program/{part}/program" if part else "emulation_program/program"
        return EmulatedLibrary(*specs, machine, work, context.inputs[role])
    library = work / "library.so"
    library.write_bytes(bundle.library)
    assert machine.remote is not None
    pool = stack.enter_context(open_devices(machine.remote, work / "sessions.log"))
    return DeviceLibrary(*specs, machine, work, library, pool)


def read_specs(signature: Json) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and the outputs in a bundle's signature."""
    inputs, outputs = (
        tuple(map(TensorSpec.from_json, signature[side])) for side in ("inputs", "outputs")
    )
    return inputs, outputs


# ---------------------------------------------------------------- remote backends

# A session also starts and sends the library: its timeout is increased by this many batches.
_SETUP_SESSIONS: Final = 2


@dataclass
class _RemoteLibrary:
    """A library that this process cannot load; `scratch` is a folder for temporary files."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    machine: MachineSettings
    scratch: Path

    parts: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def _order_inputs(self, feeds: Sequence[Feed]) -> list[list[Array]]:
        return [[feed[spec.name] for spec in self.inputs] for feed in feeds]

    def _name_outputs(self, batches: Sequence[Sequence[Array]]) -> list[dict[str, Array]]:
        names = [spec.name for spec in self.outputs]
        return [dict(zip(names, outputs, strict=True)) for outputs in batches]


# ---------------------------------------------------------------- under emulation


@dataclass
class EmulatedLibrary(_RemoteLibrary):
    """A library in an emulator, which cannot be timed; `program` contains its kernels."""

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
        results = run_emulated(
            self._emulator,
            self.program,
            self._order_inputs(feeds),
            threads=self.machine.threads,
            scratch=self.scratch,
        )
        return self._name_outputs(results)


# ---------------------------------------------------------------- in a browser


@dataclass
class BrowserLibrary(_RemoteLibrary):
    """A package for browsers, run in Chromium; by default it uses the first backend that works."""

    package: Path
    backend: str = "auto"
    ran_on: str = ""

    timed = None

    @property
    def fallback(self) -> BrowserLibrary | None:
        """The same package restricted to WebAssembly; None if this one does not use WebGPU."""
        has_webgpu = (self.package / WEBGPU_PROGRAM).exists()
        return replace(self, backend="wasm") if has_webgpu and self.backend != "wasm" else None

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch."""
        backend = WebgpuBackend.KIND if self.fallback else "wasm"
        exports = json.loads((self.package / "package.json").read_text())["exports"]
        module = str(exports["."]["default"]).removeprefix("./")
        found = browser.run_package(self.package, module, backend, self._order_inputs(feeds))
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
    """Return an output array; the size of a data-dependent axis follows from the number of bytes."""
    shape = list(spec.shape)
    if spec.bounded_axis is not None:
        shape[spec.bounded_axis] = -1
    return np.frombuffer(content, spec.dtype).reshape(shape)


def link_package(inputs: Mapping[str, Path], folder: Path) -> Path:
    """Make a folder with a browser package, as links to the files that `export` wrote."""
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
    """A library on a pool of devices behind RPC; each call has its own session."""

    library: Path
    pool: DevicePool

    def __post_init__(self) -> None:
        self.ran_on = self.pool.endpoint.key

    @property
    def timed(self) -> DeviceLibrary:
        """The library itself."""
        return self

    def load_variant(self, model: ScheduledModel) -> DeviceLibrary:
        """Build the same model with other schedules, for the same devices."""
        library = self.scratch / "variant.so"
        load_compiler(self.machine.tvm, runs=False)
        export_library(model.compile(), library, self.machine.tvm)
        return replace(self, library=library)

    def profile(self, feed: Feed) -> dict[str, float]:
        """Return an empty profile, because a session returns only outputs and times of whole calls."""
        del feed
        return {}

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch."""
        outputs, _ = self._run_session(feeds, {})
        return self._name_outputs(outputs)

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Return seconds per call for each repeat, without the transfer of inputs to the device."""
        _, seconds = self._run_session([feed], {"repeat": repeat, "min_seconds": min_seconds})
        return seconds

    def _run_session(
        self, feeds: Sequence[Feed], timing: Json
    ) -> tuple[list[list[Array]], list[float]]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            inputs, outputs = Path(folder, "in"), Path(folder, "out")
            write_tensors(inputs, self._order_inputs(feeds))
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
    """Yield the pool of devices of a target's `remote`; StageError if there are none."""
    with ForkServer.fork() as fork_server:
        pool = DevicePool(RpcEndpoint.from_settings(remote), fork_server, log)
        pool.size()
        yield pool


def run_model(payload: Json, emit: Emit) -> Json:
    """Run a library on every batch on the session's device. This is the entry point of a child process.

    `payload` holds `library`, `inputs` and `outputs` (paths), `target` and `session`. `repeat` and `min_seconds` are
    present to time the first batch. `emit` sends an event for each phase.
    """

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("send"):
            session = RpcDevice(payload)
            library = session.load_library(Path(payload["library"]))
            batches = read_tensors(Path(payload["inputs"]))
        with phases.phase("run"):
            machine = tvm.relax.VirtualMachine(library, session.device)
            outputs = []
            for batch in batches:
                tensors = [tvm.runtime.tensor(array, session.device) for array in batch]
                outputs.append(
                    [tensor.numpy() for tensor in list_tensors(machine["main"](*tensors))]
                )
            is_timed = "repeat" in payload
            seconds = _time(machine, session.device, batches[0], payload) if is_timed else []
        write_tensors(Path(payload["outputs"]), outputs)
        return {"seconds": seconds}

    return report_failure(emit, work)


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
