"""Targets: `host` becomes a CPU with features and cores, and what cannot run here is known before."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tvmflow.errors import EnvironmentProblem
from tvmflow.targets._presets import PRESETS
from tvmflow.targets.host import Host, read_host
from tvmflow.targets.resolve import ResolvedTarget, cpus_in_worker, query_in_worker, resolve

HOST = Host("x86_64", "AMD EPYC 25 17", frozenset({"sse", "sse2", "avx", "avx2", "bmi1"}), 2)
ZEN = {
    "mtriple": "x86_64-linux-gnu",
    "mcpu": "znver4",
    "arch": "x86_64",
    "features": ["64bit", "avx", "avx2", "avx512f", "bmi", "sse", "sse2"],
}


def test_host_is_spelled_out_and_hidden_instructions_are_switched_off() -> None:
    """A CPU whose hypervisor hides AVX-512 must not get AVX-512 code."""
    target = resolve("host", None, None, HOST, ZEN)
    assert target.tvm == {
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": "znver4",
        "mattr": ["-avx512f"],
        "num-cores": 2,
    }
    assert target.features == ("avx", "avx2", "bmi1", "sse", "sse2")
    assert target.device == {"kind": "cpu", "class": "AMD EPYC 25 17"}
    assert target.why_not == ""


def test_the_number_of_cores_is_no_part_of_code_generation() -> None:
    """A recipe's `num_cores` reaches tuning; what is built without tuning is the same."""
    one, two = (resolve("host", None, cores, HOST, ZEN) for cores in (1, 16))
    assert (one.cores, two.cores) == (1, 16)
    assert one.codegen == two.codegen
    assert one.tvm != two.tvm


@pytest.mark.parametrize(
    ("facts", "kind", "reason"),
    [
        ({"arch": "x86_64", "features": ["avx512f"]}, "llvm", "this machine's CPU lacks avx512f"),
        (
            {"arch": "aarch64", "features": []},
            "llvm",
            "it is for aarch64, and this machine is x86_64",
        ),
        ({"arch": "metal", "features": []}, "metal", "its kind is metal, and this machine runs"),
    ],
)
def test_what_cannot_run_here_says_why(facts: dict[str, object], kind: str, reason: str) -> None:
    """Too new a CPU level, another architecture, a device that is not there."""
    mapping = {"kind": kind, "mcpu": "x"}
    target = resolve("x", mapping, None, HOST, {"mtriple": "", "mcpu": "", **facts})
    assert target.why_not.startswith(reason)


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
def facts() -> dict[str, Any]:
    """What LLVM says of every preset but the host, of the host, and of some mistakes; asked in one process."""
    named = {name: preset.tvm for name, preset in PRESETS.items()}
    arm_cpu = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    named["typo"] = {**arm_cpu, "mcpu": "cortex-a7x"}
    named["nonsense"] = {"kind": "abacus"}
    named["odd feature"] = {**arm_cpu, "mattr": ["+neon", "+magic"]}
    named["no such architecture"] = {"kind": "llvm", "mtriple": "vax-linux-gnu", "mcpu": "vax"}
    named["soft"] = {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}
    named["an alias"] = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "core-avx2"}
    named["no triple"] = {"kind": "llvm"}
    return dict(zip(named, query_in_worker(list(named.values())), strict=True))


def preset(name: str, host: Host, facts: dict[str, Any]) -> ResolvedTarget:
    return resolve(name, PRESETS[name].tvm, None, host, facts[name])


def test_llvm_knows_every_preset(facts: dict[str, Any]) -> None:
    """None is refused, and each keeps the mapping that it stands for."""
    for name, each in PRESETS.items():
        assert "error" not in facts[name], name
        if each.tvm is not None:
            found = preset(name, HOST, facts)
            assert each.tvm.items() <= found.tvm.items(), name


def test_llvm_is_asked_about_this_machine_and_others(facts: dict[str, Any]) -> None:
    """The real answers: this host runs its own target; an unknown CPU gives names to choose from."""
    assert resolve("host", None, None, read_host(), facts["host"]).why_not == ""
    pi = facts["cortex-a72"]
    assert (pi["arch"], pi["mcpu"]) == ("aarch64", "cortex-a72")
    typo = facts["typo"]
    assert typo["error"] == "'cortex-a7x' is not a CPU that LLVM knows for aarch64-linux-gnu"
    assert "cortex-a72" in typo["near"]
    assert "abacus" in facts["nonsense"]["error"]
    odd = facts["odd feature"]["error"]
    assert odd == "'+magic' is not a feature that LLVM knows for aarch64-linux-gnu"
    assert "vax" in facts["no such architecture"]["error"]
    assert "add `mattr: [+m, +a, +f, +d, +c]`" in facts["soft"]["error"]
    assert "avx2" in facts["an alias"]["features"]


def test_a_target_without_a_triple_is_for_this_system(facts: dict[str, Any]) -> None:
    """Its library is linked for it, and what LLVM was built for decides nothing."""
    here = read_host()
    made = resolve("x", {"kind": "llvm"}, None, here, facts["no triple"])
    assert made.tvm["mtriple"].startswith(f"{here.arch}-linux-")


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
            "asimd asimddp asimdfhm asimdhp asimdrdm atomics bf16 fcma fp fphp i8mm ilrcpc jscvt lrcpc sve uscat",
        ),
        ("armv7-neon", "idiva idivt neon vfp vfpv3 vfpv4"),
        ("riscv64-v", "a c d f m v"),
        (
            "cuda-sm80",
            "abm avx avx2 bmi1 bmi2 f16c fma movbe pni popcnt sse sse2 sse4_1 sse4_2 ssse3",
        ),
    ],
)
def test_features_have_the_kernels_names(facts: dict[str, Any], name: str, features: str) -> None:
    """Those that decide where code runs; LLVM gives a Raspberry Pi's CPU the AES that its chip lacks."""
    assert preset(name, HOST, facts).features == tuple(features.split())


@pytest.mark.parametrize(
    ("name", "host", "reason"),
    [
        ("cortex-a72", PI4, ""),
        ("cortex-a53", PI4, ""),
        ("cortex-a76", PI4, "this machine's CPU lacks asimddp, asimdhp, asimdrdm, atomics, fphp, lrcpc"),
        ("neoverse-n1", GRAVITON2, ""),
        ("neoverse-v1", GRAVITON2, "this machine's CPU lacks asimdfhm, bf16, fcma, i8mm, ilrcpc, jscvt, sve, uscat"),
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
def test_who_runs_what(facts: dict[str, Any], name: str, host: Host, reason: str) -> None:
    """Another CPU level, system or C library is found out before anything is built."""
    assert preset(name, host, facts).why_not == reason


def test_an_arm_host_gets_no_code_that_its_kernel_does_not_report(facts: dict[str, Any]) -> None:
    """As on x86: a feature that is hidden is switched off."""
    quiet = GRAVITON2._replace(flags=GRAVITON2.flags - {"fphp", "asimddp"})
    made = resolve("host", None, None, quiet, facts["neoverse-n1"])
    assert made.tvm["mattr"] == ["-dotprod", "-fullfp16"]
    assert "asimddp" not in made.features and "atomics" in made.features


def test_boards_know_their_cores(facts: dict[str, Any]) -> None:
    """A preset for one kind of board tunes for its cores, others for those of this machine or the recipe's."""
    assert preset("cortex-a72", HOST, facts).cores == 4
    assert preset("neoverse-n1", HOST, facts).cores == HOST.cores
    assert resolve("x", PRESETS["cortex-a72"].tvm, 2, HOST, facts["cortex-a72"]).cores == 2


def test_cpus_of_an_architecture() -> None:
    """LLVM's own list, in alphabetical order."""
    [names] = cpus_in_worker(["riscv64-linux-gnu"])
    assert names == sorted(names)
    assert {"generic-rv64", "spacemit-x60"} <= set(names)


def worker(stdout: str, code: int) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A process that ends like this, whatever it is asked."""
    return lambda *_, **__: subprocess.CompletedProcess([], code, stdout, "no libtvm\n")


def test_a_target_that_ends_llvm_is_told_as_wrong() -> None:
    """And not as an installation that is broken; another process answers for those after it."""
    doomed = {"kind": "llvm", "mtriple": "odd-linux-gnu"}
    asked: list[int] = []

    def call(*words: Any, input: str, **options: Any) -> subprocess.CompletedProcess[str]:
        questions = json.loads(input)
        asked.append(len(questions))
        lines = ["loaded", "a word of LLVM's"]
        for each in questions:
            if each == doomed:
                return subprocess.CompletedProcess(words, -6, "\n".join(lines), "LLVM ERROR")
            lines.append('answer {"arch": "x86_64"}')
        return subprocess.CompletedProcess(words, 0, "\n".join(lines), "")

    fine, told = (
        {"arch": "x86_64"},
        {"error": "LLVM cannot make code for odd-linux-gnu", "near": []},
    )
    llvm: dict[str, Any] = {"kind": "llvm"}
    assert query_in_worker([llvm, doomed, None, doomed], call) == [fine, told, fine, told]
    assert asked == [4, 2]


def test_a_tvm_that_cannot_be_loaded_is_told_as_such() -> None:
    """With its last words."""
    with pytest.raises(EnvironmentProblem, match=r"TVM cannot be loaded .*: no libtvm"):
        query_in_worker([None], worker("", 1))
