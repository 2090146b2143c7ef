"""Mutated recipes and pipelines: `plan` shows a plan or names every mistake with its place."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, Final

import onnx
import yaml  # noqa: TID251 - writes what the reader must refuse

from tests.fuzz.formats.cases import Case, Ending
from tests.support.mutations import mutate_bytes, mutate_tree
from tests.support.project import Project
from tvmflow.cli.main import main
from tvmflow.core.errors import EXIT_OK, EXIT_USAGE

RECIPES: Final = (
    """\
recipe: 1
name: tiny
version: "1.2.0"
model: {onnx: ../tiny.onnx}
inputs:
  data: {shape: [1, 3, 8, 8], dtype: float32, range: [0.0, 1.0]}
variants:
  one: {}
  eight: {inputs: {data: {shape: [8, 3, 8, 8]}}}
  plain: {kernels: {precision: model, math: libm}, verify: {rtol: 0.02}}
targets:
  - host
  - x86-64-v3
  - name: edge
    tvm: {kind: llvm, mtriple: x86_64-linux-gnu, mcpu: nehalem}
    num_cores: 8
    tune: {trials: 8}
    verify: {rtol: 0.01}
kernels: {math: vector}
tune: {trials: 64, seed: 0, repeat: 2, min_repeat_ms: 2}
outputs: [shared-library, bundle]
verify: {against: reference, rtol: 1.0e-3, atol: 1.0e-4, samples: 2, repeat: 2}
pipeline: tune
""",
    """\
recipe: 1
name: net
model: &model
  mxnet: {prefix: net, epoch: 3}
inputs: {data: {shape: [1, 3, 8, 8]}}
targets: [cortex-a53, riscv64-v]
outputs: [static-library, archive, wheel, c-source]
verify: {data: data.npz, min_accuracy: 0.9, rtol: 0.01}
pipeline: compile
""",
    """\
recipe: 1
name: minimal
model: {onnx: ../tiny.onnx}
inputs: {data: {shape: [1, 3, 8, 8]}}
""",
)
PIPELINES: Final = (
    """\
pipeline: 1
name: mine
description: All of it.
stages: [import, extract_tasks, tune, pick_best, build, export, verify]
recipes: [valid.yaml]
targets: [host, x86-64-v2]
release:
  version: "0.1.0"
  folder: releases
  gates: {min_accuracy: 0.95, max_accuracy_drop: 0.002, max_slowdown: 0.25, max_growth: 0.1}
""",
    """\
pipeline: 1
name: retune
stages: [import, extract_tasks, tune, pick_best, build, export, verify]
recipes: [valid.yaml]
retune: {trials: 256, round: 32}
""",
)
FILES: Final = ("net-symbol.json", "net-0003.params", "data.npz")
_PLACE: Final = re.compile(r"^(tvmflow: )?[^ :]+(\.yaml|/passwd)(:\d+(:\d+)?)?: ", re.MULTILINE)


def prepare(folder: Path) -> None:
    """Write the model that the recipes name, and load what a plan loads."""
    Project(folder)
    model = onnx.load(folder / "tiny.onnx")
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(model, folder / "tiny.onnx")
    load = folder / "load"
    load.mkdir()
    words = ["plan", "", "--json", "--store", str(folder / "store")]
    for text in RECIPES:
        words[1] = str(load / "loaded.yaml")
        Path(words[1]).write_text(text)
        main(words)


def make_case(draw: random.Random, folder: Path) -> Case:
    for name in FILES:
        (folder / name).write_bytes(b"")
    is_pipeline = draw.random() < 0.25
    text = draw.choice(PIPELINES if is_pipeline else RECIPES)
    (folder / "valid.yaml").write_text(RECIPES[2])
    mutated = folder / "mutated.yaml"
    mutated.write_bytes(_mutate(draw, text))
    words = ["plan", "mutated.yaml", "--json", "--store", str(folder.parent / "store")]
    return Case(lambda: main(words), lambda ending: _check(ending, is_pipeline))


def _mutate(draw: random.Random, text: str) -> bytes:
    if draw.random() < 0.3:
        return mutate_bytes(draw, text.encode())
    tree = mutate_tree(draw, yaml.safe_load(text))
    style = draw.choice((True, False, None))
    dumped: str = yaml.dump(tree, default_flow_style=style, allow_unicode=True, sort_keys=False)
    return dumped.encode(errors="surrogatepass")


def _check(ending: Ending, is_pipeline: bool) -> str:
    """A plan has stages; a mistake has a place."""
    if ending.code == EXIT_OK:
        return "" if _stages(ending.text) else "a plan without stages"
    if ending.code == EXIT_USAGE and not _PLACE.search(ending.text):
        return "a mistake without a place"
    return ""


def _stages(text: str) -> list[Any]:
    stages: list[Any] = json.loads(text)["stages"]
    return stages
