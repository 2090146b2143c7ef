"""A detector in every form: outputs have the sizes that they have in a call."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest

import tvmflow
from tests.support.detectors import draw_boxes, make_detector, run_onnx_runtime
from tests.support.project import Project

RECIPE: Final = """
recipe: 1
name: boxes
version: 1.0.0
model: {onnx: boxes.onnx}
targets: [TARGET]
tune: {trials: 0}
verify: VERIFY
outputs: [OUTPUTS]
"""

C_PROGRAM: Final = """
#include <stdio.h>
#include "boxes.h"

int main(void) {
  static float boxes[64][4], scores[64], kept[64][4], kept_scores[64];
  static int64_t keep[64];
  int64_t shape[2] = {-1, -1};
  boxes_context *context;
  if (boxes_create(NULL, &context) != BOXES_OK) return 1;
  if (boxes_output_shape(context, BOXES_OUTPUT_KEPT_BOXES, shape) != BOXES_OK || shape[0] != 0) return 2;
  if (boxes_output_shape(context, BOXES_OUTPUTS, shape) != BOXES_WRONG_COUNT) return 3;
  if (boxes_output_shape(NULL, 0, shape) != BOXES_NULL_ARGUMENT) return 4;
  if (boxes_output_shape(context, 0, NULL) != BOXES_NULL_ARGUMENT) return 5;
  if (boxes_bounded_axis(BOXES_OUTPUT_KEPT_BOXES) != 0 || boxes_bounded_axis(99) != -1) return 6;
  FILE *file = fopen("input", "rb");
  const boxes_buffer inputs[] = {{boxes, sizeof boxes}, {scores, sizeof scores}};
  const boxes_buffer outputs[] = {{kept, sizeof kept}, {kept_scores, sizeof kept_scores}, {keep, sizeof keep}};
  while (fread(boxes, sizeof boxes, 1, file) == 1 && fread(scores, sizeof scores, 1, file) == 1) {
    const int status = boxes_run(context, inputs, BOXES_INPUTS, outputs, BOXES_OUTPUTS);
    if (status != BOXES_OK) return puts(boxes_message(status)), 7;
    if (boxes_output_shape(context, BOXES_OUTPUT_KEPT_BOXES, shape) != BOXES_OK) return 8;
    printf("%d %d:", (int)shape[0], (int)shape[1]);
    for (int64_t i = 0; i < shape[0]; ++i) printf(" %d", (int)keep[i]);
    puts("");
  }
  fclose(file);
  return boxes_destroy(context);
}
"""

NODE_PROGRAM: Final = """
import { load } from "./boxes.js";
import { readFile } from "node:fs/promises";

const model = await load();
const { buffer, byteOffset, length } = await readFile("input");
const numbers = new Float32Array(buffer, byteOffset, length / 4);
for (let at = 0; at < numbers.length; at += 64 * 5) {
  const values = { boxes: numbers.subarray(at, at + 64 * 4), scores: numbers.subarray(at + 64 * 4, at + 64 * 5) };
  const { kept_boxes: boxes, keep } = model.run(values);
  console.log([`${boxes.length / 4} 4:`, ...keep].join(" "));
}
console.error(JSON.stringify(model.outputs[0]));
"""


def write_recipe(project: Project, target: str, outputs: str, verify: str = "{}") -> None:
    """Write the detector and its recipe."""
    onnx.save(make_detector(), str(project.folder / "boxes.onnx"))
    recipe = RECIPE.replace("TARGET", target).replace("OUTPUTS", outputs)
    (project.folder / "tiny.yaml").write_text(recipe.replace("VERIFY", verify))


def write_inputs(folder: Path) -> list[str]:
    """Write batches in which many boxes, some and few are kept, and return the lines that name them."""
    lines = []
    with (folder / "input").open("wb") as file:
        for seed, size in enumerate((1e-3, 0.5, 30.0)):
            feed = draw_boxes(seed=seed, size=size)
            kept, _, keep = run_onnx_runtime(make_detector(), feed)
            lines.append(" ".join((f"{len(kept)} 4:", *map(str, keep))))
            file.write(feed["boxes"].tobytes() + feed["scores"].tobytes())
    return lines


@pytest.mark.slow
def test_a_detector_has_every_form(project: Project) -> None:
    """In Python, C and C++; verified against ONNX Runtime, without TVM's runtime."""
    write_recipe(project, "host", "bundle, c-library, cpp")
    done = project.run()
    assert done.code == 0, done.out
    dist = project.folder / "dist" / "boxes" / "host"
    module = tvmflow.load(dist / "boxes.tvmflow")
    assert "kept_boxes: float32[at most 64, 4]" in repr(module)
    feed = draw_boxes(seed=7)
    for actual_rows, expected_rows in zip(
        module.run(feed).values(), run_onnx_runtime(make_detector(), feed), strict=True
    ):
        np.testing.assert_array_equal(actual_rows, expected_rows)
    assert (
        "gives kept_boxes: float32 [at most 64, 4]"
        in (dist / "boxes-c-library" / "boxes.h").read_text()
    )
    assert "at most 64 × 4" in (dist / "README.md").read_text()
    folder = dist / "boxes-c-library"
    lines = write_inputs(folder)
    (folder / "main.c").write_text(C_PROGRAM)
    compiler = [sys.executable, "-m", "ziglang"]
    flags = ["-Wall", "-Wextra", "-Werror", "-fno-sanitize-trap=all", "-fsanitize=undefined"]
    command = [*compiler, "cc", "-std=c99", *flags, "main.c", "libboxes.a", "-o", "main"]
    subprocess.run([*command, "-lm", "-lpthread"], cwd=folder, check=True)
    printed = subprocess.run(["./main"], cwd=folder, capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines() == lines and not printed.stderr
    project_folder = dist / "boxes-cpp"
    files = ["main.cpp", "lib/libboxes.a", "-o", "run"]
    command = [*compiler, "c++", "-std=c++17", "-Iinclude", *flags, *files]
    subprocess.run(command, cwd=project_folder, check=True)
    batches = [draw_boxes(seed=seed) for seed in (7, 8)]
    stacked = {n: np.concatenate([batch[n] for batch in batches]) for n in feed}
    np.savez(project_folder / "in.npz", **stacked)
    subprocess.run(["./run", "in.npz", "out.npz"], cwd=project_folder, check=True)
    expected = [run_onnx_runtime(make_detector(), batch)[0] for batch in batches]
    with np.load(project_folder / "out.npz") as outputs:
        np.testing.assert_array_equal(outputs["kept_boxes"], np.concatenate(expected))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_javascript_has_the_true_sizes(project: Project) -> None:
    """Arrays are as long as there are boxes; the description has the most."""
    write_recipe(project, "wasm32-wasi", "c-library", "{against: none}")
    done = project.run()
    assert done.code == 0, done.out
    folder = project.folder / "dist" / "boxes" / "wasm32-wasi" / "boxes-c-library"
    lines = write_inputs(folder)
    (folder / "main.mjs").write_text(NODE_PROGRAM)
    printed = subprocess.run(
        ["node", "main.mjs"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert printed.stdout.splitlines() == lines
    described = json.loads(printed.stderr.splitlines()[-1])
    assert (described["shape"], described["boundedAxis"]) == ([64, 4], 0)
