"""Libraries that `verify` runs: in this process or on a remote backend, in one piece or in parts."""

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
# A loop of an even number of steps is divided unevenly among three.
_THREADS: Final = (1, 2, 3)


class Timed(Protocol):
    """Something whose calls can be timed."""

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Return seconds per call, for each of `repeat` repeats of at least `min_seconds`."""
        ...


class TimedLibrary(Timed, Protocol):
    """A library on a machine as fast as the target."""

    def load_variant(self, model: ScheduledModel) -> Timed:
        """Return the same model with other schedules and the same runtime, on the same machine."""
        ...

    def profile(self, feed: Feed) -> dict[str, float]:
        """Return the seconds of each kernel in one call, by its name; none if they are unknown."""
        ...


class Library(Protocol):
    """The library, wherever it runs."""

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
        """The parts of a partitioned model by name, in order; none of others."""

    @property
    def ran_on(self) -> str:
        """The machine or emulator that ran it, once it has run."""

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
        """Return the seconds of each kernel and each step of the runtime, by its name."""
        times = self.module.profile(feed, repeat=_PROFILED_CALLS)
        return {operator.name: operator.seconds for operator in times}

    def load_variant(self, model: ScheduledModel) -> Timed:
        """Return the same model with other schedules and the same runtime, in this process."""
        return self.load_variant_of(model, self.inputs, self.outputs, self.module.dimensions)

    def load_at(self, sizes: Mapping[str, int], model: ScheduledModel) -> Timed:
        """Return a fixed-shape model for some sizes, with the same runtime, in this process."""
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
        """Return a variant of the model that may have other inputs and outputs, with the same runtime."""
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
    """Return a model on TVM's virtual machine, with device and threads of another one."""
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
    """The libraries of a model in parts on remote backends, run one after the other."""

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
        """The machines or emulators that ran the parts, in order, each named once."""
        return ", then ".join(dict.fromkeys(part.ran_on for part in self.parts.values()))

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Return the outputs by name for every batch: each part reads the results of earlier ones."""
        batches = [dict(feed) for feed in feeds]
        for part in self.parts.values():
            names = [spec.name for spec in part.inputs]
            part_feeds = [{name: batch[name] for name in names} for batch in batches]
            for batch, outputs in zip(batches, part.run_all(part_feeds), strict=True):
                batch.update(outputs)
        return [{spec.name: batch[spec.name] for spec in self.outputs} for batch in batches]


def load_local(bundle: Path, settings: VerifySettings) -> LocalLibrary:
    """Return the library of a bundle, loaded into this process."""
    return LocalLibrary(loading.load(bundle, threads=settings.threads))


def load_with_other_threads(
    bundle: Path, settings: VerifySettings
) -> Iterator[tuple[int, Library]]:
    """Yield the library of a bundle with other thread counts, one after the other.

    Nothing for one that runs elsewhere, or on TVM's virtual machine, whose threads all libraries of a process share.
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
    """Return whether a library computes the same bits with each other number of threads."""
    outputs: Mapping[str, Array] = {}
    is_same = {}
    for count, other in others:
        outputs = outputs or library.run_all([feed])[0]
        is_same[str(count)] = has_same_bits(other.run_all([feed])[0], outputs)
    return is_same


def check_call(
    library: Library, feed: Feed, expected: Mapping[str, Array], tolerance: Tolerance
) -> tuple[CallVerdict, dict[str, Array] | None]:
    """Return the verdict on one call of a library, and its outputs; None if it cannot be called."""
    try:
        [outputs] = library.run_all([feed])
    except (BundleError, StageError) as error:
        return {"passed": False, "failure": error.message}, None
    compared = compare_outputs(outputs, expected, tolerance)
    is_passed = all(output["passed"] for output in compared.values())
    return {"passed": is_passed, "outputs": compared}, outputs


@contextlib.contextmanager
def open_library(settings: VerifySettings, context: StageContext) -> Iterator[Library]:
    """Yield the exported library, ready to run where the settings say; StageError when it cannot be."""
    bundle = context.inputs["export/module.tvmflow"]
    if settings.run_on == LOCAL:
        yield load_local(bundle, settings)
        return
    if settings.run_on == CHROMIUM:
        # no program of this machine loads the package
        signature = json.loads(context.inputs["import/signature.json"].read_text())
        (machine,) = settings.machines.values()
        package = link_package(context.inputs, context.work)
        yield BrowserLibrary(*read_specs(signature), machine, context.work, package)
        return
    # an emulation program holds the library itself
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
    """Return one library on a remote backend; `part` is empty for a model in one piece."""
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

# A session also sends the library, and starts: as much patience as for two batches more.
_SETUP_SESSIONS: Final = 2


@dataclass
class _RemoteLibrary:
    """A library for a machine that this process cannot load it on; `scratch` is a folder for files."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    machine: MachineSettings
    scratch: Path

    parts: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def _order_inputs(self, feeds: Sequence[Feed]) -> list[list[Array]]:
        """Return batches in the order of the inputs."""
        return [[feed[spec.name] for spec in self.inputs] for feed in feeds]

    def _name_outputs(self, batches: Sequence[Sequence[Array]]) -> list[dict[str, Array]]:
        """Return the outputs of each batch by name."""
        names = [spec.name for spec in self.outputs]
        return [dict(zip(names, outputs, strict=True)) for outputs in batches]


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
        return self._name_outputs(outputs)

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Return seconds per call, for each of `repeat` repeats, without the transfer to the device."""
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
    """Yield the devices of a target's `remote`; StageError if there are none."""
    with ForkServer.fork() as fork_server:
        pool = DevicePool(RpcEndpoint.from_settings(remote), fork_server, log)
        pool.size()
        yield pool


def run_model(payload: Json, emit: Emit) -> Json:
    """Run a library on every batch, on the device of the session: the entry point of a child.

    `payload` has `library`, `inputs` and `outputs` (paths), `target`, `session`, and, to time the first batch,
    `repeat` and `min_seconds`. `emit` sends the event of each phase.
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
