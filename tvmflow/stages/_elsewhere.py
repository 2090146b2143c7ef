"""Libraries that `verify` cannot, or shall not, load into its own process: under emulation, and on devices elsewhere."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tvm

from tvmflow.errors import StageError, TvmflowError
from tvmflow.executors.nursery import Nursery
from tvmflow.targets.emulation import Emulator, emulator_for, run_emulated
from tvmflow.targets.linking import write_library
from tvmflow.targets.tensor_file import read_tensors, write_tensors
from tvmflow.tuning import measure
from tvmflow.tuning.measure import Send
from tvmflow.tuning.remote import Device, Farm, Place, failure
from tvmflow.values import Json, TensorSpec

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]

# What a session does beside the batches: it sends the library, and starts.
_MORE_SESSIONS = 2


class Signature(NamedTuple):
    """What goes in and what comes out, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def from_json(cls, value: Json) -> Signature:
        return cls(
            *(
                tuple(TensorSpec.from_json(each) for each in value[f"{way}puts"])
                for way in ("in", "out")
            )
        )

    def arrays(self, feed: Feed) -> list[Array]:
        """A batch in the order in which the library takes it."""
        return [feed[spec.name] for spec in self.inputs]

    def named(self, outputs: Sequence[Array]) -> dict[str, Array]:
        """What the library gave, by name."""
        return dict(zip((spec.name for spec in self.outputs), outputs, strict=True))


# ---------------------------------------------------------------- emulated


class Emulated:
    """A library under emulation, whose speed says nothing."""

    timed = None
    parts: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, signature: Signature, library: Path, runner: Path, target: Json, scratch: Path
    ) -> None:
        self.inputs, self.outputs = signature
        self._signature = signature
        self._library = library
        self._runner = runner
        self._threads = int(target["cores"])
        self._scratch = scratch
        self._emulator: Emulator = emulator_for(target["tvm"])

    @property
    def ran_on(self) -> str:
        return str(self._emulator)

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Outputs by name for every batch. Raises StageError."""
        batches = [self._signature.arrays(feed) for feed in feeds]
        found = run_emulated(
            self._emulator,
            self._runner,
            self._library,
            batches,
            threads=self._threads,
            scratch=self._scratch,
        )
        return [self._signature.named(outputs) for outputs in found]


# ---------------------------------------------------------------- on a device


class OnDevice:
    """A library on the devices of a farm; each call is a session of its own."""

    parts: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, signature: Signature, library: Path, farm: Farm, target: Json, scratch: Path
    ) -> None:
        self.inputs, self.outputs = signature
        self._signature = signature
        self._library = library
        self._farm = farm
        self._target = target
        self._scratch = scratch
        self.ran_on = farm.place.key

    @property
    def timed(self) -> OnDevice:
        return self

    def beside(self, built: Any) -> OnDevice:
        """What TVM built of the same model with other schedules, on the same devices."""
        library = self._scratch / "beside.so"
        write_library(built, library, self._target["tvm"])
        return OnDevice(self._signature, library, self._farm, self._target, self._scratch)

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Outputs by name for every batch. Raises StageError."""
        outputs, _ = self._session(feeds, {})
        return [self._signature.named(each) for each in outputs]

    def latency(self, feed: Feed, *, repeat: int, min_seconds: float) -> list[float]:
        """Seconds per call, for each of `repeat` repeats, without the way to the device."""
        _, seconds = self._session([feed], {"repeat": repeat, "min_seconds": min_seconds})
        return seconds

    def _session(
        self, feeds: Sequence[Feed], timing: Json
    ) -> tuple[list[list[Array]], list[float]]:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            given, found = Path(folder, "in"), Path(folder, "out")
            write_tensors(given, [self._signature.arrays(feed) for feed in feeds])
            request = {
                "target": self._target["tvm"],
                "library": str(self._library),
                "given": str(given),
                "found": str(found),
                **timing,
            }
            call = f"{__name__}:{run_model.__name__}"
            session = self._farm.call(call, request, sessions=len(feeds) + _MORE_SESSIONS)
            assert session is not None
            if session.failure is not None:
                raise StageError(
                    f"the library does not run on {self._farm.place.key} at {session.server}: "
                    f"{session.failure.message}",
                    fix="see that the target in the recipe is what the device is (`tvmflow device ls`)",
                )
            self.ran_on = f"{self._farm.place.key} at {session.server}"
            return read_tensors(found), session.value["seconds"]


@contextlib.contextmanager
def devices(remote: Mapping[str, Json], log: Path) -> Iterator[Farm]:
    """The devices of a target's `remote`; their sessions are children of this process. Raises StageError."""
    place = Place.of(remote)
    with Nursery.fork() as nursery:
        farm = Farm(place, nursery, log)
        farm.size()
        yield farm


def run_model(payload: Json, send: Send) -> Json:
    """Send a library to the device that `turn` opens, run it on every batch, and time it on the first if asked to.

    Takes `library`, `given` and `found` (paths), `target`, `turn`, `limit_s`, and for timing
    `repeat` and `min_seconds`. Gives `{"seconds": […]}`, or a failure in the phase `send` or `run`.
    """
    clock = measure.Phases(send)
    try:
        with clock.phase("send"):
            there = Device(payload)
            library = there.send(Path(payload["library"]))
            batches = read_tensors(Path(payload["given"]))
        with clock.phase("run"):
            machine = tvm.relax.VirtualMachine(library, there.device)
            outputs = [_run(machine, there.device, batch) for batch in batches]
            seconds = (
                _time(machine, there.device, batches[0], payload) if "repeat" in payload else []
            )
        write_tensors(Path(payload["found"]), outputs)
    except TvmflowError:
        raise
    # whatever the session raises; who is to blame is decided by those who sent this
    except Exception as error:
        return {"failure": failure(clock.now, error)}
    return {"seconds": seconds}


def _run(machine: Any, device: Any, batch: Sequence[Array]) -> list[Array]:
    result = machine["main"](*[tvm.runtime.tensor(array, device) for array in batch])
    tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [tensor.numpy() for tensor in tensors]


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
