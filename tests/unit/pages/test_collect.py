"""The details that a store still has; what it has no longer is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.facts import (
    build_facts,
    kernel_facts,
    pick_best_facts,
    profile,
    tune_facts,
    verify_facts,
    workload_facts,
)
from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json
from tvmflow.core.types import RecipeOrigin, StageKey
from tvmflow.engine.report import StageReport
from tvmflow.pages.collect import (
    count_bytes,
    list_kernels,
    list_stages,
    make_progress,
    read_recipes,
)
from tvmflow.pages.content import Kernel
from tvmflow.store.local import LocalStore
from tvmflow.tuning.ledger import Ledger, WorkloadDescription
from tvmflow.tuning.trials import Failure
from tvmflow.tuning.tuning_job import WorkloadFacts

CONV, POOL = "c0" * 32, "d0" * 32
TVM = "0.27.0+0123456789ab"
TUNE = "net:tune/host"


def workload(key: str, name: str, **fields: Any) -> dict[str, Any]:
    return workload_facts(name, key=key, **fields)


FACTS = tune_facts(
    workloads=[workload(POOL, "pool", untuned_us=10.0), workload(CONV, "conv", calls=2)]
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def publish(
    store: LocalStore,
    stage_id: str,
    facts: dict[str, Any],
    seconds: float = 7.0,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> str:
    """Put a result into the store, and return its key."""
    settings = {"target": {**TARGET}, "device": DEVICE, "threads": 2}
    tools = {"apache-tvm": TVM}
    preimage = {"stage": stage_id, "settings": settings, "tools": tools, "inputs": {"model": "a"}}
    key = StageKey(digest_of(preimage), preimage)
    with store.claim(key.digest) as claim:
        for name, content in files.items():
            Path(claim.out, name).write_bytes(content)
        store.publish(claim, key, facts, seconds, stage_id)
    return key.digest


def report(stage_id: str, outcome: str = "ran", **fields: Any) -> StageReport:
    return StageReport(stage_id, outcome, "never ran", 1.0, {})._replace(**fields)


def fill_ledger(store: LocalStore) -> None:
    ledger = Ledger.open(Path(store.ledger), TARGET, TVM, DEVICE)
    first = trial(1, seconds=40e-6, ran=(0.0, 2.0))
    failed = trial(2, run_secs=(), failure=Failure("run", "crash", "no"), ran=(2.0, 3.0))
    better, later = (
        trial(3, seconds=15e-6, ran=(3.0, 4.5)),
        trial(9, when="2999-01-01T00:00:00+00:00"),
    )
    for measured in (first, failed, better, later):
        ledger.workload(CONV).append(measured)
    ledger.describe(CONV, WorkloadDescription("conv", 8000.0, ("float32[10×100]", "int8[8]")))


def test_the_course_of_a_search_is_read_from_the_ledger(store: LocalStore) -> None:
    """The best time after each trial that was there when the search ended, without later ones."""
    fill_ledger(store)
    key = publish(store, TUNE, FACTS)
    conv = kernel_facts("conv", calls=2, flops=8000.0, untuned_us=90.0, tuned_us=30.0)
    chosen = pick_best_facts(kernels=[conv], peak_gflops=500.0)
    # two kernels with one workload, which the model calls once each
    places = build_facts(kernel_nodes={"conv": [[0, 1]], "conv1": [[2, 1]]})
    imported = {"nodes": ["/layer/Conv", "/layer/Relu", "/last/Conv"]}
    timed = verify_facts(profile=profile(conv=0.5, conv1=0.25, pool=0.25))
    tasks = json.dumps([{"key": CONV, "names": ["conv", "conv1"]}]).encode()
    tasks_key = publish(store, "net:extract_tasks/host", {}, files={"tasks.json": tasks})
    (library,) = list_kernels(
        [
            report("net:import", facts=imported),
            report("net:extract_tasks/host", key=tasks_key),
            report(TUNE, facts=FACTS, key=key),
            report("net:pick_best/host", facts=chosen),
            report("net:build/host", facts=places),
            report("net:verify/host", facts=timed),
        ],
        store,
    )
    assert library.kernels[0] == Kernel(
        name="conv",
        nodes=("/layer/Conv", "/layer/Relu", "/last/Conv"),
        calls=2,
        flops=8000.0,
        bytes=4008.0,
        untuned_s=90.0 / 1e6,
        tuned_s=30.0 / 1e6,
        least_s=25.0 / 1e6,
        curve=(80e-6, 80e-6, 30e-6),
        trials=2,
        share=0.75,
    )
    assert library.kernels[0].roofline_share == pytest.approx(25 / 30)
    assert [kernel.name for kernel in library.kernels] == ["conv", "pool"]
    assert library.peak_gflops == 500.0
    # two calls of conv, one of pool: 210 µs untuned
    assert [(entry.trials, round(entry.best_s * 1e6)) for entry in library.progress] == [
        *((0, 210), (1, 170), (3, 70)),
    ]
    assert library.progress[-1].measuring_s == pytest.approx(4.5)
    assert library.notes == ("No longer in the ledger: 2 trials of this search.",)


def test_what_the_store_has_no_longer_is_said(store: LocalStore) -> None:
    """Facts are in the record of the run; curves need the result of `tune`."""
    (library,) = list_kernels([report(TUNE, facts=FACTS, key="ab" * 32)], store)
    assert [kernel.curve for kernel in library.kernels] == [(), ()]
    assert library.progress == () and "no longer in the store" in library.notes[0]
    (library,) = list_kernels([report(TUNE, facts=FACTS)], None)
    assert "need the store" in library.notes[0]
    assert list_kernels([report(TUNE, facts=tune_facts(trials=0))], store) == ()


def test_the_kernels_of_a_damaged_record_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """And what is wrong with it is logged."""
    assert list_kernels([report(TUNE, facts={**FACTS, "workloads": 3})], None) == ()
    text = "the facts of tune/host cannot be read (workloads: an integer instead of a list)"
    assert text in caplog.text


def test_kernels_of_a_library_without_tuning_have_their_shares_of_the_time() -> None:
    reports = [
        report("net:import", facts={"nodes": ["/layer/Conv"]}),
        report("net:build/host", facts=build_facts(kernel_nodes={"conv": [[0]], "pool": [[]]})),
        report("net:verify/host", facts=verify_facts(profile=profile(pool=0.2, conv=0.8))),
    ]
    (library,) = list_kernels(reports, None)
    assert library.label == "net/host" and library.progress == ()
    assert library.kernels == (
        Kernel("conv", ("/layer/Conv",), share=0.8),
        Kernel("pool", share=0.2),
    )


def test_progress_counts_kernels_as_untuned_until_a_trial_is_better() -> None:
    slower, faster = trial(1, seconds=1.0), trial(2, seconds=20e-6)
    known = (workload(CONV, "conv"), workload(POOL, "pool", untuned_us=None))
    workloads = [from_json(WorkloadFacts, facts) for facts in known]
    kept = {"conv"}
    progress = make_progress(workloads, {CONV: [slower, faster], POOL: [trial(3)]}, kept)
    assert [(entry.trials, entry.measuring_s) for entry in progress] == [(0, 0.0), (2, 0.0)]
    assert [entry.best_s for entry in progress] == pytest.approx([100e-6, 40e-6])
    assert make_progress(workloads, {CONV: [slower]}, kept)[-1].trials == 1
    assert make_progress(workloads, {}, kept) == ()
    # the best trial was no faster when it was measured again
    vain = make_progress(workloads, {CONV: [slower, faster]}, ())
    assert [entry.best_s for entry in vain] == pytest.approx([100e-6, 100e-6])


def test_a_result_that_is_used_again_saved_what_it_took(store: LocalStore) -> None:
    key = publish(store, "net:build/host", {}, seconds=42.0)
    stages = [
        report("net:import"),
        report("net:build/host", "hit", key=key, seconds=0.0),
        report("net:export/host", "hit", key="ab" * 32, seconds=0.0),
    ]
    entries = list_stages(stages, store)
    assert [(entry.report.seconds, entry.saved_s) for entry in entries] == [
        (1.0, 0),
        (0, 42.0),
        (0, 0),
    ]
    assert [entry.needs for entry in entries] == [
        (),
        ("net:import",),
        ("net:import", "net:build/host"),
    ]


def test_a_quantized_model_takes_the_place_of_the_imported_one() -> None:
    stages = [report(f"net:{name}") for name in ("import", "quantize/host", "lower/host")]
    needs = [entry.needs for entry in list_stages(stages, None)]
    assert needs == [(), ("net:import",), ("net:quantize/host",)]


@pytest.mark.parametrize(
    ("buffers", "size"),
    [
        ((), None),
        (("float32[]",), 4),
        (("float16[2×3]", "bool[5]", "int64[2]"), 12 + 5 + 16),
        (("float32[n×3]",), None),
        (("bfloat16[4]", "handle"), None),
    ],
)
def test_the_bytes_of_parameters(buffers: tuple[str, ...], size: float | None) -> None:
    assert count_bytes(buffers) == size


def test_each_recipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("recipe: 1\n")
    origins = [RecipeOrigin(name, str(path), "p.yaml", name) for name in ("a", "b")]
    (text, missing) = read_recipes([*origins, RecipeOrigin("c", str(tmp_path / "no.yaml"), "")])
    assert (text.path, text.text, text.note) == (str(path), "recipe: 1\n", "")
    assert missing.note == "It cannot be read: No such file or directory."
