"""`tvmflow targets`: every preset with what can be done for it here, and LLVM's CPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tvmflow import cli
from tvmflow.stores.local import LocalStore
from tvmflow.targets import cuda
from tvmflow.targets._presets import PRESETS
from tvmflow.targets.abilities import Abilities, abilities_of, emulated_by, why_not_built
from tvmflow.targets.facts import cpus_of, facts_of
from tvmflow.targets.host import Host, read_host
from tvmflow.targets.resolve import resolve

PI4 = Host("aarch64", "Cortex-A72", frozenset({"fp", "asimd", "crc32"}), 4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that LLVM's answers stay in, so that it is asked once for all of these tests."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def listed(store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Name -> row of `targets --json`."""
    assert cli.main(["targets", "--store", str(store), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["targets"]
    return {row["name"]: row for row in rows}


def test_every_preset_is_there_with_its_abilities(listed: dict[str, Any]) -> None:
    """CPUs are built and linked wherever they are; what runs here is this machine, which can also be measured."""
    assert list(listed) == list(PRESETS)
    yes = {"built": "", "linked": "", "runs_here": "", "measured_here": ""}
    assert listed["host"]["abilities"] == yes
    assert listed["host"]["cpu"]
    for name, row in listed.items():
        mapping = PRESETS[name].tvm
        assert row["description"] == PRESETS[name].description
        if mapping is not None and mapping["kind"] == "llvm":
            assert (row["abilities"]["built"], row["abilities"]["linked"]) == ("", "")
            assert (row["triple"], row["cpu"]) == (mapping["mtriple"], mapping["mcpu"])


def test_graphics_cards_say_why_not(listed: dict[str, Any]) -> None:
    """What cannot be built cannot be anything else; the TX2 has a reason of its own."""
    orin, tx2 = (listed[name]["abilities"] for name in ("jetson-orin", "jetson-tx2"))
    assert orin["built"] in ("", "CUDA's compiler is not installed: pip install 'tvmflow[cuda]'")
    assert "makes no code for sm_62" in tx2["built"]
    assert tx2["linked"] == tx2["measured_here"] == "nothing is built"
    assert orin["runs_here"]
    assert listed["jetson-orin"]["cpu"] == "sm_87 and cortex-a78ae"


def test_the_table_has_a_line_for_each_and_its_reasons_below(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reasons stand once, with all whom they concern."""
    assert cli.main(["targets", "--store", str(store)]) == 0
    table, _, reasons = capsys.readouterr().out.partition("\n\n")
    lines = table.splitlines()
    assert lines[0].split()[:4] == ["target", "machine", "built", "linked"]
    assert [line.split()[0] for line in lines[1:]] == list(PRESETS)
    assert lines[1].split()[3:7] == ["yes"] * 4
    told = reasons.splitlines()
    assert len(told) == len(set(told))
    tx2 = told.index(next(line for line in told if "sm_62" in line))
    assert told[tx2].startswith("not built: CUDA 13")
    assert told[tx2 + 1] == "    jetson-tx2"
    assert "jetson-tx2" not in " ".join(told[:tx2] + told[tx2 + 2 :])
    assert any(line.startswith("not run here or measured here: it is for ") for line in told)


def test_abilities_of_a_board(store: Path) -> None:
    """What a Raspberry Pi 4 says of itself and of a server's CPU; an emulator adds its word where it is needed."""
    names = ("cortex-a72", "neoverse-n1")
    facts = facts_of(LocalStore(str(store)), [PRESETS[name].tvm for name in names], PI4)
    own, server = (
        resolve(name, PRESETS[name].tvm, None, PI4, fact)
        for name, fact in zip(names, facts, strict=True)
    )
    assert (abilities_of(own), emulated_by(own)) == (Abilities("", "", "", ""), "")
    lacks = server.why_not
    assert lacks.startswith("this machine's CPU lacks asimddp")
    assert abilities_of(server) == Abilities("", "", lacks, lacks)
    assert emulated_by(server) == "qemu-aarch64"
    lent = server._replace(remote={"key": "n1"})
    assert abilities_of(lent).measured_here == ""


@pytest.mark.parametrize(
    ("tvm", "words"),
    [
        ({"kind": "llvm"}, ""),
        ({"kind": "c"}, ""),
        ({"kind": "cuda", "arch": "sm_74"}, "sm_74; the oldest is sm_75"),
        ({"kind": "cuda", "arch": "sm_100a"}, "CUDA's compiler is not installed: pip install"),
        ({"kind": "cuda"}, "CUDA's compiler is not installed: pip install"),
        ({"kind": "metal"}, "its kind is metal"),
    ],
)
def test_what_can_be_built(
    tvm: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for CPUs; for the others, the nearest reason."""
    monkeypatch.setattr(cuda, "is_installed", lambda: False)
    found = why_not_built(tvm)
    assert words in found and bool(words) == bool(found)


def test_cpus_are_listed_and_remembered(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under every name of an architecture; LLVM is asked once."""
    assert cli.main(["targets", "--store", str(store), "--cpus", "arm64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == sorted(lines) and "cortex-a72" in lines

    def ask(_: list[Any]) -> list[Any]:
        raise AssertionError("asked again")

    assert cpus_of(LocalStore(str(store)), "aarch64-linux-gnu", ask) == lines
    assert cli.main(["targets", "--store", str(store), "--cpus", "aarch64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"arch": "aarch64", "cpus": lines}


def test_an_architecture_that_is_not_there(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the nearest name."""
    assert cli.main(["targets", "--store", str(store), "--cpus", "aarch46"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tvmflow: --cpus aarch46: there is no such architecture")
    assert "did you mean 'aarch64'?" in said


def test_answers_are_of_this_machine(store: Path) -> None:
    """On another one LLVM is asked again."""
    asked: list[Any] = []

    def ask(questions: list[Any]) -> list[Any]:
        asked.extend(questions)
        return [{"features": []} for _ in questions]

    here = read_host()
    for host in (here, here._replace(libc="other"), here._replace(libc="other")):
        facts_of(LocalStore(str(store)), [{"kind": "odd"}], host, ask)
    assert asked == [{"kind": "odd"}] * 2
