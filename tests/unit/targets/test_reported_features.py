"""CPU features as macOS and Windows report them: read with their calls from a small library that answers as they do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tvmflow.targets import host
from tvmflow.targets.host import NOTHING, Host, read_reported_features

# of a MacBook Pro with an Intel Core i9-9880H
COFFEE_LAKE = {
    "machdep.cpu.features": "FPU VME DE PSE TSC MSR PAE MCE CX8 APIC SEP MTRR PGE MCA CMOV PAT PSE36 CLFSH DS ACPI MMX "
    "FXSR SSE SSE2 SS HTT TM PBE SSE3 PCLMULQDQ DTES64 MON DSCPL VMX SMX EST TM2 SSSE3 FMA CX16 TPR PDCM SSE4.1 SSE4.2 "
    "x2APIC MOVBE POPCNT AES PCID XSAVE OSXSAVE SEGLIM64 TSCTMR AVX1.0 RDRAND F16C",
    "machdep.cpu.leaf7_features": "RDWRFSGS TSC_THREAD_OFFSET SGX BMI1 AVX2 SMEP BMI2 ERMS INVPCID FPU_CSDS MPX RDSEED "
    "ADX SMAP CLFSOPT IPT",
    "machdep.cpu.extfeatures": "SYSCALL XD 1GBPAGE EM64T LAHF LZCNT PREFETCHW RDTSCP TSCI",
}
_FEATURE = "hw.optional.arm.FEAT_"
M1 = {
    **{f"{_FEATURE}{name}": 1 for name in "DotProd FCMA FHM FP16 FRINTTS JSCVT LRCPC LSE RDM".split()},
    **{f"{_FEATURE}{name}": 0 for name in ("BF16", "I8MM")},
}  # fmt: skip
HASWELL = (6, 10, 13, 17, 36, 37, 38, 39, 40)

_ANSWERS = """\
#include <stddef.h>
#include <string.h>
int sysctlbyname(const char *name, void *old, size_t *length, void *now, size_t size) {{
    if (now || size) return -1;
{texts}
    return -1;
}}
int IsProcessorFeaturePresent(unsigned number) {{
    static const unsigned present[] = {{{numbers}}};
    for (size_t i = 0; i < sizeof present / sizeof *present; ++i) if (present[i] == number) return 1;
    return 0;
}}
"""
_TEXT = """\
    if (!strcmp(name, "{name}")) {{
        static const {kind} answer{array} = {value};
        if (old) memcpy(old, &answer, sizeof answer);
        *length = sizeof answer;
        return 0;
    }}"""


class System:
    """A library with the two functions, which returns the reports of a machine."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch

    def answers(
        self, texts: Mapping[str, str | int] | None = None, numbers: tuple[int, ...] = ()
    ) -> None:
        cases = [
            _TEXT.format(name=name, kind="int", array="", value=value)
            if isinstance(value, int)
            else _TEXT.format(name=name, kind="char", array="[]", value=f'"{value}"')
            for name, value in (texts or {}).items()
        ]
        # one that was loaded stays loaded
        number = len(list(self._folder.iterdir()))
        source, library = (self._folder / f"answers{number}{end}" for end in (".c", ".so"))
        code = _ANSWERS.format(
            texts="\n".join(cases), numbers=", ".join(map(str, (0xFFFF, *numbers)))
        )
        source.write_text(code)
        command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([*command, str(source)], check=True, capture_output=True)
        for constant in ("_LIBSYSTEM", "_KERNEL32"):
            self._monkeypatch.setattr(host, constant, str(library))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """A library with configurable answers."""
    return System(tmp_path, monkeypatch)


def test_macos_on_x86_reports_features_with_its_own_names(system: System) -> None:
    """All features of such a CPU in LLVM are present; those that macOS never reports stay unknown."""
    system.answers(COFFEE_LAKE)
    features = read_reported_features("macos", "x86_64")
    names = "pni ssse3 sse4_1 sse4_2 popcnt avx avx2 fma f16c bmi1 bmi2 abm movbe aes pclmulqdq"
    host = Host("x86_64", "cpu", features.present, 8, "macos", "", features.reported)
    assert set(names.split()) <= features.present
    assert host.find_missing([*names.split(), "avx512f", "avx512_vnni"]) == ["avx512f"]


def test_a_missing_sysctl_leaves_its_features_unknown(system: System) -> None:
    """As where a virtual machine hides them."""
    name = "machdep.cpu.features"
    system.answers({name: COFFEE_LAKE[name]})
    features = read_reported_features("macos", "x86_64")
    assert "avx" in features.present and "avx2" not in features.reported


def test_rosetta_reports_nothing(system: System) -> None:
    """It runs more instructions than it reports."""
    system.answers({**COFFEE_LAKE, "sysctl.proc_translated": 1})
    assert read_reported_features("macos", "x86_64") == NOTHING


def test_macos_on_arm_reports_each_feature_by_a_number(system: System) -> None:
    """0 is absent, no answer is neither; one of Apple's may be two of the Linux kernel's."""
    system.answers(M1)
    features = read_reported_features("macos", "aarch64")
    present = "asimddp fcma asimdfhm fphp asimdhp frint jscvt lrcpc atomics asimdrdm"
    assert features.present == set(present.split())
    host = Host("aarch64", "cpu", features.present, 8, "macos", "", features.reported)
    assert host.find_missing(["fp", "asimd", "bf16", "i8mm", "sve", "sme", *features.present]) == [
        "bf16",
        "i8mm",
    ]


def test_windows_reports_few_features_and_an_old_version_none(system: System) -> None:
    """A Windows that does not know the numbers returns 0 for all of them, which is not a report."""
    system.answers(numbers=HASWELL)
    features = read_reported_features("windows", "x86_64")
    assert features.present == {"ssse3", "sse4_1", "sse4_2", "avx", "avx2"}
    assert features.reported - features.present == {"avx512f"}
    assert read_reported_features("windows", "aarch64") == NOTHING
    system.answers(numbers=(6, 10, 13, 17))
    assert read_reported_features("windows", "x86_64") == NOTHING


def test_a_system_without_the_library_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its library is another one."""
    for constant in ("_LIBSYSTEM", "_KERNEL32"):
        monkeypatch.setattr(host, constant, "/no/such/library")
    for name in ("macos", "windows"):
        assert read_reported_features(name, "x86_64") == NOTHING
