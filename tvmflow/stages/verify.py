"""`verify`: the library that users will load, run on real inputs, against the framework the model came from."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from tvmflow import samples
from tvmflow.errors import VerifyFailed
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._base import Reference
from tvmflow.samples import Samples
from tvmflow.stages import _kernels, build
from tvmflow.stages._base import StageContext
from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Feed = dict[str, Array]

VERSION: Final = 1
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "import": ("model.json", "params.safetensors", "signature.json"),
    "build": ("kernels.json",),
    "export": ("module.tvmflow",),
}
READS: Final = ("reference", "data")
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi", "numpy")
TIMEOUT_S: Final = 4 * 3600.0

VERDICT: Final = "verdict.json"

LOCAL: Final = "local"
QEMU: Final = "qemu"
RPC: Final = "rpc"

_NO_LATENCY: Final = "an emulated CPU says nothing of the speed of a real one"

_LOOK_S: Final = 0.05
_MOST_SETTLING_S: Final = 2.0
# An untuned ResNet takes seconds a call: fewer repeats then, but never fewer than this.
_MIN_REPEATS: Final = 3
_SECONDS_PER_SUBJECT: Final = 20.0
_MIN_SECONDS_PER_REPEAT: Final = 0.02


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The checks, the ranges of random inputs, and the machine whose latency is reported."""
    kind, speedup = recipe.model.kind, recipe.tune.min_speedup
    verify = recipe.verify.model_dump(mode="json", exclude={"data", "run_on"})
    return {
        "verify": {**verify, "data": recipe.verify.data is not None},
        "inputs": {
            name: {"range": list(spec.range)} if spec.range else {}
            for name, spec in recipe.inputs.items()
        },
        "model": {"kind": kind, **FRONTENDS[kind].settings(recipe.model)},
        **({"tune": {"min_speedup": speedup}} if speedup is not None else {}),
        "lowering": _kernels.lowering(recipe),
        "schedules": _kernels.schedules(recipe),
        "target": {
            "tvm": target.tvm,
            "cores": target.cores,
            "device": target.device,
            "why_not": target.why_not,
        },
        **_elsewhere(recipe, target),
    }


def place(recipe: Any) -> str:
    """Where the libraries of a recipe (as it is for one target) are run: LOCAL, QEMU or RPC."""
    chosen = str(recipe.verify.run_on)
    return LOCAL if chosen == "auto" else chosen


def _elsewhere(recipe: Any, target: Any) -> dict[str, Any]:
    """What only libraries that do not run here depend on."""
    where = place(recipe)
    if where == LOCAL:
        return {}
    return {"run_on": where, **({"remote": target.remote} if where == RPC else {})}


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Write the verdict; raise VerifyFailed when a check fails."""
    checks, target, where = settings["verify"], settings["target"], settings.get("run_on", LOCAL)
    if where == LOCAL and checks["against"] == "none" and target["why_not"]:
        return _conclude({"passed": True, "against": "none", "not_run": target["why_not"]}, ctx)
    with _subject(where, settings, ctx) as module:
        return _conclude(_judge(where, module, settings, ctx), ctx)


def _judge(
    where: str, module: Subject, settings: Mapping[str, Any], ctx: StageContext
) -> dict[str, Any]:
    """All that is found out about the library, and whether it is good enough."""
    from tvmflow.targets.devices import exclusive

    checks, target = settings["verify"], settings["target"]
    data = _samples(module, settings, ctx.inputs.get("data"))
    verdict: dict[str, Any] = {"against": checks["against"], "samples": data.real}
    ours = samples.joined(module.run_all(data.batches), data)
    if where != LOCAL:
        verdict["ran_on"] = module.ran_on
    with _reference(settings, module, ctx) as reference:
        if reference is not None:
            theirs = samples.outputs_of(reference.run, data)
            verdict["reference"] = reference.name
            verdict["outputs"] = {
                spec.name: _compare(ours[spec.name], theirs[spec.name], checks)
                for spec in module.outputs
            }
            if data.labels is not None:
                verdict["reference_accuracy"] = _accuracy(theirs, module, data.labels)
        if data.labels is not None:
            verdict["accuracy"] = _accuracy(ours, module, data.labels)
        if module.timed is None:
            verdict["latency_not_measured"] = _NO_LATENCY
        else:
            # the reference runs here, and says nothing of the speed of another machine
            beside = reference if where == LOCAL else None
            with exclusive(ctx.locks, target["device"]):
                verdict["latency"] = _latencies(
                    module.timed, beside, data.batches[0], settings, ctx
                )
    verdict["failures"] = _failures(verdict, checks) + _too_slow(verdict, settings)
    verdict["passed"] = not verdict["failures"]
    return verdict


def _conclude(verdict: dict[str, Any], ctx: StageContext) -> dict[str, Any]:
    (ctx.out / VERDICT).write_text(json.dumps(verdict, indent=1, sort_keys=True) + "\n")
    if not verdict["passed"]:
        raise VerifyFailed(
            "; ".join(verdict["failures"]),
            fix="look at verdict.json in the stage's folder; loosen verify.rtol/atol only if the difference is benign",
        )
    return verdict


# ---------------------------------------------------------------- what is verified


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
    def ran_on(self) -> str:
        """What ran it, once it has run."""

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Outputs by name for every batch of inputs by name."""
        ...


class _Here:
    """The library in this process."""

    ran_on = "this machine"

    def __init__(self, bundle: Path) -> None:
        from tvmflow import runtime

        self.module = runtime.load(bundle)
        self.inputs, self.outputs = self.module.inputs, self.module.outputs
        self.latency = self.module.latency

    @property
    def timed(self) -> TimedLibrary:
        return self

    def run_all(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        return [self.module.run(feed) for feed in feeds]

    def beside(self, built: Any) -> Timed:
        from tvmflow.runtime import Module

        signature = {
            way: [spec.to_json() for spec in getattr(self.module, way)]
            for way in ("inputs", "outputs")
        }
        return Module(built.jit(), signature, self.module.manifest)


@contextlib.contextmanager
def _subject(where: str, settings: Mapping[str, Any], ctx: StageContext) -> Iterator[Subject]:
    bundle = ctx.inputs["export/module.tvmflow"]
    if where == LOCAL:
        yield _Here(bundle)
        return
    from tvmflow import runtime
    from tvmflow.stages import _elsewhere

    _, described, content = runtime.unpack(bundle)
    signature = _elsewhere.Signature.from_json(described)
    library = ctx.work / "library.so"
    library.write_bytes(content)
    if where == QEMU:
        runner = ctx.inputs["runner/runner"]
        yield _elsewhere.Emulated(signature, library, runner, settings["target"], ctx.work)
        return
    with _elsewhere.devices(settings["remote"], ctx.work / "sessions.log") as farm:
        yield _elsewhere.OnDevice(signature, library, farm, settings["target"], ctx.work)


# ---------------------------------------------------------------- inputs


def _samples(module: Subject, settings: Mapping[str, Any], path: Path | None) -> Samples:
    """What the library is run on: the file that the recipe names, or seeded random inputs."""
    checks = settings["verify"]
    if path is None:
        ranges = {
            name: (spec["range"][0], spec["range"][1])
            for name, spec in settings["inputs"].items()
            if "range" in spec
        }
        return samples.drawn(module.inputs, ranges, batches=checks["samples"], seed=checks["seed"])
    wants = "verify.min_accuracy" if checks["min_accuracy"] is not None else ""
    return samples.recorded(
        module.inputs, path, what="verify.data", label=checks["label"], needs_labels=wants
    )


# ---------------------------------------------------------------- judging


@contextlib.contextmanager
def _reference(
    settings: Mapping[str, Any], module: Subject, ctx: StageContext
) -> Iterator[Reference | None]:
    if settings["verify"]["against"] == "none":
        yield None
        return
    model = dict(settings["model"])
    frontend = FRONTENDS[model.pop("kind")]
    scratch = ctx.work / "reference"
    scratch.mkdir(exist_ok=True)
    files = {role: path for role, path in ctx.inputs.items() if role != "data"}
    with frontend.reference(
        files,
        module.inputs,
        module.outputs,
        model,
        threads=settings["target"]["cores"],
        scratch=scratch,
    ) as reference:
        yield reference


def _compare(ours: Array, theirs: Array, checks: Mapping[str, Any]) -> dict[str, Any]:
    """Largest absolute and relative error, and how many elements are out of tolerance.

    An element is in tolerance when |ours − theirs| ≤ atol + rtol·|theirs| (as in numpy.isclose);
    NaN equals NaN, and an infinity equals itself.
    """
    import numpy as np

    if ours.shape != theirs.shape:
        return {"passed": False, "shape": f"{ours.shape} instead of {theirs.shape}"}
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    good = np.isclose(a, b, rtol=checks["rtol"], atol=checks["atol"], equal_nan=True)
    with np.errstate(invalid="ignore"):
        error = np.abs(a - b)
    error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, error)
    error = np.where(np.isnan(error), np.inf, error)
    scale = np.maximum(np.abs(b), np.finfo(np.float64).tiny)
    relative = np.divide(error, scale, out=np.zeros_like(error), where=error > 0)
    meaningful = error > checks["atol"]
    result: dict[str, Any] = {
        "max_abs_error": _finite(error.max(initial=0.0)),
        "max_rel_error": _finite(relative.max(initial=0.0)),
        "max_rel_error_above_atol": _finite(relative[meaningful].max(initial=0.0)),
        "elements": int(good.size),
        "outside": int(good.size - np.count_nonzero(good)),
        "passed": bool(good.all()),
    }
    if not result["passed"]:
        worst = np.unravel_index(int(np.argmax(np.where(good, -1.0, error))), error.shape)
        result["worst"] = {
            "index": [int(i) for i in worst],
            "ours": _finite(a[worst]),
            "reference": _finite(b[worst]),
        }
    return result


def _finite(value: Any) -> float | str:
    """JSON has no infinity and no NaN."""
    number = float(value)
    return number if number - number == 0.0 else str(number)


def _accuracy(outputs: Mapping[str, Array], module: Subject, labels: Array) -> float:
    """Top-1 accuracy of the first output: the share of samples whose largest score is the label's."""
    scores = outputs[module.outputs[0].name].reshape(len(labels), -1)
    return float((scores.argmax(axis=1) == labels.reshape(-1)).mean())


def _failures(verdict: Mapping[str, Any], checks: Mapping[str, Any]) -> list[str]:
    failures = []
    for name, found in verdict.get("outputs", {}).items():
        if found["passed"]:
            continue
        if "shape" in found:
            failures.append(f"output '{name}' has shape {found['shape']}")
        else:
            worst = found["worst"]
            failures.append(
                f"output '{name}': {found['outside']} of {found['elements']} elements are out of tolerance "
                f"(rtol {checks['rtol']:g}, atol {checks['atol']:g}); the worst, at {worst['index']}, "
                f"is {worst['ours']} where {verdict['reference']} gives {worst['reference']}"
            )
    wanted = checks["min_accuracy"]
    if wanted is not None and verdict["accuracy"] < wanted:
        failures.append(
            f"accuracy {verdict['accuracy']:.4f} is below verify.min_accuracy {wanted:g}"
        )
    return failures


def _too_slow(verdict: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """The gate on what tuning must have bought, end to end."""
    if "tune" not in settings:
        return []
    latency, wanted = verdict["latency"], settings["tune"]["min_speedup"]
    # without a tuned kernel the library is the untuned one
    untuned = latency.get("untuned", latency["library"])["median"]
    speedup = untuned / latency["library"]["median"]
    if speedup >= wanted:
        return []
    return [f"tuned is {speedup:.3g} times as fast as untuned, below tune.min_speedup {wanted:g}"]


# ---------------------------------------------------------------- latency


def _latencies(
    library: TimedLibrary,
    reference: Reference | None,
    feed: Feed,
    settings: Mapping[str, Any],
    ctx: StageContext,
) -> dict[str, Any]:
    """Seconds per call of the library, of the same model untuned, and of the reference; one after the other."""
    repeat = settings["verify"]["repeat"]
    roads = json.loads(ctx.inputs["build/kernels.json"].read_text())
    found = {"library": _summary(_measure(library, feed, repeat))}
    if build.TUNED in roads.values():
        found["untuned"] = _summary(_measure(library.beside(_untuned(settings, ctx)), feed, repeat))
    if reference is not None:
        found["reference"] = _summary(_measure(reference, feed, repeat))
    return found


def _measure(subject: Timed, feed: Feed, repeat: int) -> list[float]:
    _settle()
    once = subject.latency(feed, repeat=1, min_seconds=0.0)[0]
    affordable = int(_SECONDS_PER_SUBJECT / max(once, _MIN_SECONDS_PER_REPEAT))
    repeats = max(_MIN_REPEATS, min(repeat, affordable))
    return subject.latency(feed, repeat=repeats, min_seconds=_MIN_SECONDS_PER_REPEAT)


def _settle() -> None:
    """Wait until no thread of what ran before looks for more work: TVM's, and OpenMP's, do for a fifth of a second."""
    import psutil

    here = psutil.Process()
    deadline = time.monotonic() + _MOST_SETTLING_S

    def busy() -> float:
        found = 0.0
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found += sum(process.cpu_times()[:2])
        return found

    spent = busy()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        before, spent = spent, busy()
        if spent - before < _LOOK_S / 4:
            return


def _untuned(settings: Mapping[str, Any], ctx: StageContext) -> Any:
    """The same model with the schedules that it has without tuning, compiled in this process."""
    from tvmflow.stages import _lowering

    mod = _lowering.load_ir(ctx.inputs["import/model.json"])
    params = _lowering.load_weights(ctx.inputs["import/params.safetensors"])
    target, kernels = settings["target"]["tvm"], settings["lowering"]
    return _lowering.compile_untuned(mod, params, target, kernels, settings["schedules"])


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(seconds),
        "median": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "std": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "repeats": len(seconds),
    }
