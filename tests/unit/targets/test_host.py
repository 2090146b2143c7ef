"""This machine: what the kernels of different machines say of them, and machines whose kernels say nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tvmflow import tools
from tvmflow.targets import host as host_module
from tvmflow.targets.host import Host, foreign_system, host_of, read_host, triple_of
from tvmflow.targets.platforms import platform_of

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
def test_what_kernels_say(cpuinfo: str, machine: str, arch: str, model: str, flags: str) -> None:
    """One processor speaks for all; its flags keep the kernel's names."""
    assert host_of(cpuinfo, machine, 4) == Host(arch, model, frozenset(flags.split()), 4)


def test_this_machine(tmp_path: Path) -> None:
    """The real one has a CPU of a known kind, and it is the same each time."""
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
    """macOS has no /proc, Windows has no uname either: where they cannot be asked, the CPU is known by its architecture alone."""
    monkeypatch.setattr(sys, "platform", python)
    monkeypatch.setattr(host_module, "_CPUINFO", "/no/such/file")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    if python == "win32":
        monkeypatch.delattr(os, "uname")
        monkeypatch.setenv("PROCESSOR_ARCHITECTURE", machine)
        assert tools.machine() == "win32-AMD64"
    else:
        uname = os.uname_result(("Darwin", "mac", "23.1", "", machine))
        monkeypatch.setattr(os, "uname", lambda: uname)
    found = read_host()
    arch = platform_of(machine).arch
    cores = os.cpu_count() or 1
    assert found == Host(arch, arch, frozenset(), cores, system, "", told=frozenset())


HERE = Host("x86_64", "cpu", frozenset(), 2)


@pytest.mark.parametrize(
    ("triple", "host", "both"),
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
def test_libraries_of_another_system(triple: str, host: Host, both: tuple[str, str] | None) -> None:
    """The system and, on Linux, the C library must be the same."""
    assert foreign_system(platform_of(triple), host) == both


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
    """The triple names the machine's platform back."""
    assert triple_of(host) == triple
    assert foreign_system(platform_of(triple), host) is None
    assert platform_of(triple).arch == host.arch
