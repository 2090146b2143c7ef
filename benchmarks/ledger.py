"""What it costs to open one workload of a big ledger, against TVM's own database of as many records.

    python benchmarks/ledger.py [--records N] [--peer-records N] [--workloads N]

Both hold the same traces of real schedules, spread over as many workloads. Ours is a file for
each workload; TVM's `JSONDatabase` is two files that are read whole, each trace applied again,
before the first question can be asked. That takes so long that it gets a tenth of the records
unless `--peer-records` says otherwise. Every measurement is in a process of its own: wall
seconds, and by how much its memory grew at most. The median of three for ours.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.trials import DEVICE, TARGET
from tvmflow.tuning import records
from tvmflow.tuning.ledger import Ledger, Trial, canonical, trial_id

SIZE = 64
# the workload that is asked for; both have it, however few they hold
WANTED = 1


# ---------------------------------------------------------------- filling both


def key_of(workload: int) -> str:
    return hashlib.sha256(str(workload).encode()).hexdigest()


def matmul(workload: int) -> Any:
    """A matrix product and a sum with a number that makes it this workload and no other."""
    from tvm import te

    left = te.placeholder((SIZE, SIZE), name="left")
    right = te.placeholder((SIZE, SIZE), name="right")
    k = te.reduce_axis((0, SIZE), name="k")
    product = te.compute((SIZE, SIZE), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k))
    result = te.compute((SIZE, SIZE), lambda i, j: product[i, j] + float(workload))
    return te.create_prim_func([left, right, result])


def real_traces(number: int) -> list[Any]:
    """So many different schedules that MetaSchedule draws for such a workload."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    from tvmflow.schedules.intrinsics import load_intrinsics
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
    found: dict[str, Any] = {}
    while len(found) < number:
        for candidate in context.generate_measure_candidates():
            trace = trace_json(candidate.sch.trace)
            found[trial_id(trace)] = trace
    return list(found.values())[:number]


def fill_ledger(root: Path, traces: list[Any], workloads: int) -> int:
    """The ledger; its bytes."""
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
    """TVM's database with the same traces: one record is committed, the others are written as it was."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    from tvmflow.tuning.measure import scheduled

    paths = str(folder / "workloads.json"), str(folder / "records.json")
    database = ms.database.JSONDatabase(*paths)
    committed = [
        database.commit_workload(tvm.IRModule({"main": matmul(workload)}))
        for workload in range(workloads)
    ]
    mod = tvm.IRModule({"main": matmul(0)})
    schedule = tvm.s_tir.Schedule(mod, seed=1)
    tvm.s_tir.schedule.Trace.apply_json_to_schedule(traces[0], schedule)
    assert scheduled(mod, traces[0])
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
    """A line of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def open_workload(root: str) -> int:
    """Ours: the trials of one workload, best first."""
    ledger = Ledger.open(Path(root), TARGET, "0", DEVICE)
    return len(ledger.workload(key_of(WANTED)).valid())


def list_all(root: str) -> int:
    """Ours: what `tvmflow records ls` counts."""
    return sum(records.summarise(folder).trials for folder in records.folders(Path(root)))


def open_database(folder: str) -> int:
    """TVM's: the best records of one workload."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(f"{folder}/workloads.json", f"{folder}/records.json")
    workload = database.commit_workload(tvm.IRModule({"main": matmul(WANTED)}))
    return len(database.get_top_k(workload, 1 << 20))


def import_tvm(_: str) -> int:
    """What is no part of any measurement: loading TVM, and the instructions that traces name."""
    from tvmflow.schedules.intrinsics import load_intrinsics

    load_intrinsics(TARGET)
    matmul(WANTED)
    return 0


def measured(name: str, before: str, place: str) -> dict[str, float]:
    """Seconds, most memory above what there was (bytes), and how many records were found."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, before, place],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(name: str, before: str, place: str) -> None:
    if before:
        globals()[before](place)
    resident = memory("VmRSS")
    # the peak so far belongs to the imports
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    found = globals()[name](place)
    seconds = time.perf_counter() - started
    print(json.dumps({"s": seconds, "bytes": memory("VmHWM") - resident, "records": found}))


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
    each = args.records // args.workloads
    peer_records = args.peer_records or args.records // 10
    peer_workloads = peer_records // each
    traces = real_traces(each)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = fill_ledger(folder / "many", traces, args.workloads)
        fill_ledger(folder / "few", traces, 10)
        fill_database(folder, traces, peer_workloads)
        ours = [measured("open_workload", "", str(folder / "many")) for _ in range(3)]
        small = [measured("open_workload", "", str(folder / "few")) for _ in range(3)]
        listing = measured("list_all", "", str(folder / "many"))
        theirs = measured("open_database", "import_tvm", name)
    assert {one["records"] for one in (*ours, *small, theirs)} == {each}, (ours, small, theirs)
    assert listing["records"] == each * args.workloads
    open_s = statistics.median(one["s"] for one in ours)
    open_bytes = statistics.median(one["bytes"] for one in ours)
    result = {
        "records": each * args.workloads,
        "ledger_mb": round(size / 1e6),
        "open_one_workload_ms": round(open_s * 1e3, 2),
        "open_one_workload_mb": round(open_bytes / 1e6, 2),
        "open_one_of_ten_workloads_ms": round(
            statistics.median(one["s"] for one in small) * 1e3, 2
        ),
        "ls_s": round(listing["s"], 2),
        "ls_mb": round(listing["bytes"] / 1e6, 2),
        "peer_records": each * peer_workloads,
        "peer_open_s": round(theirs["s"], 2),
        "peer_open_mb": round(theirs["bytes"] / 1e6, 1),
        "times_as_fast": round(theirs["s"] / open_s),
        "of_its_memory": round(open_bytes / theirs["bytes"], 5),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
