"""A delivery with results made by hand: a store with its lineage, a plan, and a folder for the files."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.engine import plan_of, planned, recipe
from tests.support.facts import pick_best_facts
from tests.support.trials import trial
from tvmflow.core.keys import stage_key
from tvmflow.core.types import Artifact, InputFile, Plan
from tvmflow.engine import delivery
from tvmflow.exporters.archives import write_zip
from tvmflow.provenance import find_sidecars, write_sidecars
from tvmflow.runtime.bundles import LIBRARY_FORMAT
from tvmflow.store.local import LocalStore

TVM = "0.27.0+0123456789ab"
WORKLOAD = "c0" * 32
TRIAL = trial(1, seconds=2e-6, when="2026-01-02T03:04:05.000+00:00")
MODEL = "ab" * 32
LIBRARY = b"\x7fELF the library"

Content = dict[str, Any]


def describe(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return what the manifest of a bundle says of its files."""
    return {
        name: {"bytes": len(content), "sha256": _sha256(content)} for name, content in files.items()
    }


def contents(**changes: bytes) -> dict[str, dict[str, bytes]]:
    """Stage -> its files, as the stages write them."""
    ir, params = b'{"ir": 1}', b"weights"
    manifest = {
        "bundle": LIBRARY_FORMAT,
        "name": "net",
        "version": "0",
        "library": "library.so",
        "target": {"name": "host", "tvm": {"kind": "llvm"}},
        "model": {"ir_sha256": _sha256(ir), "weights_sha256": _sha256(params)},
        "tvm": "0.27.0",
    }
    tensors = {"inputs": [{"name": "x", "shape": [1, 3], "dtype": "float32"}], "outputs": []}
    signature = _json(tensors)
    files = {"signature.json": signature, "library.so": LIBRARY}
    bundle = {"manifest.json": _json({**manifest, "files": describe(files)}), **files}
    tasks = [{"key": WORKLOAD, "names": ["conv", "conv1"], "weight": 2}, {"key": "d0", "names": []}]
    judged = {"winner": TRIAL.id, "tuned_us": 1.5, "untuned_us": 3.0}
    verdict = {
        "passed": True,
        "against": "reference",
        "reference": "ONNX Runtime 1.0",
        "accuracy": 0.97,
        "outputs": {"y": {"max_abs_error": 1e-7, "passed": True}},
        "latency": {"library": {"median": 2e-5, "min": 1e-5, "max": 3e-5}},
    }
    stable = {name: verdict[name] for name in ("passed", "against", "reference")}
    return {
        "import": {
            "model.json": ir,
            "params.safetensors": params,
            "signature.json": changes.get("signature", signature),
        },
        "lower": {"lowered.json": b"{}"},
        "extract_tasks": {"tasks.json": _json(tasks), "workloads.json": b"{}"},
        "tune": {"records.json": _json({WORKLOAD: [_winning_trial()]})},
        "pick_best": {
            "chosen.json": b"{}",
            "finalists.json": _json({WORKLOAD: judged}),
            "roofline.svg": b"<svg/>",
        },
        "build": {
            "kernels.json": _json({"conv": "tuned", "conv1": "tuned", "softmax": "rows"}),
            "lib0.o": b"\x7fELF",
        },
        "export": {"module.tvmflow": _zip(bundle), "net.tvmflow": _zip(bundle), "net.so": LIBRARY},
        "verify": {
            "verdict.json": changes.get("verdict", _json(stable)),
            "measurements.json": changes.get("measurements", _json(verdict)),
        },
    }


def _winning_trial() -> Content:
    """The trial as `tune` hands it on."""
    return {"id": TRIAL.id, "seconds": TRIAL.seconds, "when": TRIAL.when}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _zip(content: dict[str, bytes]) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        write_zip(Path(file.name), content)
        return Path(file.name).read_bytes()


FACTS = {"pick_best": pick_best_facts(tunable=2, untuned_us=0.0)}

BUNDLE = contents()["export"]["net.tvmflow"]


def bundle_with(path: Path, **changes: bytes | None) -> Path:
    """The bundle with other entries, or without some; dots in names are written `__`."""
    with zipfile.ZipFile(io.BytesIO(BUNDLE)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for name, content in changes.items():
        entries.pop(name.replace("__", "."), None)
        if content is not None:
            entries[name.replace("__", ".")] = content
    write_zip(path, entries)
    return path


class World:
    """Everything in one folder: `store`, `plan`, `artifacts`, and `dist` once it is delivered."""

    def __init__(self, folder: Path, url: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.store = LocalStore(str(folder / "store"))
        self.store.create()
        self.dist = folder / "dist"
        self.folder = self.dist / "net" / "host"
        made = recipe(tune={"trials": 4}, outputs=["shared-library", "bundle"])
        # nothing is downloaded: the results are there
        source = InputFile("model", "", "net.yaml:1:1", url=url or "file:net", sha256=MODEL)
        self.plan: Plan = plan_of(planned(made)._replace(model_files=(source,)))
        self.artifacts: dict[str, Artifact] = {}
        self.make(contents())

    def make(self, files: dict[str, dict[str, bytes]]) -> None:
        """The results of all stages."""
        for spec in self.plan.stages:
            inputs = {file.role: file.sha256 for file in spec.files if file.keyed}
            for need in spec.needs:
                digests = self.artifacts[need.stage_id].digests(need.files)
                inputs |= {f"{need.stage}/{name}": digest for name, digest in digests.items()}
            tools = {name: TVM if name == "apache-tvm" else "absent" for name in spec.tools}
            key = stage_key(spec, inputs, tools, "linux-x86_64")
            with self.store.claim(key.digest) as claim:
                for name, content in files[spec.stage].items():
                    path = Path(claim.out, name)
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(content)
                facts = dict(FACTS.get(spec.stage, {}))
                self.artifacts[spec.id] = self.store.publish(claim, key, facts, 1.0)

    def deliver(self) -> list[str]:
        """As a run does it; the names of all that is in the target's folder then."""
        paths = delivery.deliver(self.plan, self.artifacts, self.store, str(self.dist))
        paths += write_sidecars(self.plan, self.artifacts, self.store, str(self.dist))
        return [Path(path).relative_to(self.folder).as_posix() for path in paths]

    def pending(self) -> bool:
        return find_sidecars(self.plan, self.artifacts, self.store, str(self.dist)) is None

    @property
    def statement(self) -> Path:
        return self.folder / "net.intoto.jsonl"

    @property
    def measurements(self) -> Path:
        """The statement about measurements."""
        return self.folder / "net.measurements.intoto.jsonl"

    @property
    def bom(self) -> Path:
        return self.folder / "net.cdx.json"
