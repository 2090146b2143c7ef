"""Verifying a library on a remote backend: its runs, its verdict, and its failures."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tvm

from tests.support.bundles import make_bundle
from tests.support.tuning import model as imported_model
from tests.support.tuning import relu
from tvmflow.core.errors import StageError, VerifyFailed
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import Reference
from tvmflow.runtime import bundles
from tvmflow.stages import verify
from tvmflow.stages.base import KnownFacts, StageContext
from tvmflow.stages.verify import libraries
from tvmflow.stages.verify_settings import CheckSettings, MachineSettings, VerifySettings
from tvmflow.targets.emulation import EMULATED_ARCHS, QEMU_VARIABLE
from tvmflow.targets.host import read_host

# Runs a program as qemu does, but without emulation.
EMULATOR = """\
#!/bin/sh
[ "$1" = --version ] && echo "qemu-any version 9.9 (a fake)" && exit
[ "$2" = help ] && echo max && exit
shift 2
exec "$@"
"""
# Computes `x -> (x + 1, 2 x)`, as the model does.
# The shell starts Python, as the path of a program after `#!` has no space.
PROGRAM = f"""\
#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
'''
import sys
from pathlib import Path
from tvmflow.targets.emulation import read_tensors, write_tensors

batches = read_tensors(Path(sys.argv[1]))
write_tensors(Path(sys.argv[2]), [(x + 1, 2 * x) for x, in batches])
"""
HERE = f"{read_host().arch}-linux-gnu"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `x -> (x + 1, 2 x)` for this machine."""
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small.tvmflow", runtime="vm")


@pytest.fixture
def context(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    """A stage whose emulator and emulation program are those above."""
    qemu = tmp_path / f"qemu-{EMULATED_ARCHS[read_host().arch].qemu_arch}"
    qemu.write_text(EMULATOR)
    qemu.chmod(0o755)
    monkeypatch.setenv(QEMU_VARIABLE, str(tmp_path))
    for name in ("emulation_program", "out", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "emulation_program" / "program").write_text(PROGRAM)
    signature, model = tmp_path / "signature.json", tmp_path / "model.json"
    signature.write_text(json.dumps(bundles.read_bundle(bundle).signature))
    model.write_text(tvm.ir.save_json(imported_model(relu)))
    inputs = {
        "import/model.json": model,
        "import/signature.json": signature,
        "export/module.tvmflow": bundle,
        "emulation_program/program": tmp_path / "emulation_program" / "program",
    }
    return StageContext(
        inputs, tmp_path / "out", tmp_path / "work", tmp_path, tmp_path, lambda event: None
    )


def settings(*, min_accuracy: float | None = None, against: str = "none") -> VerifySettings:
    """Those of a target that this machine cannot run."""
    return VerifySettings(
        verify=CheckSettings(
            against=against,
            rtol=1e-3,
            atol=1e-4,
            label="label",
            min_accuracy=min_accuracy,
            samples=3,
            seed=0,
            repeat=2,
            data=False,
        ),
        inputs={},
        model={"kind": "onnx"},
        target=MachineSettings(
            tvm={"kind": "llvm", "mtriple": HERE, "mcpu": "imagined"},
            threads=2,
            device={"kind": "cpu", "class": "any"},
            unrunnable_reason="it is imagined",
        ),
        precision="model",
        run_on="qemu",
    )


def test_an_emulated_library_is_run_and_not_timed(context: StageContext) -> None:
    """The verdict names what ran it, and so does the summary; there is no latency."""
    facts = verify.run(settings(), context)
    assert facts == {
        "against": "none",
        "failures": [],
        "latency_not_measured": "an emulated CPU says nothing about the speed of a real one",
        "passed": True,
        "ran_on": f"qemu-{EMULATED_ARCHS[read_host().arch].qemu_arch} 9.9 -cpu max",
        "samples": 3,
    }
    assert json.loads((context.out / verify.MEASUREMENTS).read_text()) == facts
    stable = {"passed": True, "against": "none"}
    assert json.loads((context.out / verify.VERDICT).read_text()) == stable
    assert verify.describe(facts, KnownFacts()) == [
        f"ran on {facts['ran_on']}",
        "latency is not measured: an emulated CPU says nothing about the speed of a real one",
        "NOT VERIFIED against a reference (verify.against: none)",
    ]


def test_the_reference_has_ended_before_the_library_is_loaded(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a large model is in memory once; what the reference computed is kept."""
    events: list[str] = []

    @contextlib.contextmanager
    def reference(
        files: dict[str, Path], inputs: Any, outputs: Any, **_: object
    ) -> Iterator[Reference]:
        def run(feed: dict[str, Any]) -> dict[str, Any]:
            return {outputs[0].name: feed["x"] + 1, outputs[1].name: 2 * feed["x"]}

        yield cast(
            Reference, SimpleNamespace(name="a reference", note="", run=run, can_observe=False)
        )
        events.append("reference ended")

    def open_library(*arguments: Any) -> Any:
        events.append("library loaded")
        return original(*arguments)

    original = libraries.open_library
    monkeypatch.setattr("tvmflow.stages.verify.libraries.open_library", open_library)
    monkeypatch.setattr(FRONTENDS["onnx"], "reference", reference)
    facts = verify.run(settings(against="reference"), context)
    assert events == ["reference ended", "library loaded"]
    assert [output["passed"] for output in facts["outputs"].values()] == [True, True]
    assert facts["reference"] == "a reference"


def test_its_outputs_are_compared_like_others(context: StageContext, tmp_path: Path) -> None:
    """Accuracy is that of the first output, x + 1; the last sample is the only one that is wrong."""
    rows = np.eye(3, dtype=np.float32).repeat(2, axis=0)
    data = tmp_path / "data.npz"
    np.savez(data, x=rows, label=np.array([0, 0, 1, 1, 2, 0]))
    context = context._replace(inputs={**context.inputs, "data": data})
    facts = verify.run(settings(min_accuracy=0.8), context)
    assert facts["accuracy"] == pytest.approx(5 / 6)
    with pytest.raises(
        VerifyFailed, match=r"accuracy 0.8333 is below verify.min_accuracy 0.9"
    ) as low:
        verify.run(settings(min_accuracy=0.9), context)
    # no tolerance makes it more accurate
    assert "rtol" not in str(low.value.fix)


def test_a_library_that_ends_badly_is_no_verdict(context: StageContext, tmp_path: Path) -> None:
    """The stage fails with the emulator, and writes no verdict."""
    qemu = tmp_path / f"qemu-{EMULATED_ARCHS[read_host().arch].qemu_arch}"
    qemu.write_text('#!/bin/sh\n[ "$1" = -cpu ] && [ "$2" != help ] && kill -SEGV $$\nexit 0\n')
    with pytest.raises(StageError, match="was ended by SIGSEGV under qemu-"):
        verify.run(settings(), context)
    assert not list(context.out.iterdir())
