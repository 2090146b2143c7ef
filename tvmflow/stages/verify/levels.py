"""The levels of CPUs that a library has code for: each is run, compared with the reference, and timed.

The level that the library chooses by itself is the one that `verify` has checked already.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tvmflow.core.errors import StageError
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.stages.base import StageContext
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.index_inputs import IndexCheck, no_inner_reason
from tvmflow.stages.verify.latency import exclusive_devices, measure
from tvmflow.stages.verify.layer_check import add_layers
from tvmflow.stages.verify.libraries import Library, LocalLibrary, load_local
from tvmflow.stages.verify.reference_run import Case
from tvmflow.stages.verify.size_check import list_wrong_sizes
from tvmflow.stages.verify.verdict import LevelVerdict, Verdict
from tvmflow.stages.verify_settings import LOCAL, LevelSettings, VerifySettings
from tvmflow.targets.c_runtime.levels import variable

if TYPE_CHECKING:
    import tvm


_ONLY_INDEX: Final = "it returns an index alone, and what goes into it is not compared: {}"
_SELECTS: Final = "it returns what an index selects, which another CPU may choose among equals"


def verify_levels(
    verdict: Verdict,
    library: Library,
    case: Case,
) -> None:
    """Verify each level, and add its verdict.

    Raises:
        StageError: when a library runs another level than it should.
    """
    chosen = _find_level(library)
    expected = _find_measured(case.settings)
    if chosen and chosen != expected:
        raise StageError(
            f"the library runs the level {chosen} where this machine has {expected}",
            fix="report it as a bug of tvmflow, with the output of `tvmflow doctor`",
        )
    levels = verdict["levels"] = dict[str, LevelVerdict]()
    for name, level in case.settings.levels.items():
        if level.not_verified:
            levels[name] = {"not_verified": level.not_verified}
        elif name == chosen:
            levels[name] = {"ran_on": library.ran_on, "outputs": verdict.get("outputs", {})}
            if "index_inputs" in verdict:
                levels[name]["index_inputs"] = verdict["index_inputs"]
            if "latency" in verdict:
                levels[name]["latency"] = verdict["latency"]["library"]
        else:
            levels[name] = _verify(name, level, verdict, case)


def _find_measured(settings: VerifySettings) -> str:
    """Return the last level that this machine has; where none is verified here, empty."""
    runnable = [
        name
        for name, level in settings.levels.items()
        if level.run_on == LOCAL and not level.not_verified
    ]
    return runnable[-1] if runnable else ""


def _find_level(library: Library) -> str:
    """Return the level that a library runs in this process; empty where it runs elsewhere."""
    if not isinstance(library, LocalLibrary):
        return ""
    program = library.module.program
    return program.level if isinstance(program, NativeProgram) else ""


def _verify(name: str, level: LevelSettings, verdict: Verdict, case: Case) -> LevelVerdict:
    """Return the verdict on one level that a library does not choose by itself."""
    settings, context, _, data, reference = case
    indices = reference.indices if reference else None
    if indices is not None and indices.selects:
        return {"not_verified": _SELECTS}
    own = settings.model_copy(update={"target": level.machine, "run_on": level.run_on})
    reason = indices.reason if indices and not indices.loaded else no_inner_reason(own)
    with _forced_level(settings.prefix, name):
        library = _open(name, level, settings, context)
        actual = library.run_all(data.batches)
        found: LevelVerdict = {"ran_on": library.ran_on}
        if reference is not None:
            names = [spec.name for spec in library.outputs]
            if indices and not reason:
                delivered = functools.partial(_lower, own, context)
                check = IndexCheck(
                    indices,
                    library,
                    reference.results,
                    reference.tolerance,
                    own,
                    context.inputs,
                    delivered,
                )
                found["index_inputs"], actual = check.tensors, check.settle(actual)
            elif indices:
                # another CPU may choose among equals
                names = [output for output in names if output not in indices.outputs]
                if not names:
                    return {"not_verified": _ONLY_INDEX.format(reason)}
            found["outputs"] = comparison.compare_batches(
                names, actual, reference.results.outputs, data, reference.tolerance
            )
            if level.run_on == LOCAL and reference.sized and not indices:
                found["sizes"] = list_wrong_sizes(library, reference, case)
            add_layers(found, verdict["tolerance"]["for"], library, case._replace(settings=own))
        if library.timed is not None:
            feed = {spec.name: data.batches[0][spec.name] for spec in library.inputs}
            with exclusive_devices(settings, context):
                found["latency"] = measure(library.timed, feed, settings.verify.repeat)
    return found


def _lower(settings: VerifySettings, context: StageContext) -> tvm.IRModule:
    """Return the lowered module that a level of the library has the kernels of."""
    from tvmflow.compiler import lowering

    assert settings.lowering is not None
    mod = lowering.load_ir(context.inputs["import/model.json"])
    return lowering.lower(
        mod, lowering.make_target(settings.machines[""].tvm), settings.lowering
    ).mod


def _open(
    name: str, level: LevelSettings, settings: VerifySettings, context: StageContext
) -> Library:
    """Return the library, ready to run where the level runs."""
    bundle = context.inputs["export/module.tvmflow"]
    if level.run_on == LOCAL:
        return load_local(bundle, settings)
    from tvmflow.runtime import bundles
    from tvmflow.stages.verify import remote_backends

    signature = bundles.read_bundle(bundle, with_libraries=False).signature
    scratch = context.work / name
    scratch.mkdir(exist_ok=True)
    return remote_backends.EmulatedLibrary(
        remote_backends.Signature.from_json(signature),
        level.machine,
        scratch,
        context.inputs["emulation_program/program"],
    )


@contextlib.contextmanager
def _forced_level(prefix: str, name: str) -> Iterator[None]:
    """Let libraries that are loaded meanwhile run a level; qemu passes its environment on."""
    key = variable(prefix)
    before = os.environ.get(key)
    os.environ[key] = name
    try:
        yield
    finally:
        del os.environ[key]
        if before is not None:
            os.environ[key] = before
