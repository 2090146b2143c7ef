"""The host: what the kernels of different machines report, and machines whose kernels report nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tvmflow.core import packages
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.targets import host as host_module
from tvmflow.targets.features import LEVELS, flags_of, isa_level_config, required_features
from tvmflow.targets.host import (
    CPU_VARIABLE,
    Host,
    cap_host,
    find_system_mismatch,
    parse_host,
    read_host,
)
from tvmflow.targets.llvm_query import query_target
from tvmflow.targets.platforms import parse_triple

EPYC = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9R14
flags\t\t: fpu sse sse2 avx avx2 bmi1
bugs\t\t: sysret_ss_attrs

processor\t: 1
flags\t\t: of another
"""
PI4 = """\
processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3

Model\t\t: Raspberry Pi 4 Model B
"""
# before Linux 3.8, features came once, after all processors
OLD_ARM = """\
Processor\t: ARMv7 Processor rev 10 (v7l)
processor\t: 0
BogoMIPS\t: 790.52

processor\t: 1
BogoMIPS\t: 790.52

Features\t: swp half thumb fastmult vfp edsp neon vfpv3
CPU implementer\t: 0x41
CPU part\t: 0xc09
"""
APPLE_LINUX = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x61\nCPU part\t: 0x023\n"
K1 = """\
processor\t: 0
hart\t\t: 0
isa\t\t: rv64imafdcv_zicbom_zicsr_zba_zbb_zfh
mmu\t\t: sv39
uarch\t\t: spacemit,x60
"""
GENERAL = "processor\t: 0\nisa\t\t: rv64gczba_zbb\n"


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "arch", "model", "flags"),
    [
        (EPYC, "x86_64", "x86_64", "AMD EPYC 9R14 25 17", "fpu sse sse2 avx avx2 bmi1"),
        (PI4, "aarch64", "aarch64", "Cortex-A72", "fp asimd evtstrm crc32 cpuid"),
        (OLD_ARM, "armv7l", "armv7", "Cortex-A9", "swp half thumb fastmult vfp edsp neon vfpv3"),
        (PI4, "armv8l", "armv7", "Cortex-A72", "fp asimd evtstrm crc32 cpuid"),
        (APPLE_LINUX, "aarch64", "aarch64", "0x61 0x023", "fp asimd"),
        (K1, "riscv64", "riscv64", "spacemit,x60", "i m a f d c v zicbom zicsr zba zbb zfh"),
        (GENERAL, "riscv64", "riscv64", "rv64gczba_zbb", "g i m a f d c zicsr zifencei zba zbb"),
        ("", "AMD64", "x86_64", "x86_64", ""),
        ("", "arm64", "aarch64", "aarch64", ""),
    ],
)
def test_the_host_is_what_its_kernel_reports(
    cpuinfo: str, machine: str, arch: str, model: str, flags: str
) -> None:
    """The first processor is enough; its flags keep the kernel's names."""
    assert parse_host(cpuinfo, machine, 4) == Host(arch, model, frozenset(flags.split()), 4)


def test_this_machine(tmp_path: Path) -> None:
    """Its CPU is of a known kind, and is the same when it is read again."""
    here = read_host()
    assert here == read_host()
    assert here.arch and here.model and here.cores >= 1
    assert (here.system == "linux") == (sys.platform == "linux")
    if here.system == "linux":
        assert here.flags and here.libc in ("gnu", "musl")


@pytest.mark.parametrize(
    ("python", "system", "machine"),
    [("darwin", "macos", "arm64"), ("win32", "windows", "AMD64")],
)
def test_machines_without_proc(
    monkeypatch: pytest.MonkeyPatch, python: str, system: str, machine: str
) -> None:
    """macOS has no /proc, Windows has no uname either: without their reports, only the architecture is known."""
    monkeypatch.delenv(host_module.CPU_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", python)
    monkeypatch.setattr(host_module, "_CPUINFO", "/no/such/file")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    if python == "win32":
        monkeypatch.delattr(os, "uname")
        monkeypatch.setenv("PROCESSOR_ARCHITECTURE", machine)
        assert packages.host_platform() == "win32-AMD64"
    else:
        uname = os.uname_result(("Darwin", "mac", "23.1", "", machine))
        monkeypatch.setattr(os, "uname", lambda: uname)
    host = read_host()
    arch = parse_triple(machine).arch
    cores = os.cpu_count() or 1
    assert host == Host(arch, arch, frozenset(), cores, system, "", reported=frozenset())


HERE = Host("x86_64", "cpu", frozenset(), 2)


@pytest.mark.parametrize(
    ("triple", "host", "mismatch"),
    [
        ("x86_64-linux-gnu", HERE, None),
        ("x86_64", HERE, None),
        ("x86_64-pc-windows-msvc", HERE, ("windows", "linux")),
        ("x86_64-linux-musl", HERE, ("Linux with musl", "Linux with glibc")),
        ("x86_64-linux-gnu", HERE._replace(libc="musl"), ("Linux with glibc", "Linux with musl")),
        ("x86_64-apple-macos13", HERE._replace(system="macos", libc=""), None),
        ("x86_64-linux-gnu", HERE._replace(system="macos", libc=""), ("linux", "macos")),
    ],
)
def test_libraries_of_another_system(
    triple: str, host: Host, mismatch: tuple[str, str] | None
) -> None:
    """The system and, on Linux, the C library must be the same."""
    assert find_system_mismatch(parse_triple(triple), host) == mismatch


@pytest.mark.parametrize(
    ("host", "triple"),
    [
        (HERE, "x86_64-linux-gnu"),
        (HERE._replace(libc="musl"), "x86_64-linux-musl"),
        (HERE._replace(arch="armv7"), "armv7-linux-gnueabihf"),
        (HERE._replace(arch="aarch64", system="macos", libc=""), "aarch64-apple-macos13"),
        (HERE._replace(system="windows", libc=""), "x86_64-pc-windows-msvc"),
    ],
)
def test_a_machine_runs_what_is_built_for_its_own_triple(host: Host, triple: str) -> None:
    """The triple of a host is parsed to the host's platform."""
    assert host.triple == triple
    assert find_system_mismatch(parse_triple(triple), host) is None
    assert parse_triple(triple).arch == host.arch


V3 = Host("x86_64", "some CPU", flags_of("x86-64-v3") | {"avx_vnni", "aes", "ht"}, 8)


def test_a_cap_takes_features_away_and_names_itself() -> None:
    """What is kept by the CPU's model is not mixed with what the whole CPU gave."""
    capped = cap_host(V3, "x86-64-v2")
    assert capped.flags == flags_of("x86-64-v2") | {"ht"}
    assert capped.model == "some CPU as x86-64-v2"
    assert capped.fingerprint() != V3.fingerprint()
    # of the same level, features that the level lacks are gone, too
    assert cap_host(V3, "x86-64-v3").flags == flags_of("x86-64-v3") | {"ht"}


@pytest.mark.parametrize(
    ("level", "message", "fix"),
    [
        ("x86-64-v4", "lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl", "a lower level"),
        ("i8mm", "which is not a level of x86_64", "x86-64-v2 or x86-64-v3 or x86-64-v4"),
        ("znver3", "which is not a level of x86_64", "x86-64-v2 or x86-64-v3 or x86-64-v4"),
    ],
)
def test_a_cap_that_the_machine_does_not_have_is_refused(
    level: str, message: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never gives more than the machine has."""
    monkeypatch.setenv(CPU_VARIABLE, level)
    monkeypatch.setattr(host_module, "_read_whole_host", lambda: V3)
    with pytest.raises(EnvironmentProblem, match=message) as raised:
        read_host()
    assert fix in str(raised.value.fix)


@pytest.mark.parametrize("name", LEVELS)
def test_the_features_of_each_level_are_those_that_llvm_uses(name: str) -> None:
    """The table is what a cap, and a C library, know of levels."""
    facts = query_target(isa_level_config({}, name))
    assert set(required_features(LEVELS[name].arch, facts.features)) == flags_of(name)
