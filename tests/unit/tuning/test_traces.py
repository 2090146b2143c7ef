"""Traces from anywhere: those that a search writes are accepted, and nothing that carries code of its own."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import Count
from tests.support import tuning
from tests.support.trials import trial
from tests.unit.tuning.make_traces import FILE
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Json
from tvmflow.recipe.lock_file import LockedKernel
from tvmflow.tuning import traces
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.measure import apply_trace
from tvmflow.tuning.trials import parse_line, record_to_json, trial_id

CORPUS: Final[dict[str, dict[str, Json]]] = json.loads(FILE.read_text())

FOREIGN_KEYS: Final = (
    "pragma_import_llvm",
    "pragma_import_c",
    "pragma_debug_skip_region",
    "pragma_parallel_launch_point",
    "pragma_anything",
    "meta_schedule.anything",
    "async_scope",
    "warp_execution",
    "",
)
FOREIGN_VALUES: Final[tuple[Json, ...]] = (
    '"define void @f() { ret void }"',
    "void f(void) {}",
    '"/tmp/x.ll"',
    '"x"; system("x")',
    '"a b"',
    '{"root_index": 0, "nodes": []}',
    "\x00",
    "x" * 100_000,
    {"any": 1},
    ["b0", {"any": 1}],
    [["text"]],
)
FOREIGN_INSTRUCTIONS: Final = (
    "UnsafeSetDType UnsafeHideBufferAccess AnnotateBufferAccess RollingBuffer ReindexCacheRead "
    "CacheIndex LoopPartition Exec".split()
)


def mutated(draw: random.Random, trace: Json) -> Json:
    """Return a trace with one foreign thing in it."""
    trace = copy.deepcopy(trace)
    instruction = draw.choice(trace[0])
    kind = draw.randrange(6)
    if kind == 0:
        foreign = [draw.choice(FOREIGN_KEYS)]
        trace[0].insert(draw.randrange(len(trace[0])), ["Annotate", ["l1", 1], foreign, []])
    elif kind == 1:
        key = draw.choice(["meta_schedule.parallel", "meta_schedule.auto_tensorize"])
        value = draw.choice(FOREIGN_VALUES)
        trace[0].append(["Annotate", ["l1", value], [key], []])
    elif kind == 2:
        instruction[0] = draw.choice(FOREIGN_INSTRUCTIONS)
    elif kind == 3:
        instruction[1].append(draw.choice(FOREIGN_VALUES))
    elif kind == 4 and instruction[0] != "GetSBlock":
        # the names of blocks are looked up, and nothing else
        instruction[2].append(draw.choice(FOREIGN_VALUES))
    else:
        trace[1].append([0, draw.choice(FOREIGN_VALUES)])
    return trace


@pytest.mark.parametrize("origin", CORPUS)
def test_what_a_search_writes_is_accepted(origin: str) -> None:
    """MetaSchedule's schedules for CPUs and GPUs, and those of the rules."""
    trace = CORPUS[origin]["trace"]
    assert traces.has_form(trace)
    assert traces.find_problem(trace) == ""


def test_the_corpus_has_all_kinds_of_targets_and_rules() -> None:
    """Otherwise it would tell little."""
    text = " ".join(CORPUS)
    for word in ("cuda", "vnni", "arm", "register_tiles", "row_reductions", "elementwise"):
        assert word in text
    kinds = {entry[0] for value in CORPUS.values() for entry in value["trace"][0]}
    assert {"Annotate", "Tensorize", "TransformLayout", "TransformBlockLayout", "Bind"} <= kinds


def test_what_is_foreign_is_refused(count: Count) -> None:
    """Wherever it stands: in a key, a value, a kind of instruction, an input, an attribute, a decision."""
    draw, corpus = random.Random(0), [entry["trace"] for entry in CORPUS.values()]
    for _ in range(1000):
        trace = mutated(draw, draw.choice(corpus))
        assert traces.find_problem(trace), trace
    count("foreign traces refused", 1000)


def index_maps() -> Iterator[tuple[Json, list[Json], int]]:
    """Yield each trace with an index map, the list that the map is in, and where."""
    for entry in CORPUS.values():
        trace = copy.deepcopy(entry["trace"])
        for instruction in trace[0]:
            for values in instruction[1:3]:
                for number, value in enumerate(values):
                    if isinstance(value, str) and "tirx.IndexMap" in value:
                        yield trace, values, number


def test_an_index_map_that_calls_a_function_is_refused() -> None:
    """It is a serialized expression, which can call any function of the C library."""
    refused = 0
    for trace, values, number in index_maps():
        graph = json.loads(values[number])
        graph["nodes"].append({"type": "ir.Call", "data": {"op": "tirx.call_extern"}})
        values[number] = json.dumps(graph)
        assert "index map" in traces.find_problem(trace)
        refused += 1
    assert refused


def annotated(key: str, value: Json) -> Json:
    block = ["GetSBlock", [], ["b0", "main"], ["b0"]]
    loops = ["GetLoops", ["b0"], [], ["l1", "l2", "l3"]]
    return [[block, loops, ["Annotate", ["l1", value], [key], []]], []]


FOREIGN: Final = annotated("pragma_import_llvm", '"define void @f() { ret void }"')


def test_a_foreign_trace_is_not_applied() -> None:
    """Whatever let it through: of what is applied, all goes through one function."""
    import tvm

    task = tuning.task_of(tuning.model(tuning.dense(16)))
    mod = tvm.ir.load_json(task.mod)
    assert apply_trace(mod, annotated("pragma_auto_unroll_max_step", 16)).mod
    with pytest.raises(ValueError, match="pragma_import_llvm"):
        apply_trace(mod, FOREIGN)


def test_a_foreign_trace_in_a_ledger_is_quarantined(tmp_path: Path) -> None:
    """The others stay, and the line is named."""
    path = tmp_path / "a" / "b.jsonl"
    path.parent.mkdir()
    ledger = WorkloadLedger(path)
    ledger.append(trial(1))
    foreign = trial(2, trace=FOREIGN, id=trial_id(FOREIGN))
    with path.open("ab") as stream:
        stream.write(json.dumps(record_to_json(foreign), sort_keys=True).encode() + b"\n")
    ledger = WorkloadLedger(path)
    assert list(ledger.trials) == [trial(1).id]
    assert ledger.quarantined == 1
    assert "b.jsonl:3" in ledger.repairs[0] and "pragma_import_llvm" in ledger.repairs[0]


def test_a_foreign_trace_in_a_lock_file_is_refused() -> None:
    """A lock file is read by people, and a trace in it is not."""
    fields: dict[str, Any] = {"names": ["dense"], "calls": 1, "tuned_us": 1.0}
    for trace in (annotated("pragma_auto_unroll_max_step", 16), FOREIGN):
        text = json.dumps(trace)
        kernel = {**fields, "trial": trial_id(trace), "trace": text}
        if trace is FOREIGN:
            with pytest.raises((ValueError, RecipeError), match="pragma_import_llvm"):
                LockedKernel.model_validate(kernel)
        else:
            assert LockedKernel.model_validate(kernel).trace == text


def test_a_deeply_nested_trace_in_a_lock_file_is_refused() -> None:
    """Python's own reader would end with a RecursionError."""
    kernel = {"names": ["x"], "calls": 1, "trial": "0" * 64, "trace": "[" * 100_000}
    with pytest.raises(ValueError, match="is not JSON"):
        LockedKernel.model_validate(kernel)


def test_a_record_with_a_foreign_trace_is_no_record() -> None:
    """So it enters no ledger, whatever brings it."""
    foreign = trial(2, trace=FOREIGN, id=trial_id(FOREIGN))
    with pytest.raises(ValueError, match="no search writes"):
        parse_line(json.dumps(record_to_json(foreign)).encode())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["vnni", "arm", "cuda"])
def test_what_the_search_of_this_tvm_writes_is_accepted(target: str, count: Count) -> None:
    """Made anew: another version of TVM, or a new rule, may write what the list does not have yet."""
    from tests.unit.tuning.make_traces import TARGETS
    from tests.unit.tuning.make_traces import traces as make

    number = 0
    for origin, trace in make(TARGETS[target]):
        assert traces.find_problem(trace) == "", origin
        number += 1
    assert number
    count("traces of searches accepted", number)
