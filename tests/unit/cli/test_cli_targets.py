"""`tvmflow targets`: every preset with its capabilities on this machine, and LLVM's CPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tvmflow.cli import main
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.store.local import LocalStore
from tvmflow.targets.backends import backend_for
from tvmflow.targets.backends.cuda import nvrtc
from tvmflow.targets.host import Host, read_host
from tvmflow.targets.llvm_query import TargetFacts, load_cpus, load_target_facts
from tvmflow.targets.presets import PRESETS
from tvmflow.targets.resolve import (
    Capabilities,
    emulator_name,
    find_capabilities,
    has_schedule_rules,
    resolve,
)

pytestmark = pytest.mark.usefixtures("one_fork_server")
PI4 = Host("aarch64", "Cortex-A72", frozenset({"fp", "asimd", "crc32"}), 4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for what LLVM reports, so that all of these tests query it once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def listed(store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The rows of `targets --json` by name."""
    assert main.main(["targets", "--store", str(store), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["targets"]
    return {row["name"]: row for row in rows}


def test_every_preset_is_listed_with_its_capabilities(listed: dict[str, Any]) -> None:
    """Every CPU can be built and linked for; this machine can also run and measure."""
    assert list(listed) == list(PRESETS)
    yes = {"built": "", "linked": "", "runs_here": "", "measured_here": ""}
    assert listed["host"]["capabilities"] == yes
    assert listed["host"]["cpu"]
    for name, row in listed.items():
        mapping = PRESETS[name].tvm
        assert row["description"] == PRESETS[name].description
        if mapping is not None and mapping["kind"] == "llvm":
            assert (row["capabilities"]["built"], row["capabilities"]["linked"]) == ("", "")
            assert (row["triple"], row["cpu"]) == (mapping["mtriple"], mapping["mcpu"])


def test_gpus_have_reasons_for_what_cannot_be_done(listed: dict[str, Any]) -> None:
    """A target that cannot be built cannot be linked or measured."""
    for name in ("jetson-orin", "jetson-tx2"):
        board = listed[name]["capabilities"]
        assert board["runs_here"]
        if board["built"]:
            assert board["built"] == "CUDA's compiler is not installed: pip install 'tvmflow[cuda]'"
            assert board["linked"] == board["measured_here"] == "nothing is built"
    assert listed["jetson-orin"]["cpu"] == "sm_87 and cortex-a78ae"


def test_the_table_has_a_line_for_each_preset_and_the_reasons_below(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reason is shown once, with all targets that it concerns."""
    assert main.main(["targets", "--store", str(store)]) == 0
    table, _, reasons = capsys.readouterr().out.partition("\n\n")
    lines = table.splitlines()
    assert lines[0].split()[:4] == ["target", "processor", "built", "linked"]
    assert [line.split()[0] for line in lines[1:]] == list(PRESETS)
    assert lines[1].split()[3:7] == ["yes"] * 4
    lines_below = reasons.splitlines()
    assert lines_below[0] == "other names that recipes may use"
    assert "    cortex-a72: raspberry-pi-4, raspberrypi4, rpi4" in lines_below
    assert len(lines_below) == len(set(lines_below))
    assert any(
        line.startswith("cannot be run or measured here: it is for ") for line in lines_below
    )
    plain = next(i for i, line in enumerate(lines_below) if "run as plain loops" in line)
    assert lines_below[plain + 1] == "    cortex-m7, cortex-m55"


def test_capabilities_of_a_board(store: Path) -> None:
    """A Raspberry Pi 4 runs code for its own CPU, and needs an emulator for a server's CPU."""
    names = ("cortex-a72", "neoverse-n1")
    facts = load_target_facts(LocalStore(str(store)), [PRESETS[name].tvm for name in names], PI4)
    own, server = (
        resolve(name, PRESETS[name].tvm, None, PI4, fact)
        for name, fact in zip(names, facts, strict=True)
    )
    assert (find_capabilities(own), emulator_name(own)) == (Capabilities("", "", "", ""), "")
    lacks = server.unrunnable_reason
    assert lacks.startswith("this machine's CPU lacks asimddp")
    assert find_capabilities(server) == Capabilities("", "", lacks, lacks)
    assert emulator_name(server) == "qemu-aarch64"
    lent = server._replace(remote={"key": "n1"})
    assert find_capabilities(lent).measured_here == ""


@pytest.mark.parametrize(
    ("tvm", "reason"),
    [
        ({"kind": "llvm"}, ""),
        ({"kind": "c"}, ""),
        ({"kind": "cuda", "arch": "sm_37"}, "no compiler for sm_37 is left"),
        ({"kind": "cuda", "arch": "sm_100a"}, "CUDA's compiler is not installed: pip install"),
        ({"kind": "cuda"}, "CUDA's compiler is not installed: pip install"),
        ({"kind": "metal"}, "its kind is metal"),
    ],
)
def test_targets_that_cannot_be_built_have_a_reason(
    tvm: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs can always be built for."""
    monkeypatch.setattr(nvrtc, "is_installed", lambda: False)
    actual = backend_for(tvm).unbuildable_reason(tvm)
    assert reason in actual and bool(reason) == bool(actual)


def test_cpus_are_listed_and_cached(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under every name of an architecture; LLVM is queried once."""
    assert main.main(["targets", "--store", str(store), "--cpus", "arm64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == sorted(lines) and "cortex-a72" in lines

    def ask(_: Sequence[Any]) -> list[Any]:
        raise AssertionError("LLVM is queried again")

    assert load_cpus(LocalStore(str(store)), "aarch64-linux-gnu", ask) == lines
    assert main.main(["targets", "--store", str(store), "--cpus", "aarch64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"arch": "aarch64", "cpus": lines}


def test_an_unknown_architecture_is_an_error(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, with the nearest name."""
    assert main.main(["targets", "--store", str(store), "--cpus", "aarch46"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tvmflow: --cpus aarch46: this is not a known architecture")
    assert "did you mean 'aarch64'?" in err


def test_facts_are_cached_for_one_machine(store: Path) -> None:
    """On another machine LLVM is queried again."""
    queries: list[Any] = []

    def ask(questions: Sequence[Any]) -> list[Any]:
        queries.extend(questions)
        return [TargetFacts()._asdict() for _ in questions]

    here = read_host()
    for host in (here, here._replace(libc="other"), here._replace(libc="other")):
        load_target_facts(LocalStore(str(store)), [{"kind": "odd"}], host, ask)
    assert queries == [{"kind": "odd"}] * 2


def test_what_has_no_schedule_is_known_without_a_compiler() -> None:
    """The table says of each preset what the rules do."""
    cpus = {name: dict(p.tvm) for name, p in PRESETS.items() if p.tvm and p.tvm["kind"] == "llvm"}
    assert {name: has_schedule_rules(str(tvm["mtriple"])) for name, tvm in cpus.items()} == {
        name: CpuModel.from_target(tvm) is not None for name, tvm in cpus.items()
    }
