"""Verifying what does not run in this process: what is sent there, and what the verdict says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import make_bundle
from tvmflow import report
from tvmflow.errors import StageError, VerifyFailed
from tvmflow.stages import verify
from tvmflow.stages._base import StageContext
from tvmflow.targets.emulation import MACHINES, VARIABLE
from tvmflow.targets.host import read_host

# What qemu does, without its emulation: the library is one for this machine.
PROGRAM = f"""\
#!{sys.executable}
import sys
from pathlib import Path

if sys.argv[1] == "--version":
    print("qemu-any version 9.9 (a fake)")
elif sys.argv[1:] == ["-cpu", "help"]:
    print("max")
else:
    import numpy as np
    from tvmflow import native
    from tvmflow.targets.tensor_file import read_tensors, write_tensors
    from tvmflow.values import TensorSpec

    def placed(array):
        ours, theirs = native.aligned(TensorSpec("x", array.shape, str(array.dtype)))
        ours[...] = array
        return theirs

    library, given, found = map(Path, sys.argv[4:])
    machine = native.load_library(library.read_bytes(), library.suffix)["vm_load_executable"]()
    machine["vm_initialization"](1, 0, 2)
    outputs = []
    for batch in read_tensors(given):
        results = machine["main"](*map(placed, batch))
        outputs.append([np.from_dlpack(result).copy() for result in results])
    write_tensors(found, outputs)
"""
HERE = f"{read_host().arch}-linux-gnu"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `x -> (x + 1, 2 x)` for this machine."""
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small.tvmflow")


@pytest.fixture
def context(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    """A stage whose emulator is the program above."""
    qemu = tmp_path / f"qemu-{MACHINES[read_host().arch].qemu}"
    qemu.write_text(PROGRAM)
    qemu.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for name in ("runner", "out", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "runner" / "runner").write_text("not needed by a fake")
    inputs = {
        "export/module.tvmflow": bundle,
        "runner/runner": tmp_path / "runner" / "runner",
    }
    return StageContext(
        inputs, tmp_path / "out", tmp_path / "work", tmp_path, tmp_path, lambda event: None
    )


def settings(**checks: Any) -> dict[str, Any]:
    """Those of a target that this machine could not run."""
    return {
        "verify": {
            "against": "none",
            "rtol": 1e-3,
            "atol": 1e-4,
            "label": "label",
            "min_accuracy": None,
            "samples": 3,
            "seed": 0,
            "repeat": 2,
            **checks,
        },
        "inputs": {},
        "model": {"kind": "onnx"},
        "target": {
            "tvm": {"kind": "llvm", "mtriple": HERE, "mcpu": "imagined"},
            "cores": 2,
            "device": {"kind": "cpu", "class": "any"},
            "why_not": "it is imagined",
        },
        "run_on": "qemu",
    }


def test_an_emulated_library_is_run_and_not_timed(context: StageContext) -> None:
    """The verdict names what ran it, and so does the summary; there is no latency."""
    facts = verify.run(settings(), context)
    assert facts == {
        "against": "none",
        "failures": [],
        "latency_not_measured": "an emulated CPU says nothing of the speed of a real one",
        "passed": True,
        "ran_on": f"qemu-{MACHINES[read_host().arch].qemu} 9.9 -cpu max",
        "samples": 3,
    }
    assert json.loads((context.out / verify.VERDICT).read_text()) == facts
    assert report._describe_verify(facts) == [
        f"ran on {facts['ran_on']}",
        "latency is not measured: an emulated CPU says nothing of the speed of a real one",
        "NOT VERIFIED against a reference (verify.against: none)",
    ]


def test_its_outputs_are_judged_as_any_others(context: StageContext, tmp_path: Path) -> None:
    """Accuracy is that of the first output, x + 1; the last sample is the only one that is wrong."""
    rows = np.eye(3, dtype=np.float32).repeat(2, axis=0)
    data = tmp_path / "data.npz"
    np.savez(data, x=rows, label=np.array([0, 0, 1, 1, 2, 0]))
    context = context._replace(inputs={**context.inputs, "data": data})
    facts = verify.run(settings(min_accuracy=0.8), context)
    assert facts["accuracy"] == pytest.approx(5 / 6)
    with pytest.raises(VerifyFailed, match=r"accuracy 0.8333 is below verify.min_accuracy 0.9"):
        verify.run(settings(min_accuracy=0.9), context)


def test_a_library_that_ends_badly_is_no_verdict(context: StageContext, tmp_path: Path) -> None:
    """The emulator's failure is the stage's, and nothing is said of the numbers."""
    qemu = tmp_path / f"qemu-{MACHINES[read_host().arch].qemu}"
    qemu.write_text('#!/bin/sh\n[ "$1" = -cpu ] && [ "$2" != help ] && kill -SEGV $$\nexit 0\n')
    with pytest.raises(StageError, match="was ended by SIGSEGV under qemu-"):
        verify.run(settings(), context)
    assert not list(context.out.iterdir())
