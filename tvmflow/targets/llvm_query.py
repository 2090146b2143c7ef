"""Queries TVM and LLVM about targets, in another process.

Loading TVM takes a second, and for some targets LLVM aborts its process, which must not be that of the run.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.core import packages
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.formatting import last_line
from tvmflow.core.logs import IDENTITY_WAIT, explain_wait
from tvmflow.core.processes import code_command
from tvmflow.core.types import Json
from tvmflow.store.local import LocalStore
from tvmflow.targets.features import isa_level_config
from tvmflow.targets.host import Host, read_host
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple

# The first words of the process's own output lines; LLVM may print other lines.
_LOADED: Final = "loaded"
_ANSWER: Final = "answer"
# Signals from other processes; LLVM ends its own process with SIGABRT, SIGSEGV and the like.
_FROM_OUTSIDE: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)

_RunProcess = Callable[..., Any]
# For one answer, including the time for loading TVM.
_TIMEOUT_S: Final = 120.0


class TargetFacts(NamedTuple):
    """What TVM and LLVM know about a target; for an invalid one, an error, perhaps with valid CPUs.

    For a target that is not a CPU, the triple is empty, and the architecture is TVM's kind instead of the Linux
    kernel's name. The features of the CPU, or of a GPU's host CPU, have LLVM's names.
    """

    triple: str = ""
    cpu: str = ""
    arch: str = ""
    features: tuple[str, ...] = ()
    error: str = ""
    valid_cpus: tuple[str, ...] = ()


def query_target(tvm: TvmTarget | None) -> TargetFacts:
    """Return the facts about a target (None: this machine). The process must be allowed to import TVM."""
    import tvm as tvm_package

    if tvm is None:
        detected = tvm_package.target.Target.from_device("cpu").export()
        tvm = {"kind": "llvm", "mtriple": read_host().triple, "mcpu": str(detected["mcpu"])}
    try:
        target = tvm_package.target.Target(dict(tvm))
    except Exception as error:
        return TargetFacts(error=f"TVM rejects this target: {last_line(error)}")
    if target.kind.name == "llvm":
        return _query_cpu(tvm, target)
    # Features of the host CPU, which code on the host may use.
    host = query_target(tvm["host"]) if tvm.get("host") else TargetFacts()
    return host if host.error else TargetFacts(arch=target.kind.name, features=host.features)


def _query_cpu(tvm: TvmTarget, target: Any) -> TargetFacts:
    from tvm.target import codegen

    triple, cpu = cpu_triple(tvm) or read_host().triple, str(tvm.get("mcpu", ""))
    try:
        if cpu and not codegen.llvm_is_valid_cpu(cpu, triple):
            valid = tuple(str(name) for name in codegen.llvm_get_cpu_archlist(target))
            error = f"'{cpu}' is not a CPU that LLVM knows for {triple}"
            return TargetFacts(error=error, valid_cpus=valid)
        features = tuple(sorted(str(name) for name in codegen.llvm_get_cpu_features(target)))
    except Exception as error:
        return TargetFacts(error=f"LLVM rejects {triple}: {last_line(error)}")
    platform = parse_triple(triple)
    if platform.arch == "riscv64" and platform.system == "linux" and "d" not in features:
        # Floats would be passed to expf in general registers, but it reads them from floating-point registers.
        return TargetFacts(
            error=f"{triple} passes floating-point numbers in their own registers, and this CPU has none; "
            "add `mattr: [+m, +a, +f, +d, +c]`"
        )
    # LLVM only prints a warning about an unknown feature, and ignores it.
    added = [str(name)[1:] for name in tvm.get("mattr", ()) if str(name).startswith("+")]
    unknown = [name for name in added if name not in features]
    if unknown:
        return TargetFacts(error=f"'+{unknown[0]}' is not a feature that LLVM knows for {triple}")
    return TargetFacts(triple, cpu, platform.arch, features)


def query_cpus(triple: str) -> list[str]:
    """Return LLVM's CPU names for a triple, sorted. The process must be allowed to import TVM."""
    import tvm
    from tvm.target import codegen

    target = tvm.target.Target({"kind": "llvm", "mtriple": triple})
    return sorted(str(name) for name in codegen.llvm_get_cpu_archlist(target))


def query_targets_in_process(
    targets: Sequence[Json], run_process: _RunProcess = subprocess.run
) -> list[Json]:
    """Return the facts about each target as JSON, from a new process.

    If LLVM aborts the process, the target is invalid, and another process answers the remaining queries.
    """
    answers: list[Json] = []
    while len(answers) < len(targets):
        answers += _query_in_process(query_target, targets[len(answers) :], run_process)
        if len(answers) < len(targets):
            answers.append(_describe_crash(targets[len(answers)]))
    return answers


def _describe_crash(target: Json) -> Json:
    triple = cpu_triple(target or {}) or "this machine"
    return TargetFacts(error=f"LLVM cannot compile for {triple}")._asdict()


def answer_query(target: Json, _: Emit) -> Json:
    """Return the facts about a target as JSON. Runs in a child of a fork server."""
    return query_target(target)._asdict()


def query_targets_in_children(targets: Sequence[Json], fork_server: ForkServer) -> list[Json]:
    """Return the facts about each target, from children of a fork server that has TVM loaded.

    If the server has ended, a new process answers instead, and reports the cause.
    """
    answers = []
    for target in targets:
        outcome = fork_server.call(answer_query, target, timeout_s=_TIMEOUT_S)
        is_crash = outcome.kind == "crashed" and not (outcome.is_external or outcome.is_killed)
        if outcome.kind != "ok" and (fork_server.is_gone or not is_crash):
            return query_targets_in_process(targets)
        answers.append(_describe_crash(target) if is_crash else outcome.value)
    return answers


def query_cpus_in_process(
    triples: Sequence[Json], run_process: _RunProcess = subprocess.run
) -> list[Json]:
    """Return LLVM's CPU names for each triple, from a new process."""
    return _query_in_process(query_cpus, triples, run_process)


def answer_queries(function: Callable[[Json], Any]) -> None:
    """Read queries from standard input, and print each answer at once. Runs in the new process."""
    sys.stdout.write(f"{_LOADED}\n")
    sys.stdout.flush()
    for query in json.load(sys.stdin):
        answer = function(query)
        value = answer._asdict() if isinstance(answer, TargetFacts) else answer
        sys.stdout.write(f"{_ANSWER} {json.dumps(value)}\n")
        sys.stdout.flush()


def _query_in_process(
    function: Callable[[Any], Any], queries: Sequence[Json], run_process: _RunProcess
) -> list[Json]:
    """Return the answers; they stop before the query, if any, for which LLVM ended the process."""
    name = function.__name__
    # TVM would import PyTorch, which is not needed here.
    without_torch = "sys.modules['torch'] = None"
    code = f"{without_torch}; import tvm; from {__name__} import {name}, answer_queries; answer_queries({name})"
    done = run_process(
        code_command(code),
        input=json.dumps(list(queries)),
        capture_output=True,
        text=True,
        check=False,
    )
    if -done.returncode in _FROM_OUTSIDE:
        # The killed process says nothing about the target, and its last line may be incomplete.
        name = signal.Signals(-done.returncode).name
        raise EnvironmentProblem(
            f"the process in which LLVM describes the targets was killed ({name})",
            fix="run again, with more free memory if there was too little",
        )
    lines = done.stdout.splitlines()
    if done.returncode == 0 or _LOADED in lines:
        words = [line.partition(" ") for line in lines]
        return [json.loads(answer) for word, _, answer in words if word == _ANSWER]
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise EnvironmentProblem(
        f"TVM, which describes the targets, cannot be loaded: {last}",
        fix="run `tvmflow doctor`; it checks the installation piece by piece",
    )


# ---------------------------------------------------------------- facts in the store
# LLVM is queried once per machine and build of TVM; afterwards, the answers come from the store.

_WAIT: Final = (
    "asking LLVM about the targets: a few seconds, once for each target and version of TVM"
)

_log = logging.getLogger(__name__)

_VERSION: Final = 3
"""Raise this when the answers change."""

Query = Callable[[Sequence[Json]], list[Json]]


def load_target_facts(
    store: LocalStore,
    targets: Sequence[TvmTarget | None],
    host: Host,
    query: Query = query_targets_in_process,
) -> list[TargetFacts]:
    """Return the facts about each target; None means this machine."""
    own = capped_target(host)
    queries = [own if target is None else dict(target) for target in targets]
    answers = _load_answers(store, queries, host.fingerprint(), query)
    return [from_json(TargetFacts, answer) for answer in answers]


def capped_target(host: Host) -> dict[str, Json] | None:
    """Return the target of a machine with capped features; otherwise None, so that LLVM detects the CPU."""
    return isa_level_config({"mtriple": host.triple}, host.capped_to) if host.capped_to else None


def load_cpus(store: LocalStore, triple: str, query: Query = query_cpus_in_process) -> list[str]:
    """Return LLVM's CPU names for a triple, sorted."""
    [names] = _load_answers(store, [triple], "cpus", query)
    return list(names)


def _load_answers(
    store: LocalStore, queries: Sequence[Json], context: Json, query: Query
) -> list[Json]:
    """Return the answer to each query: from the store, otherwise from `query`, whose answers are stored."""
    with explain_wait(IDENTITY_WAIT.format("apache-tvm")):
        build = packages.identity("apache-tvm")
    names = [digest_of([_VERSION, value, context, build]) for value in queries]
    notes = {name: store.notes.read("facts", name) for name in names}
    queries_by_name = dict(zip(names, queries, strict=True))
    missing = {name: value for name, value in queries_by_name.items() if notes[name] is None}
    if missing:
        _log.debug("LLVM is queried about %s: the store has no answer", list(missing.values()))
        with explain_wait(_WAIT):
            answers = query(list(missing.values()))
        for name, answer in zip(missing, answers, strict=True):
            notes[name] = json.dumps(answer)
            store.notes.keep(str(notes[name]), "facts", name)
    return [json.loads(notes[name] or "null") for name in names]
