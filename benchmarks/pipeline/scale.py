"""The cost of planning and confirming thousands of stages that are up to date, compared with DVC and Snakemake.

    python benchmarks/pipeline/scale.py [--stages N ...] [--rounds N] [--peers dvc snakemake] [--limit SECONDS] [--json FILE]

A recipe with variants and targets is planned from YAML, on a store that a fake executor has filled:
its stages write a few bytes each. Measured are whole processes, wall and processor seconds and peak memory:
`tvmflow run` with nothing to do, without and with a cached answer (*first*, *again*), and
`tvmflow plan` without and with one (*plan*, *plan_answer*). With `--peers`, DVC and Snakemake get a graph of the same shape (for every model an
import, for every target of it a lower, a build, an export and a verify) whose stages copy a file and are all
up to date, with at most `--limit` seconds for a run. They are installed into virtual environments
under $TVMFLOW_BENCH_VENVS (kept), or a temporary folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.fake_executor import FakeExecutor
from tests.support.project import Project
from tvmflow.engine import session
from tvmflow.planning.prepare import RunRequest, prepare_run
from tvmflow.store.local import LocalStore

ROOT = Path(__file__).resolve().parents[2]
SETTLE_S = 2.5
PEERS = {"dvc": "dvc==3.67.1", "snakemake": "snakemake==9.27.1"}
DEPTH = ("import", "lower", "build", "export", "verify")


class Shape(NamedTuple):
    """The number of models (variants of one recipe), and of targets of each."""

    models: int
    targets: int

    @property
    def stages(self) -> int:
        return self.models * (1 + (len(DEPTH) - 1) * self.targets)


def choose_shape(stages: int) -> Shape:
    """Return a shape with about this many stages: as many targets as a large release has, then variants."""
    targets = 33 if stages >= 500 else 8
    return Shape(max(1, round(stages / Shape(1, targets).stages)), targets)


class Usage(NamedTuple):
    """The wall time, CPU time, peak memory and exit code of one process."""

    seconds: float
    cpu_s: float
    rss_mb: float
    code: int


# The peak memory of a process includes that of the process it was forked from, so a small one starts it.
_MEASURE = """
import json, os, signal, subprocess, sys, time
limit, command = float(sys.argv[1]), sys.argv[2:]
started = time.perf_counter()
process = subprocess.Popen(
    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
)
signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
signal.setitimer(signal.ITIMER_REAL, limit)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - started
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps([seconds, cpu, usage.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)]))
"""


def measure(command: Sequence[str], folder: Path, limit_s: float = 600.0) -> Usage:
    """Run a command until it ends or the limit is reached; then its code is -9."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", _MEASURE, str(limit_s), *command],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return Usage(*json.loads(done.stdout))


# ---------------------------------------------------------------- tvmflow


def write_recipe(folder: Path, shape: Shape) -> None:
    project = Project(folder)
    targets = [f"{{name: t{n}, preset: host, threads: {n}}}" for n in range(1, shape.targets + 1)]
    project.write_recipe(targets=targets)
    variants = "".join(
        f"  v{n}: {{inputs: {{data: {{range: [0, {n}]}}}}}}\n" for n in range(1, shape.models + 1)
    )
    with (folder / "tiny.yaml").open("a") as stream:
        stream.write(f"variants:\n{variants}pipeline: compile\n")
    project.edit_recipe("[shared-library, bundle]", "[bundle]")


def fill(folder: Path, jobs: int) -> dict[str, float]:
    """Run everything with a fake executor, and return the seconds of planning and of the run."""
    os.chdir(folder)
    store = LocalStore(str(folder / "cache"))
    store.create()
    started = time.perf_counter()
    prepared = prepare_run(RunRequest(("tiny.yaml",)), store)
    planned = time.perf_counter()
    report = session.run_plan(
        prepared.plan,
        store,
        FakeExecutor(),
        lambda event: None,
        session.SessionOptions(jobs=jobs, dist=str(folder / "dist")),
    )
    assert report.exit_code == 0, report.stages[:3]
    return {
        "stages": len(prepared.plan.stages),
        "plan_s": planned - started,
        "fill_s": time.perf_counter() - planned,
    }


def measure_tvmflow(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the times and the memory of all commands."""
    command = [sys.executable, "-m", "tvmflow"]
    run, plan = [*command, "run", "tiny.yaml"], [*command, "plan", "tiny.yaml"]
    usages: dict[str, list[Usage]] = {}
    for _ in range(rounds):
        shutil.rmtree(folder / "cache" / "plans", ignore_errors=True)
        # An answer is cached only when no file has changed in the last two seconds.
        time.sleep(SETTLE_S)
        usages.setdefault("first", []).append(measure(run, folder))
        usages.setdefault("again", []).append(measure(run, folder))
        usages.setdefault("plan", []).append(measure(plan, folder))
        usages.setdefault("plan_answer", []).append(measure(plan, folder))
    return {name: summarize(measured) for name, measured in usages.items()}


def summarize(usages: Sequence[Usage]) -> dict[str, float]:
    """Return the median of wall times, the least processor time, which other programs delay less, and the memory."""
    assert all(usage.code == 0 for usage in usages), usages
    return {
        "s": round(statistics.median(usage.seconds for usage in usages), 3),
        "cpu_s": round(min(usage.cpu_s for usage in usages), 3),
        "mb": round(max(usage.rss_mb for usage in usages)),
    }


# ---------------------------------------------------------------- peers


def edges(shape: Shape) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of every stage and the names of those that it needs, as in tvmflow's plan."""
    for model in range(shape.models):
        top = f"import-{model}"
        yield top, []
        for target in range(shape.targets):
            lower, build, export, verify = (f"{stage}-{model}-{target}" for stage in DEPTH[1:])
            yield lower, [top]
            yield build, [top, lower]
            yield export, [top, build]
            yield verify, [top, build, export]


def content(name: str) -> str:
    return f"{name}\n"


def peer_venvs() -> Path:
    named = os.environ.get("TVMFLOW_BENCH_VENVS")
    return Path(named) if named else Path(tempfile.mkdtemp(prefix="tvmflow-bench-"))


def install(name: str, base: Path) -> Path:
    """Return the program of a peer, installed if it is not yet."""
    place = base / name
    program = place / "bin" / name
    if not program.exists():
        venv.create(place, with_pip=True, clear=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "install", PEERS[name]]
        subprocess.run(pip, check=True)
    return program


def write_files(folder: Path, shape: Shape) -> None:
    (folder / "model").write_text("model\n")
    for name, _ in edges(shape):
        (folder / name).write_text(content(name))


def write_snakemake(folder: Path, shape: Shape) -> None:
    """Write a Snakefile, and every output newer than its inputs."""
    rules = ["rule all:\n  input: " + ", ".join(f'"{name}"' for name, _ in edges(shape)) + "\n"]
    for name, needs in edges(shape):
        inputs = ", ".join(f'"{need}"' for need in needs or ["model"])
        rules.append(
            f'rule:\n  name: "{name}"\n  input: {inputs}\n  output: "{name}"\n'
            f'  shell: "echo {name} > {{output}}"\n'
        )
    (folder / "Snakefile").write_text("\n".join(rules))
    write_files(folder, shape)


def write_dvc(folder: Path, shape: Shape) -> None:
    """Write dvc.yaml and dvc.lock as they are after a run."""

    def md5(name: str) -> str:
        return hashlib.md5(content(name).encode(), usedforsecurity=False).hexdigest()

    stages, lock = {}, {}
    for name, needs in edges(shape):
        inputs = needs or ["model"]
        command = f"echo {name} > {name}"
        stages[name] = {"cmd": command, "deps": inputs, "outs": [{name: {"cache": False}}]}
        lock[name] = {
            "cmd": command,
            "deps": [_locked(need, md5(need)) for need in inputs],
            "outs": [_locked(name, md5(name))],
        }
    # JSON is also YAML.
    (folder / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": lock}))
    write_files(folder, shape)


def _locked(name: str, digest: str) -> dict[str, Any]:
    return {"path": name, "hash": "md5", "md5": digest, "size": len(content(name))}


def peer(name: str, shape: Shape, program: Path, limit_s: float) -> dict[str, Any]:
    """Measure an up-to-date run of a peer twice: both save something in the first."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if name == "dvc":
            subprocess.run([str(program), "init", "--no-scm", "-q"], cwd=folder, check=True)
            write_dvc(folder, shape)
            command = [str(program), "repro"]
        else:
            write_snakemake(folder, shape)
            command = [str(program), "-c1", "--quiet", "all"]
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        first = measure(command, folder, limit_s)
        if first.code == -9:
            return {"first": f"not done after {limit_s:.0f} s"}
        again = measure(command, folder, limit_s)
        assert (first.code, again.code) == (0, 0), (name, first, again)
        # A peer that ran its stages again would not be measured doing nothing.
        after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        names = [stage for stage, _ in edges(shape)]
        assert all(after[stage] == before[stage] for stage in names), f"{name} ran stages"
        return {
            "first": {"s": round(first.seconds, 3), "mb": round(first.rss_mb)},
            "again": {"s": round(again.seconds, 3), "mb": round(again.rss_mb)},
        }


# ---------------------------------------------------------------- all


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="with which the store is filled")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=[])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run of a peer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base = peer_venvs() if args.peers else None
    rows = []
    for stages in args.stages:
        shape = choose_shape(stages)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_recipe(folder, shape)
            row: dict[str, Any] = {
                **fill(folder, args.jobs),
                "tvmflow": measure_tvmflow(folder, args.rounds),
            }
            os.chdir("/")
        assert row["stages"] == shape.stages, (row, shape)
        for name in args.peers if base else ():
            assert base is not None
            row[name] = peer(name, shape, install(name, base), args.limit)
            again = row[name].get("again")
            if again:
                row[name]["ratio_again"] = round(again["s"] / row["tvmflow"]["again"]["s"], 1)
                row[name]["ratio_first"] = round(
                    row[name]["first"]["s"] / row["tvmflow"]["first"]["s"], 1
                )
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
