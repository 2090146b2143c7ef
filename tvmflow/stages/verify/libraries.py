"""Libraries that `verify` runs: in this process or on a remote backend, in one piece or in parts."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from tvmflow.core.dimensions import specs_at
from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.types import Array, Dimension, Feed, TensorSpec
from tvmflow.stages.base import StageContext
from tvmflow.stages.verify.comparison import Tolerance, compare_outputs, has_same_bits
from tvmflow.stages.verify.verdict import CallVerdict
from tvmflow.stages.verify_settings import CHROMIUM, LOCAL, QEMU, RPC, VerifySettings

if TYPE_CHECKING:
    from tvmflow.compiler import ScheduledModel
    from tvmflow.runtime.bundles import Bundle
    from tvmflow.runtime.module import Module
    from tvmflow.runtime.programs import Program
    from tvmflow.runtime.virtual_machine import VirtualMachine
    from tvmflow.stages.verify.remote_backends import Signature


UNTIMED_REASONS: Final[Mapping[str, str]] = {
    QEMU: "an emulated CPU says nothing of the speed of a real one",
    CHROMIUM: "a GPU that the CPU stands for says nothing of the speed of a real one",
    RPC: "each part runs in a session of its own",
}
"""Where a library runs -> the reason why its speed says nothing there, when it has no `timed`."""


_PROFILED_CALLS: Final = 3
# A loop of an even number of steps is divided unevenly among three.
_THREADS: Final = (1, 2, 3)


class Timed(Protocol):
    """Something whose calls can be timed."""

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Return seconds per call, for each of `repeat` repeats of at least `min_seconds`."""
        ...


class TimedLibrary(Timed, Protocol):
    """A library on a machine whose speed is that of the target."""

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
        """The library for timing; None if its speed here is not that of the target."""

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
        from tvmflow.compiler import load_c_library
        from tvmflow.runtime.c_loader import NativeProgram
        from tvmflow.runtime.module import Module

        signature = {
            side: [value.to_json() for value in values]
            for side, values in (("inputs", inputs), ("outputs", outputs))
        }
        if dimensions:
            signature["dimensions"] = [value.to_json() for value in dimensions]
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
    from tvmflow.runtime.virtual_machine import VirtualMachine, load_library
    from tvmflow.targets.linking import export_library
    from tvmflow.tuning.measure import load_compiler

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

    def __init__(self, signature: Signature, parts: Mapping[str, Library]) -> None:
        self.inputs, self.outputs = signature
        self.parts = parts

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
    from tvmflow.runtime import loading

    return LocalLibrary(loading.load(bundle, threads=settings.threads))


def load_with_other_threads(
    bundle: Path, settings: VerifySettings
) -> Iterator[tuple[int, Library]]:
    """Yield the library of a bundle with other numbers of threads, one after the other.

    Nothing for one that runs elsewhere, or on TVM's virtual machine, whose threads all libraries of a process share.
    """
    from tvmflow.runtime import loading
    from tvmflow.runtime.bundles import C_RUNTIME, read_bundle, runtime_of

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
    from tvmflow.runtime import bundles

    bundle = context.inputs["export/module.tvmflow"]
    if settings.run_on == LOCAL:
        yield load_local(bundle, settings)
        return
    if settings.run_on == CHROMIUM:
        yield _open_package(settings, context)
        return
    from tvmflow.stages.verify.remote_backends import Signature

    # an emulation program holds the library itself
    whole = bundles.read_bundle(bundle, with_libraries=settings.run_on == RPC)
    with contextlib.ExitStack() as stack:
        libraries = {
            name: _open_remote(part, name, settings, context, stack)
            for name, part in (whole.parts or {"": whole}).items()
        }
        if whole.parts:
            yield PartitionedLibrary(Signature.from_json(whole.signature), libraries)
        else:
            yield libraries[""]


def _open_package(settings: VerifySettings, context: StageContext) -> Library:
    """Return the package for browsers, which no program of this machine loads."""
    from tvmflow.stages.verify import remote_backends

    signature = json.loads(context.inputs["import/signature.json"].read_text())
    package = remote_backends.link_package(context.inputs, context.work)
    (machine,) = settings.machines.values()
    return remote_backends.BrowserLibrary(
        remote_backends.Signature.from_json(signature), machine, context.work, package
    )


def _open_remote(
    bundle: Bundle,
    part: str,
    settings: VerifySettings,
    context: StageContext,
    stack: contextlib.ExitStack,
) -> Library:
    """Return one library on a remote backend; `part` is empty for a model in one piece."""
    from tvmflow.stages.verify import remote_backends

    signature = remote_backends.Signature.from_json(bundle.signature)
    machine = settings.machines[part]
    work = context.work / part
    work.mkdir(exist_ok=True)
    if settings.run_on == QEMU:
        role = f"emulation_program/{part}/program" if part else "emulation_program/program"
        program = context.inputs[role]
        return remote_backends.EmulatedLibrary(signature, machine, work, program)
    library = work / "library.so"
    library.write_bytes(bundle.library)
    assert machine.remote is not None
    devices = remote_backends.open_devices(machine.remote, work / "sessions.log")
    pool = stack.enter_context(devices)
    return remote_backends.DeviceLibrary(signature, machine, work, library, pool)
