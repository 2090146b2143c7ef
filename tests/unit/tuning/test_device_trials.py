"""Trials on a device without TVM's runtime: kernels in libraries of their own, launched by OpenCL's driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from tests.support.devices import TARGET
from tests.support.tuning import TIMING, measure_context
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import ForkServer
from tvmflow.targets.backends import BACKENDS
from tvmflow.tuning import measure
from tvmflow.tuning.measurer import MeasureJob, Measurer, TrialRequest, find_wrong_values
from tvmflow.tuning.trials import Trial

_PROBLEM = BACKENDS["opencl"].unrunnable_reason(TARGET, in_this_process=False)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(_PROBLEM), reason=f"needs a driver for OpenCL: {_PROBLEM}"),
]


def squares(size: int, add: float = 0.0) -> tvm.IRModule:
    x = te.placeholder((size,), name="x")
    y = te.compute((size,), lambda i: x[i] * x[i] + add, name="y")
    return workload([x, y])


def endless_sums() -> tvm.IRModule:
    """Return a kernel that takes hours."""
    x = te.placeholder((16,), name="x")
    outer, inner = (te.reduce_axis((0, 1 << 20), name) for name in ("outer", "inner"))
    y = te.compute(
        (16,),
        lambda i: te.sum(x[i] * te.sqrt(x[(i + outer + inner) % 16]), [outer, inner]),
        name="y",
    )
    return workload([x, y])


def workload(tensors: list[Any]) -> tvm.IRModule:
    function = te.create_prim_func(tensors).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def in_one_block(mod: tvm.IRModule) -> Any:
    """Return a schedule with a block of as many threads as there are elements."""
    schedule = tvm.s_tir.Schedule(mod)
    loop, *_ = schedule.get_loops(schedule.get_sblock("y"))
    schedule.bind(loop, "threadIdx.x")
    return measure.trace_json(schedule.trace)


def run_trial(
    fork_server: ForkServer,
    folder: Path,
    mod: tvm.IRModule,
    trace: Any,
    timeout_s: float = 60.0,
    **target: int,
) -> Trial:
    context = measure_context(folder)._replace(
        target={**TARGET, **target}, device={"kind": "opencl"}, rules_version=1, by_driver=True
    )
    trials: list[Trial] = []
    job = MeasureJob(id="any", mod=tvm.ir.save_json(mod), trace=trace, best_s=None, seed=0)
    measurer = Measurer(context._replace(timeout_s=timeout_s), fork_server)
    measurer.measure([job], lambda _, trial: trials.append(trial))
    return trials[0]


def test_a_kernel_in_a_library_has_the_times_of_its_events(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """By a schedule of the search as by that of a rule; the driver is first opened in the child."""
    mod = squares(256)
    for trace in (None, in_one_block(mod)):
        trial = run_trial(fork_server, tmp_path, mod, trace)
        assert trial.failure is None
        assert all(0 < seconds < 1 for seconds in trial.run_secs)


def test_what_the_driver_refuses_is_a_failed_trial_with_its_words(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """More threads than the device runs in a block."""
    mod = squares(1 << 16)
    failure = run_trial(fork_server, tmp_path, mod, in_one_block(mod)).failure
    assert failure is not None
    assert (failure.phase, failure.kind) == ("run", "error")
    assert "needs blocks of 65536 threads, and this device runs at most" in failure.message
    assert "fix" not in failure.message


def test_a_kernel_that_does_not_end_is_ended(fork_server: ForkServer, tmp_path: Path) -> None:
    """With its process; the next one runs."""
    mod = endless_sums()
    failure = run_trial(fork_server, tmp_path, mod, in_one_block(mod), timeout_s=30.0).failure
    assert failure is not None and failure.kind == "timeout"
    assert run_trial(fork_server, tmp_path, squares(64), None).failure is None


def test_a_device_that_cannot_be_used_ends_the_search(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """No schedule is the culprit."""
    with pytest.raises(StageError, match=r"the opencl device .* cannot run kernels: .*max_threads"):
        run_trial(fork_server, tmp_path, squares(64), None, max_threads_per_block=1 << 20)


def test_values_are_compared_on_the_device(fork_server: ForkServer) -> None:
    """Those of a schedule with those of the untuned kernel, of the same arguments."""
    outcome = fork_server.call(compare_kernels, {}, timeout_s=60)
    assert outcome.value == ["", "its values are wrong"], outcome.message


def compare_kernels(payload: Any, emit: Any) -> list[str]:
    """Return what is wrong with a kernel, and with another one."""
    request = TrialRequest(
        mod=tvm.ir.save_json(squares(64)),
        target=TARGET,
        rules_version=1,
        timing=TIMING,
        trace=None,
        by_driver=True,
    )
    mod = squares(64)
    right, wrong = (
        request.build(measure.apply_trace(kernel, in_one_block(kernel)).mod)
        for kernel in (mod, squares(64, add=1.0))
    )
    untuned = request.build(request.schedule(None)[0])
    assert untuned.compute()[0].dtype == np.float32
    return [find_wrong_values(mod, untuned, kernel) for kernel in (right, wrong)]
