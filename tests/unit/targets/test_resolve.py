"""Resolved targets: `host` becomes a CPU with features and cores, and unrunnable targets have a reason."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tvmflow.core.codec import from_json
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.fork_server import Outcome
from tvmflow.targets.host import CPU_VARIABLE, Host, read_host
from tvmflow.targets.llvm_query import (
    TargetFacts,
    query_cpus_in_process,
    query_targets_in_children,
    query_targets_in_process,
)
from tvmflow.targets.presets import PRESETS
from tvmflow.targets.resolve import ResolvedTarget, resolve
from tvmflow.targets.tvm_target import split_threads

HOST = Host("x86_64", "AMD EPYC 25 17", frozenset({"sse", "sse2", "avx", "avx2", "bmi1"}), 2)
ZEN = TargetFacts(
    "x86_64-linux-gnu",
    "znver4",
    "x86_64",
    ("64bit", "avx", "avx2", "avx512f", "bmi", "sse", "sse2"),
)


def test_host_is_spelled_out_and_hidden_instructions_are_switched_off() -> None:
    """A CPU whose hypervisor hides AVX-512 must not get AVX-512 code."""
    target = resolve("host", None, None, HOST, ZEN)
    assert target.tvm == {
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": "znver4",
        "mattr": ["-avx512f"],
    }
    assert target.features == ("avx", "avx2", "bmi1", "sse", "sse2")
    assert target.device == {"kind": "cpu", "class": "AMD EPYC 25 17"}
    assert target.unrunnable_reason == ""


def test_the_number_of_threads_is_no_part_of_the_code() -> None:
    """Neither that of the recipe, nor the CPUs that a shell or a container leaves: they only reach tuning."""
    narrow = HOST._replace(cores=1)
    targets = [resolve("host", None, 16, HOST, ZEN), resolve("host", None, None, narrow, ZEN)]
    assert [target.threads for target in targets] == [16, 1]
    assert targets[0]._replace(threads=1) == targets[1]
    board = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    numbered = resolve("board", {**board, "num-cores": 8}, None, HOST, ZEN)
    assert (numbered.tvm, numbered.threads) == (board, 8)


def test_facts_of_the_host_are_the_same_with_fewer_cores() -> None:
    """LLVM is not asked again in another shell."""
    assert HOST.fingerprint() == HOST._replace(cores=1).fingerprint()
    assert HOST.fingerprint() != HOST._replace(flags=frozenset({"sse"})).fingerprint()


@pytest.mark.parametrize(
    ("facts", "kind", "reason"),
    [
        (
            TargetFacts(arch="x86_64", features=("avx512f",)),
            "llvm",
            "this machine's CPU lacks avx512f",
        ),
        (TargetFacts(arch="aarch64"), "llvm", "it is for aarch64, and this machine is x86_64"),
        (TargetFacts(arch="metal"), "metal", "its kind is metal, and this machine runs"),
    ],
)
def test_unrunnable_targets_have_a_reason(facts: TargetFacts, kind: str, reason: str) -> None:
    """Too new a CPU level, another architecture, a device that is not there."""
    mapping = {"kind": kind, "mcpu": "x"}
    target = resolve("x", mapping, None, HOST, facts)
    assert target.unrunnable_reason.startswith(reason)


def arm(flags: str) -> Host:
    return Host("aarch64", "board", frozenset(flags.split()), 4)


PI4 = arm("fp asimd evtstrm crc32 cpuid")
GRAVITON2 = arm(
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
)
PI2 = Host("armv7", "board", frozenset("half vfp neon vfpv3 vfpv4 idiva idivt".split()), 4)
CORTEX_A9 = PI2._replace(flags=frozenset("half vfp neon vfpv3".split()))
K1 = Host("riscv64", "board", frozenset("imafdcv"), 8)


@pytest.fixture(scope="module")
def facts() -> dict[str, TargetFacts]:
    """LLVM's facts of every preset, of the host, and of some invalid targets; queried in one process."""
    named = {name: preset.tvm for name, preset in PRESETS.items()}
    arm_cpu = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    named["typo"] = {**arm_cpu, "mcpu": "cortex-a7x"}
    named["nonsense"] = {"kind": "abacus"}
    named["odd feature"] = {**arm_cpu, "mattr": ["+neon", "+magic"]}
    named["no such architecture"] = {"kind": "llvm", "mtriple": "vax-linux-gnu", "mcpu": "vax"}
    named["soft"] = {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}
    named["an alias"] = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "core-avx2"}
    named["no triple"] = {"kind": "llvm"}
    answers = query_targets_in_process(list(named.values()))
    return {
        name: from_json(TargetFacts, answer) for name, answer in zip(named, answers, strict=True)
    }


def preset(name: str, host: Host, facts: dict[str, TargetFacts]) -> ResolvedTarget:
    return resolve(name, PRESETS[name].tvm, None, host, facts[name])


def test_llvm_knows_every_preset(facts: dict[str, TargetFacts]) -> None:
    """No preset is rejected, and every one keeps its fields."""
    for name, listed in PRESETS.items():
        assert not facts[name].error, name
        if listed.tvm is not None:
            resolved = preset(name, HOST, facts)
            fields, threads = split_threads(listed.tvm)
            assert fields.items() <= resolved.tvm.items(), name
            assert resolved.threads == (threads or HOST.cores), name


def test_llvm_describes_this_machine_and_others(
    facts: dict[str, TargetFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host runs its own target; the facts of an unknown CPU have the names to choose from."""
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    assert resolve("host", None, None, read_host(), facts["host"]).unrunnable_reason == ""
    pi = facts["cortex-a72"]
    assert (pi.arch, pi.cpu) == ("aarch64", "cortex-a72")
    typo = facts["typo"]
    assert typo.error == "'cortex-a7x' is not a CPU that LLVM knows for aarch64-linux-gnu"
    assert "cortex-a72" in typo.valid_cpus
    assert "abacus" in facts["nonsense"].error
    odd = facts["odd feature"].error
    assert odd == "'+magic' is not a feature that LLVM knows for aarch64-linux-gnu"
    assert "vax" in facts["no such architecture"].error
    assert "add `mattr: [+m, +a, +f, +d, +c]`" in facts["soft"].error
    assert "avx2" in facts["an alias"].features


def test_a_target_without_a_triple_is_for_this_system(facts: dict[str, TargetFacts]) -> None:
    """Its library is linked for it, and what LLVM was built for decides nothing."""
    here = read_host()
    target = resolve("x", {"kind": "llvm"}, None, here, facts["no triple"])
    assert target.tvm["mtriple"].startswith(f"{here.arch}-linux-")


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("cortex-a53", "asimd fp"),
        ("cortex-a72", "asimd fp"),
        ("aarch64-musl", "asimd fp"),
        ("cortex-a76", "asimd asimddp asimdhp asimdrdm atomics fp fphp lrcpc"),
        ("neoverse-n1", "asimd asimddp asimdhp asimdrdm atomics fp fphp lrcpc"),
        (
            "neoverse-v1",
            "asimd asimddp asimdfhm asimdhp asimdrdm atomics bf16 fcma fp fphp i8mm ilrcpc jscvt lrcpc sve",
        ),
        ("armv7-neon", "idiva idivt neon vfp vfpv3 vfpv4"),
        ("riscv64-v", "a c d f m v"),
        (
            "cuda-sm80",
            "abm avx avx2 bmi1 bmi2 f16c fma movbe pni popcnt sse sse2 sse4_1 sse4_2 ssse3",
        ),
    ],
)
def test_features_have_the_kernels_names(
    facts: dict[str, TargetFacts], name: str, features: str
) -> None:
    """Only features that decide where code runs; LLVM gives a Raspberry Pi's CPU the AES that its chip lacks."""
    assert preset(name, HOST, facts).features == tuple(features.split())


@pytest.mark.parametrize(
    ("name", "host", "reason"),
    [
        ("cortex-a72", PI4, ""),
        ("cortex-a53", PI4, ""),
        ("cortex-a76", PI4, "this machine's CPU lacks asimddp, asimdhp, asimdrdm, atomics, fphp, lrcpc"),
        ("neoverse-n1", GRAVITON2, ""),
        ("neoverse-v1", GRAVITON2, "this machine's CPU lacks asimdfhm, bf16, fcma, i8mm, ilrcpc, jscvt, sve"),
        ("armv7-neon", PI2, ""),
        ("armv7-neon", CORTEX_A9, "this machine's CPU lacks idiva, idivt, vfpv4"),
        ("armv7-neon", PI4, "it is for armv7, and this machine is aarch64"),
        ("riscv64-v", K1, ""),
        ("riscv64-v", K1._replace(flags=frozenset("imafdc")), "this machine's CPU lacks v"),
        ("aarch64-musl", PI4, "it is for Linux with musl, and this machine runs Linux with glibc"),
        ("aarch64-musl", PI4._replace(libc="musl"), ""),
        ("apple-m1", PI4, "it is for macos, and this machine runs linux"),
        ("apple-m1", Host("aarch64", "aarch64", frozenset(), 8, "macos", ""), ""),
        ("x86-64-windows", HOST, "it is for windows, and this machine runs linux"),
        ("jetson-orin", PI4, "this machine's CPU lacks asimddp, asimdhp, asimdrdm, atomics, fphp, lrcpc"),
        ("cuda-sm90", GRAVITON2, "it is for x86_64, and this machine is aarch64"),
    ],
)  # fmt: skip
def test_targets_that_hosts_run(
    facts: dict[str, TargetFacts], name: str, host: Host, reason: str
) -> None:
    """Another CPU level, system or C library is resolved out before anything is built."""
    assert preset(name, host, facts).unrunnable_reason == reason


def test_an_arm_host_gets_no_code_that_its_kernel_does_not_report(
    facts: dict[str, TargetFacts],
) -> None:
    """As on x86: a feature that is hidden is switched off."""
    quiet = GRAVITON2._replace(flags=GRAVITON2.flags - {"fphp", "asimddp"})
    target = resolve("host", None, None, quiet, facts["neoverse-n1"])
    assert target.tvm["mattr"] == ["-dotprod", "-fullfp16"]
    assert "asimddp" not in target.features and "atomics" in target.features


def test_boards_know_their_cores(facts: dict[str, TargetFacts]) -> None:
    """A preset for one kind of board tunes for its cores, others for those of this machine or the recipe's."""
    assert preset("cortex-a72", HOST, facts).threads == 4
    assert preset("neoverse-n1", HOST, facts).threads == HOST.cores
    assert resolve("x", PRESETS["cortex-a72"].tvm, 2, HOST, facts["cortex-a72"]).threads == 2


def test_cpus_of_an_architecture() -> None:
    """LLVM's own list, in alphabetical order."""
    [names] = query_cpus_in_process(["riscv64-linux-gnu"])
    assert names == sorted(names)
    assert {"generic-rv64", "spacemit-x60"} <= set(names)


def worker(stdout: str, code: int) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs no process and returns this result."""
    return lambda *_, **__: subprocess.CompletedProcess([], code, stdout, "no libtvm\n")


def test_a_target_that_ends_llvm_is_invalid() -> None:
    """The installation is not broken; another process answers for the targets after it."""
    fatal = {"kind": "llvm", "mtriple": "odd-linux-gnu"}
    counts: list[int] = []

    def call(*words: Any, input: str, **options: Any) -> subprocess.CompletedProcess[str]:
        queries = json.loads(input)
        counts.append(len(queries))
        lines = ["loaded", "a line of LLVM's"]
        for query in queries:
            if query == fatal:
                return subprocess.CompletedProcess(words, -6, "\n".join(lines), "LLVM ERROR")
            lines.append('answer {"arch": "x86_64"}')
        return subprocess.CompletedProcess(words, 0, "\n".join(lines), "")

    fine = {"arch": "x86_64"}
    invalid = TargetFacts(error="LLVM cannot compile for odd-linux-gnu")._asdict()
    llvm: dict[str, Any] = {"kind": "llvm"}
    assert query_targets_in_process([llvm, fatal, None, fatal], call) == [
        fine,
        invalid,
        fine,
        invalid,
    ]
    assert counts == [4, 2]


class CrashingServer:
    """A fork server whose children LLVM ends over one target."""

    is_gone = False

    def __init__(self, fatal: Any) -> None:
        self.fatal = fatal

    def call(self, function: Any, payload: Any, *, timeout_s: float) -> Outcome:
        if payload == self.fatal:
            return Outcome("crashed", 0.1, "crashed in native code (SIGABRT)")
        return Outcome("ok", 0.1, value={"arch": "x86_64"})


def test_a_child_that_llvm_ends_costs_one_answer() -> None:
    """The fork server answers for the targets after it."""
    fatal = {"kind": "llvm", "mtriple": "odd-linux-gnu"}
    server: Any = CrashingServer(fatal)
    first, second, third = query_targets_in_children([None, fatal, None], server)
    assert first == third == {"arch": "x86_64"}
    assert second == TargetFacts(error="LLVM cannot compile for odd-linux-gnu")._asdict()


def test_a_process_that_others_killed_says_nothing_about_a_target() -> None:
    """The answer would be remembered: with too little memory once, nothing was ever compiled again."""
    with pytest.raises(EnvironmentProblem, match=r"was killed \(SIGKILL\)"):
        query_targets_in_process([None], worker('loaded\nanswer {"arch": "x8', -9))
    with pytest.raises(EnvironmentProblem, match=r"was killed \(SIGTERM\)"):
        query_cpus_in_process(["riscv64-linux-gnu"], worker("", -15))


def test_a_tvm_that_cannot_be_loaded_is_reported() -> None:
    """With the last line of its error."""
    with pytest.raises(EnvironmentProblem, match=r"TVM.* cannot be loaded: no libtvm"):
        query_targets_in_process([None], worker("", 1))
