"""The cost of opening one workload of a large ledger, compared with TVM's own database of as many records.

    python benchmarks/pipeline/ledger.py [--records N] [--peer-records N] [--workloads N]

Both hold the same traces of real schedules, spread over as many workloads. The ledger has a file for
each workload; TVM's `JSONDatabase` has two files that are read completely, and applies each trace
again, before the first query. That takes so long that it gets a tenth of the records unless
`--peer-records` is given. Every measurement is in a process of its own: wall seconds, and the
growth of its memory at most. For the ledger it is the median of three.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.trials import DEVICE, TARGET
from tvmflow.core.canonical_json import canonical
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.ledger_folders import list_target_folders, summarize_target
from tvmflow.tuning.trials import Trial, trial_id

SIZE = 64
# The workload to open. Both databases have it, whatever their size.
QUERIED = 1


# ---------------------------------------------------------------- filling both databases


def key_of(workload: int) -> str:
    return hashlib.sha256(str(workload).encode()).hexdigest()


def matmul(workload: int) -> Any:
    """Return a matmul plus a number, which makes the workload unique."""
    from tvm import te

    left = te.placeholder((SIZE, SIZE), name="left")
    right = te.placeholder((SIZE, SIZE), name="right")
    k = te.reduce_axis((0, SIZE), name="k")
    product = te.compute((SIZE, SIZE), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k))
    result = te.compute((SIZE, SIZE), lambda i, j: product[i, j] + float(workload))
    return te.create_prim_func([left, right, result])


def real_traces(number: int) -> list[Any]:
    """Return different schedules that MetaSchedule draws for such a workload."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    from tvmflow.compiler.schedules.intrinsics import load_intrinsics
    from tvmflow.tuning.measure import trace_json

    load_intrinsics(TARGET)
    context = ms.TuneContext(
        tvm.IRModule({"main": matmul(0)}),
        target=tvm.target.Target(dict(TARGET)),
        space_generator="post-order-apply",
        search_strategy=ms.search_strategy.ReplayTrace(),
        rand_state=1,
        num_threads=1,
    )
    context.pre_tuning(
        max_trials=1 << 30,
        num_trials_per_iter=64,
        design_spaces=context.generate_design_space(),
        database=ms.database.MemoryDatabase(),
        cost_model=ms.cost_model.RandomModel(),
    )
    traces_by_id: dict[str, Any] = {}
    while len(traces_by_id) < number:
        for candidate in context.generate_measure_candidates():
            trace = trace_json(candidate.sch.trace)
            traces_by_id[trial_id(trace)] = trace
    return list(traces_by_id.values())[:number]


def fill_ledger(root: Path, traces: list[Any], workloads: int) -> int:
    """Write the ledger, and return its size in bytes."""
    ledger = Ledger.open(root, TARGET, "0", DEVICE)
    lines = b"".join(
        canonical(
            Trial(
                id=trial_id(trace),
                trace=trace,
                run_secs=(1e-3 + number * 1e-6, 1e-3, 1e-3),
                failure=None,
                when="2024-01-01T00:00:00.000+00:00",
                tvm="0",
                host={"arch": "any", "cores": 2, "model": "any"},
                load=(0.0, 0.0, 0.0),
                seed=0,
            ).to_json()
        )
        + b"\n"
        for number, trace in enumerate(traces)
    )
    for workload in range(workloads):
        (ledger.folder / f"{key_of(workload)}.jsonl").write_bytes(lines)
    return len(lines) * workloads


def fill_database(folder: Path, traces: list[Any], workloads: int) -> None:
    """Write TVM's database with the same traces: one record is committed, the others are copies of its text."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    from tvmflow.tuning.measure import apply_trace

    paths = str(folder / "workloads.json"), str(folder / "records.json")
    database = ms.database.JSONDatabase(*paths)
    committed = [
        database.commit_workload(tvm.IRModule({"main": matmul(workload)}))
        for workload in range(workloads)
    ]
    mod = tvm.IRModule({"main": matmul(0)})
    schedule = tvm.s_tir.Schedule(mod, seed=1)
    tvm.s_tir.schedule.Trace.apply_json_to_schedule(traces[0], schedule)
    assert apply_trace(mod, traces[0])
    database.commit_tuning_record(
        ms.database.TuningRecord(
            schedule.trace,
            committed[0],
            [1e-3],
            tvm.target.Target(dict(TARGET)),
            ms.arg_info.ArgInfo.from_entry_func(mod),
        )
    )
    del database
    [line] = Path(paths[1]).read_text().splitlines()
    _, (_, times, target, arguments) = json.loads(line)
    with Path(paths[1]).open("w") as stream:
        for workload in range(workloads):
            for trace in traces:
                record = [workload, [trace, times, target, arguments]]
                stream.write(json.dumps(record, separators=(",", ":")) + "\n")


# ---------------------------------------------------------------- one process each


def memory(field: str) -> int:
    """Return a field of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def open_workload(root: str) -> int:
    """Open one workload of the ledger, and return the number of its valid trials."""
    ledger = Ledger.open(Path(root), TARGET, "0", DEVICE)
    return len(ledger.workload(key_of(QUERIED)).valid())


def list_all(root: str) -> int:
    """Count all trials as `tvmflow records ls` does."""
    return sum(summarize_target(folder).trials for folder in list_target_folders(Path(root)))


def open_database(folder: str) -> int:
    """Open TVM's database, and return the number of records of one workload."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(f"{folder}/workloads.json", f"{folder}/records.json")
    workload = database.commit_workload(tvm.IRModule({"main": matmul(QUERIED)}))
    return len(database.get_top_k(workload, 1 << 20))


def import_tvm(_: str) -> int:
    """Load TVM and the instructions that traces name, which is part of no measurement."""
    from tvmflow.compiler.schedules.intrinsics import load_intrinsics

    load_intrinsics(TARGET)
    matmul(QUERIED)
    return 0


def measured(name: str, before: str, folder_name: str) -> dict[str, float]:
    """Return the seconds, the growth of memory (bytes), and the number of records."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, before, folder_name],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(name: str, before: str, folder_name: str) -> None:
    if before:
        globals()[before](folder_name)
    resident = memory("VmRSS")
    # The peak so far is that of the imports.
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    records = globals()[name](folder_name)
    seconds = time.perf_counter() - started
    print(json.dumps({"s": seconds, "bytes": memory("VmHWM") - resident, "records": records}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--peer-records", type=int)
    parser.add_argument("--workloads", type=int, default=1_000)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    records_each = args.records // args.workloads
    peer_records = args.peer_records or args.records // 10
    peer_workloads = peer_records // records_each
    traces = real_traces(records_each)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = fill_ledger(folder / "many", traces, args.workloads)
        fill_ledger(folder / "few", traces, 10)
        fill_database(folder, traces, peer_workloads)
        tvmflow_result = [measured("open_workload", "", str(folder / "many")) for _ in range(3)]
        small = [measured("open_workload", "", str(folder / "few")) for _ in range(3)]
        listing = measured("list_all", "", str(folder / "many"))
        peer_result = measured("open_database", "import_tvm", name)
    assert {one["records"] for one in (*tvmflow_result, *small, peer_result)} == {records_each}, (
        tvmflow_result,
        small,
        peer_result,
    )
    assert listing["records"] == records_each * args.workloads
    open_s = statistics.median(one["s"] for one in tvmflow_result)
    open_bytes = statistics.median(one["bytes"] for one in tvmflow_result)
    result = {
        "records": records_each * args.workloads,
        "ledger_mb": round(size / 1e6),
        "open_one_workload_ms": round(open_s * 1e3, 2),
        "open_one_workload_mb": round(open_bytes / 1e6, 2),
        "open_one_of_ten_workloads_ms": round(
            statistics.median(one["s"] for one in small) * 1e3, 2
        ),
        "ls_s": round(listing["s"], 2),
        "ls_mb": round(listing["bytes"] / 1e6, 2),
        "peer_records": records_each * peer_workloads,
        "peer_open_s": round(peer_result["s"], 2),
        "peer_open_mb": round(peer_result["bytes"] / 1e6, 1),
        "times_as_fast": round(peer_result["s"] / open_s),
        "of_its_memory": round(open_bytes / peer_result["bytes"], 5),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
