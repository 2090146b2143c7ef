"""One recipe for eight targets: shared work is done once, and a ninth target runs its own stages alone."""

from __future__ import annotations

import json
import zipfile

import pytest

from tests.support.project import Project
from tvmflow.targets.backends.cuda import nvrtc

pytestmark = pytest.mark.slow

EIGHT = (
    *("host", "x86-64-v3", "x86-64-v4", "cortex-a72", "neoverse-n1", "riscv64-v", "apple-m1"),
    # the wheels of CUDA's compiler are not for every machine
    "cuda-sm90" if nvrtc.is_installed() else "x86-64-windows",
)
SUFFIXES = {"apple-m1": ".dylib", "x86-64-windows": ".dll"}
MAGIC = {".so": b"\x7fELF", ".dylib": b"\xcf\xfa\xed\xfe", ".dll": b"MZ"}


@pytest.mark.nightly
def test_eight_targets_from_one_recipe(project: Project) -> None:
    """Eight bundles from one import; nothing the second time; a ninth target runs its own stages alone."""
    project.write_recipe(targets=EIGHT)
    project.edit_recipe("verify: {against: reference", "verify: {against: none")
    ran = project.run("--jobs", "2")
    assert ran.code == 0, ran.out
    assert ran.ran.count("import") == 1
    for target in EIGHT:
        suffix = SUFFIXES.get(target, ".so")
        with zipfile.ZipFile(project.folder / f"dist/tiny/{target}/tiny.tvmflow") as bundle:
            manifest = json.loads(bundle.read("manifest.json"))
            assert manifest["target"]["name"] == target
            assert bundle.read(f"library{suffix}").startswith(MAGIC[suffix])
    assert project.run().ran == []
    project.edit_recipe(f"  - {EIGHT[-1]}\n", f"  - {EIGHT[-1]}\n  - armv7-neon\n")
    ninth = project.run()
    assert ninth.ran and all(label.endswith("/armv7-neon") for label in ninth.ran)
    assert {label for label, stage in ninth.stages.items() if stage["outcome"] == "hit"} >= {
        f"build/{target}" for target in EIGHT
    }
