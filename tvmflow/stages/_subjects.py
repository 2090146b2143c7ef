"""What `verify` runs: the library in this process, or wherever else its target is, whole or in parts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tvmflow.stages._base import StageContext
from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from tvmflow.bundles import Unpacked
    from tvmflow.runtime import Module
    from tvmflow.stages._elsewhere import Signature
    from tvmflow.tuning.remote import Farm

    Array = np.ndarray[Any, Any]
    Feed = dict[str, Array]

LOCAL: Final = "local"
QEMU: Final = "qemu"
RPC: Final = "rpc"

_WHY_NOT_TIMED: Final[Mapping[str, str]] = {
    QEMU: "an emulated CPU says nothing of the speed of a real one",
    RPC: "each part runs in a session of its own",
}


class Timed(Protocol):
    """Something whose calls can be timed."""

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Seconds per call, for each of `repeat` repeats of at least `min_seconds`."""
        ...


class TimedLibrary(Timed, Protocol):
    """A library on a machine whose speed means something."""

    def beside(self, built: Any) -> Timed:
        """What TVM built of the same model with other schedules, where this one runs."""
        ...


class Subject(Protocol):
    """The library, wherever it runs."""

    @property
    def timed(self) -> TimedLibrary | None:
        """The same, where its speed means something."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def parts(self) -> Mapping[str, Subject]:
        """Its parts by name, in order; none of one that was built as a whole."""

    @property
    def ran_on(self) -> str:
        """What ran it, once it has run."""

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Outputs by name for every batch of inputs by name."""
        ...


class Here:
    """A library in this process."""

    ran_on = "this machine"

    def __init__(self, module: Module) -> None:
        self.module = module
        self.inputs, self.outputs = module.inputs, module.outputs
        self.latency = module.latency
        self.parts: dict[str, Subject] = {name: Here(part) for name, part in module.parts.items()}

    @property
    def timed(self) -> TimedLibrary:
        return self

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        return [self.module.run(feed) for feed in feeds]

    def beside(self, built: Any) -> Timed:
        from tvmflow.native import Executable, load_library
        from tvmflow.runtime import Module
        from tvmflow.targets.linking import write_library

        signature = {
            way: [spec.to_json() for spec in getattr(self.module, way)]
            for way in ("inputs", "outputs")
        }
        place = self.module.program.place
        if place.is_cpu:
            library = built.jit()
        else:
            with tempfile.TemporaryDirectory() as folder:
                linked = Path(folder, "beside.so")
                write_library(built, linked, self.module.manifest["target"]["tvm"])
                library = load_library(linked.read_bytes(), linked.suffix, place)
        return Module(Executable(library, place), signature, self.module.manifest)


class Apart:
    """Parts of a model, each a library elsewhere: what one gives is brought to the next."""

    timed = None

    def __init__(self, signature: Signature, parts: Mapping[str, Subject]) -> None:
        self.inputs, self.outputs = signature
        self.parts = parts

    @property
    def ran_on(self) -> str:
        return ", then ".join(dict.fromkeys(part.ran_on for part in self.parts.values()))

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        there = [dict(feed) for feed in feeds]
        for part in self.parts.values():
            takes = [spec.name for spec in part.inputs]
            given = [{name: each[name] for name in takes} for each in there]
            for each, found in zip(there, part.run_all(given), strict=True):
                each.update(found)
        return [{spec.name: each[spec.name] for spec in self.outputs} for each in there]


@contextlib.contextmanager
def opened(where: str, settings: Mapping[str, Any], ctx: StageContext) -> Iterator[Subject]:
    """The library that was exported, ready to run at LOCAL, QEMU or RPC. Raises StageError."""
    from tvmflow import bundles, runtime

    bundle = ctx.inputs["export/module.tvmflow"]
    if where == LOCAL:
        yield Here(runtime.load(bundle))
        return
    from tvmflow.stages._elsewhere import Signature

    found = bundles.unpack(bundle)
    target = settings["target"]
    with contextlib.ExitStack() as stack:
        if not found.parts:
            yield _elsewhere(where, found, target, "", ctx, stack)
            return
        parts = {
            name: _elsewhere(where, part, target["parts"][name], name, ctx, stack)
            for name, part in found.parts.items()
        }
        yield Apart(Signature.from_json(found.signature), parts)


def _elsewhere(
    where: str,
    found: Unpacked,
    target: Mapping[str, Any],
    part: str,
    ctx: StageContext,
    stack: contextlib.ExitStack,
) -> Subject:
    """One library; `target` is as verify's settings describe it."""
    from tvmflow.stages import _elsewhere

    signature = _elsewhere.Signature.from_json(found.signature)
    work = ctx.work / part if part else ctx.work
    work.mkdir(exist_ok=True)
    library = work / "library.so"
    library.write_bytes(found.library)
    if where == QEMU:
        runner = ctx.inputs[f"runner/{part}/runner" if part else "runner/runner"]
        return _elsewhere.Emulated(signature, library, runner, target, work)
    farm: Farm = stack.enter_context(_elsewhere.devices(target["remote"], work / "sessions.log"))
    return _elsewhere.OnDevice(signature, library, farm, target, work)


def why_not_timed(where: str) -> str:
    """Why a subject that is not `timed` is not."""
    return _WHY_NOT_TIMED[where]
