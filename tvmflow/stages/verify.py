"""`verify`: the library that users will load, run on real inputs, against the framework the model came from."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tvmflow import samples
from tvmflow.errors import VerifyFailed
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._base import Reference
from tvmflow.samples import Samples
from tvmflow.spread import spread_of
from tvmflow.stages import _judging, _kernels, _tolerances, build
from tvmflow.stages._base import StageContext
from tvmflow.stages._subjects import (
    LOCAL,
    RPC,
    Subject,
    Timed,
    TimedLibrary,
    opened,
    why_not_timed,
)
from tvmflow.stages._tolerances import Tolerance
from tvmflow.targets.resolve import JoinedTarget
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
        **_subject(recipe, target),
    }


def _subject(recipe: Any, target: Any) -> dict[str, Any]:
    """What is run, and where."""
    where = place(recipe)
    more = {"run_on": where} if where != LOCAL else {}
    if isinstance(target, JoinedTarget):
        parts = {each.part: _machine(where, each) for each in target.machines}
        is_mixed = any(_kernels.is_mixed(recipe.of(each.name)) for each in target.machines)
        return {"target": {"parts": parts}, "mixed": is_mixed, **more}
    return {
        "lowering": _kernels.lowering(recipe),
        "schedules": _kernels.schedules(recipe),
        "mixed": _kernels.is_mixed(recipe),
        "target": _machine(where, target),
        **more,
    }


def _machine(where: str, target: Any) -> dict[str, Any]:
    return {
        "tvm": target.tvm,
        "cores": target.cores,
        "device": target.device,
        "why_not": target.why_not,
        **({"remote": target.remote} if where == RPC else {}),
    }


def place(recipe: Any) -> str:
    """Where the libraries of a recipe (as it is for one target) are run: LOCAL, QEMU or RPC."""
    chosen = str(recipe.verify.run_on)
    return LOCAL if chosen == "auto" else chosen


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Write the verdict; raise VerifyFailed when a check fails."""
    checks, where = settings["verify"], settings.get("run_on", LOCAL)
    why_not = "; ".join(
        f"part '{name}': {each['why_not']}" if name else str(each["why_not"])
        for name, each in _machines(settings).items()
        if each["why_not"]
    )
    if where == LOCAL and checks["against"] == "none" and why_not:
        return _conclude({"passed": True, "against": "none", "not_run": why_not}, ctx)
    with opened(where, settings, ctx) as subject:
        return _conclude(_judge(where, subject, settings, ctx), ctx)


def _machines(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What the library, or each of its parts, runs on."""
    target = settings["target"]
    return dict(target.get("parts", {"": target}))


def _judge(
    where: str, subject: Subject, settings: Mapping[str, Any], ctx: StageContext
) -> dict[str, Any]:
    """All that is found out about the library, and whether it is good enough."""
    checks = settings["verify"]
    data = _samples(subject, settings, ctx.inputs.get("data"))
    verdict: dict[str, Any] = {"against": checks["against"], "samples": data.real}
    ours = samples.joined(subject.run_all(data.batches), data)
    if where != LOCAL:
        verdict["ran_on"] = subject.ran_on
    there = dict(data.batches[0])
    with _reference(settings, subject, ctx) as reference:
        labels, first = data.labels, subject.outputs[0].name
        if reference is not None:
            results = [reference.run(feed) for feed in data.batches]
            theirs = samples.joined(results, data)
            there.update(results[0])
            verdict["reference"] = reference.name
            tolerance = _tolerance(settings, ctx, verdict)
            verdict["outputs"] = _agreement(subject, ours, theirs, tolerance)
            verdict |= _parts(subject, data, results, tolerance)
            if labels is not None:
                verdict["reference_accuracy"] = _judging.accuracy(theirs, first, labels)
        if labels is not None:
            verdict["accuracy"] = _judging.accuracy(ours, first, labels)
        if subject.timed is None:
            verdict["latency_not_measured"] = why_not_timed(where)
        else:
            # the reference runs here, and says nothing of the speed of another machine
            beside = reference if where == LOCAL else None
            with _alone(settings, ctx):
                verdict["latency"] = _latencies(
                    subject.timed, beside, data.batches[0], settings, ctx
                )
                for name, feed in _first_feeds(subject, there).items():
                    timed = subject.parts[name].timed
                    assert timed is not None
                    found = verdict.setdefault("parts", {}).setdefault(name, {})
                    found["latency"] = _summary(_measure(timed, feed, checks["repeat"]))
    verdict["failures"] = _judging.failures(verdict, checks) + _too_slow(verdict, settings)
    verdict["passed"] = not verdict["failures"]
    return verdict


def _tolerance(
    settings: Mapping[str, Any], ctx: StageContext, verdict: dict[str, Any]
) -> Tolerance:
    """How closely outputs must agree; the verdict gets to know it, and what arithmetic it is for."""
    arithmetic = _tolerances.arithmetic_of(ctx.inputs["import/model.json"], settings["mixed"])
    tolerance = _tolerances.tolerance_of(arithmetic, settings["verify"])
    verdict["tolerance"] = {"for": arithmetic, **tolerance._asdict()}
    return tolerance


def _agreement(
    subject: Subject, ours: Mapping[str, Array], theirs: Mapping[str, Array], tolerance: Tolerance
) -> dict[str, Any]:
    return {
        spec.name: _judging.compare(ours[spec.name], theirs[spec.name], tolerance)
        for spec in subject.outputs
    }


def _parts(
    subject: Subject, data: Samples, results: Sequence[Mapping[str, Array]], tolerance: Tolerance
) -> dict[str, Any]:
    """Each part by itself, on what the reference gives it: an error stands where it was made."""
    found = {}
    for name, part in subject.parts.items():
        takes = [spec.name for spec in part.inputs]
        there = [{**feed, **given} for feed, given in zip(data.batches, results, strict=True)]
        ours = samples.joined(part.run_all([{n: each[n] for n in takes} for each in there]), data)
        found[name] = {"outputs": _agreement(part, ours, samples.joined(results, data), tolerance)}
    return {"parts": found} if found else {}


def _first_feeds(subject: Subject, there: Feed) -> dict[str, Feed]:
    """What each part is given, of the tensors that are there; a part runs only for those that are not."""
    feeds = {}
    for name, part in subject.parts.items():
        feeds[name] = {spec.name: there[spec.name] for spec in part.inputs}
        if any(spec.name not in there for spec in part.outputs):
            there = {**there, **part.run_all([feeds[name]])[0]}
    return feeds


@contextlib.contextmanager
def _alone(settings: Mapping[str, Any], ctx: StageContext) -> Iterator[None]:
    """Nothing else is measured on the same devices meanwhile, nor on the CPU that calls a library here."""
    from tvmflow.targets.devices import CPU, exclusive

    devices = [each["device"] for each in _machines(settings).values()]
    if settings.get("run_on", LOCAL) == LOCAL:
        devices.append(CPU)
    with contextlib.ExitStack() as stack:
        # always in one order, so that two runs never wait for each other
        for _, device in sorted({each["kind"]: each for each in devices}.items()):
            stack.enter_context(exclusive(ctx.locks, device))
        yield


def _conclude(verdict: dict[str, Any], ctx: StageContext) -> dict[str, Any]:
    (ctx.out / VERDICT).write_text(json.dumps(verdict, indent=1, sort_keys=True) + "\n")
    if not verdict["passed"]:
        raise VerifyFailed(
            "; ".join(verdict["failures"]),
            fix="look at verdict.json in the stage's folder; loosen verify.rtol/atol only if the difference is benign",
        )
    return verdict


# ---------------------------------------------------------------- inputs


def _samples(subject: Subject, settings: Mapping[str, Any], path: Path | None) -> Samples:
    """What the library is run on: the file that the recipe names, or seeded random inputs."""
    checks = settings["verify"]
    if path is None:
        ranges = {
            name: (spec["range"][0], spec["range"][1])
            for name, spec in settings["inputs"].items()
            if "range" in spec
        }
        return samples.drawn(subject.inputs, ranges, batches=checks["samples"], seed=checks["seed"])
    wants = "verify.min_accuracy" if checks["min_accuracy"] is not None else ""
    return samples.recorded(
        subject.inputs, path, what="verify.data", label=checks["label"], needs_labels=wants
    )


# ---------------------------------------------------------------- judging


@contextlib.contextmanager
def _reference(
    settings: Mapping[str, Any], subject: Subject, ctx: StageContext
) -> Iterator[Reference | None]:
    if settings["verify"]["against"] == "none":
        yield None
        return
    model = dict(settings["model"])
    frontend = FRONTENDS[model.pop("kind")]
    scratch = ctx.work / "reference"
    scratch.mkdir(exist_ok=True)
    files = {role: path for role, path in ctx.inputs.items() if role != "data"}
    described = json.loads(ctx.inputs["import/signature.json"].read_text())
    with frontend.reference(
        files,
        subject.inputs,
        subject.outputs,
        model,
        tensors=tuple(map(TensorSpec.from_json, described.get("tensors", ()))),
        threads=max(each["cores"] for each in _machines(settings).values()),
        scratch=scratch,
    ) as reference:
        yield reference


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
    found = {"library": _summary(_measure(library, feed, repeat))}
    kernels = ctx.inputs.get("build/kernels.json")
    if kernels and build.TUNED in json.loads(kernels.read_text()).values():
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
    from tvmflow.tuning.measure import load_compiler

    mod = _lowering.load_ir(ctx.inputs["import/model.json"])
    params = _lowering.load_weights(ctx.inputs["import/params.safetensors"])
    target, kernels = settings["target"]["tvm"], settings["lowering"]
    load_compiler(target, runs="run_on" not in settings)
    return _lowering.compile_untuned(mod, params, target, kernels, settings["schedules"])


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {**spread_of(seconds), "repeats": len(seconds)}
