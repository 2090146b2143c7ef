"""Targets: `host` becomes a CPU with features and cores, and what cannot run here is known before."""

from __future__ import annotations

import pytest

from tvmflow.targets.host import Host, read_host
from tvmflow.targets.resolve import query_in_worker, resolve

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
        ({"arch": "cuda", "features": []}, "cuda", "its kind is cuda, and this machine runs CPU"),
    ],
)
def test_what_cannot_run_here_says_why(facts: dict[str, object], kind: str, reason: str) -> None:
    """Too new a CPU level, another architecture, a device that is not there."""
    mapping = {"kind": kind, "mcpu": "x"}
    target = resolve("x", mapping, None, HOST, {"mtriple": "", "mcpu": "", **facts})
    assert target.why_not.startswith(reason)


def test_llvm_is_asked_about_this_machine_and_others() -> None:
    """The real answers: this host runs its own target; an unknown CPU gives names to choose from."""
    here, arm, typo, nonsense = query_in_worker(
        [
            None,
            {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"},
            {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a7x"},
            {"kind": "abacus"},
        ]
    )
    assert resolve("host", None, None, read_host(), here).why_not == ""
    assert (arm["arch"], arm["mcpu"]) == ("aarch64", "cortex-a72")
    assert typo["error"] == "'cortex-a7x' is not a CPU that LLVM knows for aarch64-linux-gnu"
    assert "cortex-a72" in typo["near"]
    assert "abacus" in nonsense["error"]
