"""Every mistake in a recipe is told with its place, what is wrong, and what was probably meant."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef, get_args, get_origin

import pytest
from pydantic import BaseModel

from tests.support.project import Project
from tests.support.recipes import RECIPE, edited, lay_out, problems_in, write
from tvmflow.cli import main
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Json
from tvmflow.planning.recipes import PipelineFile, load_recipe
from tvmflow.recipe import Recipe
from tvmflow.recipe.lock_file import LockFile
from tvmflow.recipe.yaml_files import Document, Loc, dotted, strip_annotation, validate

Edit = tuple[str, str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the recipe names, which is also the current one."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrong(name: str, edit: Edit, *problems: str) -> Any:
    """The recipe with one edit, and all that is then wrong with it."""
    return pytest.param(edited(edit), list(problems), id=name)


def alone(name: str, content: str | bytes, *problems: str) -> Any:
    """A whole file, and all that is wrong with it."""
    return pytest.param(content, list(problems), id=name)


WRONG = [
    wrong(
        "misspelt field",
        ("pipeline:", "pipelin:"),
        "15:1: pipelin: unknown field; did you mean 'pipeline'?",
    ),
    wrong(
        "unknown field",
        ("pipeline: tune", "brush: red"),
        "15:1: brush: unknown field (valid: recipe, name, version, license, model, inputs, dimensions, state, operators, labels, variants, targets, kernels, quantize, tune, outputs, runtime, checks, verify, pipeline, stage_memory)",
    ),
    wrong(
        "field of tune at the top",
        ("pipeline: tune", "trials: 3"),
        "15:1: trials: belongs under tune",
    ),
    wrong(
        "field of two parts at the top",
        ("pipeline: tune", "seed: 3"),
        "15:1: seed: belongs under tune or under verify",
    ),
    wrong(
        "field of verify in tune",
        ("  trials: 4", "  rtol: 4"),
        "10:3: tune.rtol: belongs under verify",
    ),
    wrong(
        "name in tune",
        ("  trials: 4", "  name: 4"),
        "10:3: tune.name: belongs at the top level or under targets",
    ),
    wrong(
        "misspelt field of model",
        ("onnx:", "onxx:"),
        "4:3: model.onxx: unknown field; did you mean 'onnx'?",
    ),
    wrong(
        "misspelt field of mxnet",
        ("onnx: m.onnx", "mxnet: {prefix: net, epochs: 3}"),
        "4:10: model.mxnet.epoch: is missing; write `epoch: 10`",
        "4:24: model.mxnet.epochs: unknown field; did you mean 'epoch'?",
    ),
    wrong(
        "misspelt field of an input",
        ("dtype:", "type:"),
        "6:31: inputs.data.type: unknown field; did you mean 'dtype'?",
    ),
    wrong(
        "unknown field of an input",
        ("shape:", "order: NCHW, shape:"),
        "6:10: inputs.data.order: unknown field (valid: shape, dtype, range, value, image)",
    ),
    wrong(
        "a latency without a unit",
        ("rtol: 1.0e-3", "max_latency: 8"),
        "14:16: verify.max_latency: '8' is not a latency such as 8 ms or 0.5 s; units are us, µs, ms, s",
    ),
    wrong(
        "a size in seconds",
        ("rtol: 1.0e-3", "max_memory: 60 s"),
        "14:15: verify.max_memory: '60 s' is not a size such as 20GB or 500MB; units are B, kB, KB, MB, GB, TB, KiB, MiB, GiB, TiB",
    ),
    wrong(
        "a limit of nothing",
        ("rtol: 1.0e-3", "max_size: 0 MB"),
        "14:13: verify.max_size: must be above 0; leave it out for no limit",
    ),
    wrong(
        "a gate beside an unknown runtime",
        ("rtol: 1.0e-3", "max_vs: {ort: 1}"),
        "14:17: verify.max_vs.ort: 'ort' is not a runtime (valid: onnxruntime, openvino, pytorch, tensorrt)",
    ),
    wrong(
        "misspelt field of a target",
        ("- host", "- {name: a, preset: host, num_threads: 3}"),
        "8:29: targets.0.num_threads: unknown field; did you mean 'threads'?",
    ),
    wrong(
        "unknown field of verify",
        ("rtol", "tolerance"),
        "14:3: verify.tolerance: unknown field (valid: against, data, label, rtol, atol, min_accuracy, max_latency, max_memory, max_size, max_vs, samples, seed, repeat, compare, run_on)",
    ),
    wrong(
        "misspelt field of an image",
        ("dtype: float32", "image: {resiz: 110}"),
        "6:39: inputs.data.image.resiz: unknown field; did you mean 'resize'?",
    ),
    wrong(
        "misspelt field of another section",
        ("rtol: 1.0e-3", "trial: 4"),
        "14:3: verify.trial: unknown field; did you mean 'trials' under tune?",
    ),
    wrong(
        "gates in a recipe",
        ("pipeline: tune", "gates: {max_latency: 5 ms}"),
        "15:1: gates: belongs under release of a pipeline",
    ),
    wrong(
        "section of an unknown name with a known field",
        ("pipeline: tune", "limits: {max_latency_ms: 5}"),
        "15:1: limits: unknown field; did you mean 'max_latency' under verify?",
    ),
    wrong("no version", ("recipe: 1\n", ""), "1:1: recipe: is missing; write `recipe: 1`"),
    wrong(
        "version of the future",
        ("recipe: 1\n", "recipe: 2\n"),
        "1:9: recipe: this tvmflow reads only version 1; write 1",
    ),
    wrong(
        "version in quotes",
        ("recipe: 1\n", 'recipe: "1"\n'),
        "1:9: recipe: this tvmflow reads only version 1; write 1",
    ),
    wrong(
        "version with a point",
        ("recipe: 1\n", "recipe: 1.0\n"),
        "1:9: recipe: this tvmflow reads only version 1; write 1",
    ),
    wrong(
        "version true",
        ("recipe: 1\n", "recipe: true\n"),
        "1:9: recipe: this tvmflow reads only version 1; write 1",
    ),
    wrong(
        "name is a number",
        ("name: net", "name: 12"),
        "2:7: name: must be a string, such as resnet50, not the number 12",
    ),
    wrong(
        "name is empty",
        ("name: net", "name:"),
        "2:6: name: must be a string, such as resnet50, but is empty",
    ),
    wrong(
        "name with a capital",
        ("name: net", "name: Net"),
        "2:7: name: must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -, not the string 'Net'",
    ),
    wrong(
        "name with a slash",
        ("name: net", "name: a/b"),
        "2:7: name: must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -, not the string 'a/b'",
    ),
    wrong(
        "name of dots",
        ("name: net", "name: .."),
        "2:7: name: must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -, not the string '..'",
    ),
    *(
        wrong(
            f"name {name!r}, which Windows lacks",
            ("name: net", f"name: {name}"),
            f"2:7: name: no folder can have the name '{name}' on Windows; choose another one",
        )
        for name in ("con", "nul.txt", "com1", "net.")
    ),
    wrong(
        "target name of a device",
        ("- host", "- {name: aux, preset: host}"),
        "8:12: targets.0.name: no folder can have the name 'aux' on Windows; choose another one",
    ),
    wrong(
        "name too long",
        ("name: net", "name: " + "a" * 101),
        "2:7: name: must have at most 100 characters",
    ),
    wrong(
        "name is a list",
        ("name: net", "name: [net]"),
        "2:7: name: must be a string, such as resnet50, not a list",
    ),
    wrong(
        "name with a line break",
        ("name: net", 'name: "net\\n"'),
        "2:7: name: must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -, not the string 'net\\n'",
    ),
    wrong(
        "model is text",
        ("model:\n  onnx: m.onnx", "model: m.onnx"),
        "3:8: model: must be a mapping, such as {onnx: model.onnx}, not the string 'm.onnx'",
    ),
    wrong(
        "model is empty",
        ("model:\n  onnx: m.onnx", "model:"),
        "3:7: model: must be a mapping, such as {onnx: model.onnx}, but is empty",
    ),
    wrong(
        "no source",
        ("onnx: m.onnx", "onnx:"),
        "4:3: model: needs exactly one of mxnet, onnx, pytorch, tflite, not none",
    ),
    wrong("onnx is empty text", ("onnx: m.onnx", 'onnx: ""'), "4:9: model.onnx: must not be empty"),
    wrong(
        "onnx is a number",
        ("onnx: m.onnx", "onnx: 3"),
        "4:9: model.onnx: must be a string, not the number 3",
    ),
    wrong(
        "two sources",
        ("onnx: m.onnx", "onnx: m.onnx\n  mxnet: {prefix: net, epoch: 3}"),
        "4:3: model: needs exactly one of mxnet, onnx, pytorch, tflite, not mxnet and onnx",
    ),
    wrong(
        "mxnet is text",
        ("onnx: m.onnx", "mxnet: net"),
        "4:10: model.mxnet: must be a mapping, such as {prefix: models/digits, epoch: 10}, not the string 'net'",
    ),
    wrong(
        "negative epoch",
        ("onnx: m.onnx", "mxnet: {prefix: net, epoch: -1}"),
        "4:31: model.mxnet.epoch: must be at least 0",
    ),
    wrong(
        "no epoch",
        ("onnx: m.onnx", "mxnet: {prefix: net}"),
        "4:10: model.mxnet.epoch: is missing; write `epoch: 10`",
    ),
    wrong(
        "no symbol file",
        ("onnx: m.onnx", "mxnet: {prefix: nett, epoch: 3}"),
        "4:19: model.mxnet.prefix: there is no file nett-symbol.json; did you mean 'net-symbol.json'?",
    ),
    wrong(
        "no such epoch",
        ("onnx: m.onnx", "mxnet: {prefix: net, epoch: 4}"),
        "4:31: model.mxnet.epoch: there is no file net-0004.params (available epochs: 3, 10)",
    ),
    wrong(
        "octal epoch",
        ("onnx: m.onnx", "mxnet: {prefix: net, epoch: 0010}"),
        "4:31: model.mxnet.epoch: YAML reads 0010 as an octal number; remove the leading 0, or put it in quotes",
    ),
    wrong(
        "sha256 with mxnet",
        ("onnx: m.onnx", "mxnet: {prefix: net, epoch: 3}\n  sha256: " + "a" * 64),
        "5:11: model.sha256: is only allowed with onnx or pytorch or tflite",
    ),
    wrong(
        "no onnx file",
        ("m.onnx", "n.onnx"),
        "4:9: model.onnx: there is no file n.onnx; did you mean 'm.onnx'?",
    ),
    wrong("onnx is a folder", ("m.onnx", "."), "4:9: model.onnx: . is a folder, not a file"),
    wrong(
        "onnx in no folder",
        ("m.onnx", "no/such/m.onnx"),
        "4:9: model.onnx: there is no file no/such/m.onnx",
    ),
    wrong(
        "onnx with a NUL",
        ("m.onnx", '"m\\0.onnx"'),
        "4:9: model.onnx: there is no file m\\x00.onnx; did you mean 'm.onnx'?",
    ),
    wrong(
        "no data file",
        ("data.npz", "date.npz"),
        "13:9: verify.data: there is no file date.npz; did you mean 'data.npz'?",
    ),
    wrong(
        "sha256 too short",
        ("m.onnx", "m.onnx\n  sha256: abc"),
        "5:11: model.sha256: must be 64 hexadecimal digits, not the string 'abc'",
    ),
    wrong(
        "sha256 is a number",
        ("m.onnx", "m.onnx\n  sha256: 123"),
        "5:11: model.sha256: must be a string, not the number 123",
    ),
    wrong(
        "sha256 not hex",
        ("m.onnx", "m.onnx\n  sha256: " + "g" * 64),
        "5:11: model.sha256: must be 64 hexadecimal digits, not the string 'gggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggg'",
    ),
    wrong(
        "credentials in a URL",
        ("m.onnx", "https://ann:hunter2@models.example.org/m.onnx\n  sha256: " + "a" * 64),
        "4:9: model.onnx: credentials do not belong in a URL, which is shown and shared: write it without them, and set "
        "$TVMFLOW_TOKEN_MODELS_EXAMPLE_ORG or use ~/.netrc",
    ),
    wrong(
        "credentials in the URL of a bucket",
        ("m.onnx", "s3://ann:hunter2@models/m.onnx\n  sha256: " + "a" * 64),
        "4:9: model.onnx: credentials do not belong in a URL, which is shown and shared: write it without them, and use "
        "the environment variables of the service",
    ),
    wrong(
        "password with a slash in a URL",
        ("m.onnx", "https://ann:hunter/2@example.org/m.onnx\n  sha256: " + "a" * 64),
        "4:9: model.onnx: this is not a valid URL",
    ),
    wrong(
        "bucket without a file",
        ("m.onnx", "gs://models"),
        "4:9: model.onnx: write it as gs://BUCKET/PATH/TO/FILE",
    ),
    wrong(
        "no file on the Hub",
        ("m.onnx", "hf://org/net@" + "a" * 40),
        "4:9: model.onnx: this names no file on the Hub: write it as hf://ORGANIZATION/NAME/FILE@COMMIT",
    ),
    wrong(
        "file outside of a repository on the Hub",
        ("m.onnx", "hf://org/net/../other/m.onnx@" + "a" * 40),
        "4:9: model.onnx: this names no file on the Hub: write it as hf://ORGANIZATION/NAME/FILE@COMMIT",
    ),
    wrong(
        "data set of the Hub",
        ("m.onnx", "hf://datasets/org/net/m.onnx"),
        "4:9: model.onnx: only models are read from the Hub: write it as hf://ORGANIZATION/NAME/FILE@COMMIT",
    ),
    wrong(
        "digest of a further file too short",
        ("m.onnx", "m.onnx\n  files: {m.data: abc}"),
        "5:19: model.files.m.data: must be 64 hexadecimal digits, not the string 'abc'",
    ),
    wrong(
        "address of a checkpoint with an unknown scheme",
        ("onnx: m.onnx", "mxnet: {prefix: 'http5://h/net', epoch: 3}"),
        "4:19: model.mxnet.prefix: 'http5' is not a supported URL scheme; did you mean 'http'? (valid: hf, oci, https, http, "
        "file, s3, gs, az)",
    ),
    wrong(
        "URL that cannot be downloaded",
        ("m.onnx", "ftp://example.org/m.onnx\n  sha256: " + "a" * 64),
        "4:9: model.onnx: 'ftp' is not a supported URL scheme (valid: hf, oci, https, http, file, s3, gs, az)",
    ),
    wrong(
        "dimension 0",
        ("[1, 3, 8, 8]", "[0, 3, 8, 8]"),
        "6:18: inputs.data.shape.0: must be at least 1",
    ),
    wrong(
        "dimension -1",
        ("[1, 3, 8, 8]", "[-1, 3, 8, 8]"),
        "6:18: inputs.data.shape.0: must be at least 1",
    ),
    wrong(
        "huge shape",
        ("[1, 3, 8, 8]", "[100000, 100000]"),
        "6:17: inputs.data.shape: has more than 2^31 elements",
    ),
    wrong(
        "dimension 3.5",
        ("[1, 3, 8, 8]", "[1, 3.5, 8]"),
        "6:21: inputs.data.shape.1: must be an integer, such as 224, not the number 3.5",
    ),
    wrong(
        "dimension 3.0",
        ("[1, 3, 8, 8]", "[1, 3.0, 8]"),
        "6:21: inputs.data.shape.1: must be an integer, such as 224, not the number 3.0",
    ),
    wrong(
        "dimension with a name",
        ("[1, 3, 8, 8]", "[1, 3, n, 8]"),
        "6:24: inputs.data.shape.2: there is no dimension 'n' (write a number, or define it under `dimensions`, such as "
        "`n: {max: 512}`)",
    ),
    wrong(
        "dimension with an expression",
        ("[1, 3, 8, 8]", "[1, 3, 2*n, 8]"),
        "6:24: inputs.data.shape.2: there is no dimension 'n' (write a number, or define it under `dimensions`, such as "
        "`n: {max: 512}`)",
    ),
    wrong(
        "dimension with code",
        ("[1, 3, 8, 8]", "[1, 3, n.real, 8]"),
        "6:24: inputs.data.shape.2: must be an integer, such as 224, not the string 'n.real'",
    ),
    wrong(
        "dimension empty",
        ("[1, 3, 8, 8]", "[1, ~, 8]"),
        "6:21: inputs.data.shape.1: must be an integer, such as 224, but is empty",
    ),
    wrong(
        "dimension true",
        ("[1, 3, 8, 8]", "[1, true, 8]"),
        "6:21: inputs.data.shape.1: must be an integer, such as 224, not true",
    ),
    wrong(
        "shape is a number",
        ("[1, 3, 8, 8]", "8"),
        "6:17: inputs.data.shape: must be a list, such as [1, 3, 224, 224], not the number 8",
    ),
    wrong(
        "shape is text",
        ("[1, 3, 8, 8]", "1x3x8x8"),
        "6:17: inputs.data.shape: must be a list, such as [1, 3, 224, 224], not the string '1x3x8x8'",
    ),
    wrong(
        "shape has fields",
        ("[1, 3, 8, 8]", "{n: 1}"),
        "6:17: inputs.data.shape: must be a list, such as [1, 3, 224, 224], not a mapping",
    ),
    wrong(
        "value and range",
        ("dtype: float32", "value: 3, range: [0, 9]"),
        "6:48: inputs.data.range: is for random inputs, and the input has a value",
    ),
    wrong(
        "value and image",
        ("dtype: float32", "value: 3, image: {}"),
        "6:48: inputs.data.image: is for images, and the input has a value",
    ),
    wrong(
        "a value that is text",
        ("dtype: float32", "value: 16k"),
        "6:38: inputs.data.value: must be a number, or lists of numbers, not '16k'",
    ),
    wrong(
        "a ragged value",
        ("dtype: float32", "value: [[1, 2], [3]]"),
        "6:38: inputs.data.value: has lists of different lengths",
    ),
    wrong(
        "a value without elements",
        ("dtype: float32", "value: [[], []]"),
        "6:38: inputs.data.value: is empty",
    ),
    wrong(
        "a value of another shape",
        ("dtype: float32", "value: [1, 2]"),
        "6:38: inputs.data.value: has the shape [2], and `shape` is [1, 3, 8, 8]",
    ),
    wrong(
        "a large constant",
        ("[1, 3, 8, 8], dtype: float32", "[4097, 4096], value: 0"),
        "6:17: inputs.data.shape: has more than 2^24 elements, the most of a constant",
    ),
    wrong(
        "input is a list",
        ("{shape: [1, 3, 8, 8], dtype: float32}", "[1, 3, 8, 8]"),
        "6:9: inputs.data: must be a mapping, such as {shape: [1, 3, 224, 224], dtype: float32}, not a list",
    ),
    wrong(
        "inputs are a list",
        ("inputs:\n  data: {shape: [1, 3, 8, 8], dtype: float32}", "inputs: [data]"),
        "5:9: inputs: must be a mapping, such as {data: {shape: [1, 3, 224, 224], dtype: float32}}, not a list",
    ),
    wrong(
        "inputs are empty",
        ("inputs:\n  data: {shape: [1, 3, 8, 8], dtype: float32}", "inputs:"),
        "5:8: inputs: must be a mapping, such as {data: {shape: [1, 3, 224, 224], dtype: float32}}, but is empty",
    ),
    wrong(
        "misspelt dtype",
        ("float32", "flaot32"),
        "6:38: inputs.data.dtype: 'flaot32' is not a dtype; did you mean 'float32'? (valid: bool, float16, float32, float64, int16, int32, int64, int8, uint16, uint32, uint64, uint8)",
    ),
    wrong(
        "unknown dtype",
        ("float32", "f"),
        "6:38: inputs.data.dtype: 'f' is not a dtype (valid: bool, float16, float32, float64, int16, int32, int64, int8, uint16, uint32, uint64, uint8)",
    ),
    wrong(
        "range the wrong way round",
        ("dtype: float32", "range: [1, 0]"),
        "6:38: inputs.data.range: the first number must not be larger than the second",
    ),
    wrong(
        "range of three",
        ("dtype: float32", "range: [1, 2, 3]"),
        "6:38: inputs.data.range: must be two numbers, such as [-1.0, 1.0], not 3",
    ),
    wrong(
        "range of one",
        ("dtype: float32", "range: [1]"),
        "6:38: inputs.data.range: must be two numbers, such as [-1.0, 1.0], not 1",
    ),
    wrong(
        "range to nan",
        ("dtype: float32", "range: [0, .nan]"),
        "6:42: inputs.data.range.1: must be a finite number",
    ),
    wrong(
        "range of text",
        ("dtype: float32", "range: [0, one]"),
        "6:42: inputs.data.range.1: must be a number, such as 1.0, not the string 'one'",
    ),
    wrong(
        "range is a number",
        ("dtype: float32", "range: 1"),
        "6:38: inputs.data.range: must be a list, such as [-1.0, 1.0], not the number 1",
    ),
    wrong(
        "unknown target",
        ("- host", "- x86-64-v5"),
        "8:5: targets.0: 'x86-64-v5' is not a target; did you mean 'x86-64-v4'? (`tvmflow targets` lists them)",
    ),
    wrong(
        "target with a capital",
        ("- host", "- Host"),
        "8:5: targets.0: 'Host' is not a target; did you mean 'host'? (`tvmflow targets` lists them)",
    ),
    wrong(
        "target as TVM 0.18 took it",
        ("- host", "- llvm -mcpu=core-avx2"),
        "8:5: targets.0: 'llvm -mcpu=core-avx2' is not a target (`tvmflow targets` lists them)",
    ),
    wrong(
        "target is a number",
        ("- host", "- 3"),
        "8:5: targets.0: must be a mapping, such as {name: edge, preset: x86-64-v2}, not the number 3",
    ),
    wrong(
        "target is empty",
        ("- host", "-"),
        "8:4: targets.0: must be a mapping, such as {name: edge, preset: x86-64-v2}, but is empty",
    ),
    wrong(
        "no targets",
        ("targets:\n  - host", "targets: []"),
        "7:10: targets: must be a list with at least one item, such as [host, {name: edge, preset: x86-64-v2}], not an empty list",
    ),
    wrong(
        "targets are a word",
        ("targets:\n  - host", "targets: host"),
        "7:10: targets: must be a list, such as [host, {name: edge, preset: x86-64-v2}], not the string 'host'",
    ),
    wrong(
        "target twice",
        ("- host", "- host\n  - host"),
        "9:5: targets.1: duplicate target name 'host'",
    ),
    wrong(
        "tvm beside the preset host",
        ("- host", "- {name: a, preset: host, tvm: {kind: llvm}}"),
        "8:34: targets.0.tvm: is not allowed with the preset host, which is detected",
    ),
    wrong(
        "target by name alone",
        ("- host", "- {name: a}"),
        "8:5: targets.0: needs preset or tvm, found neither",
    ),
    wrong(
        "target without a name",
        ("- host", "- {preset: host}"),
        "8:5: targets.0.name: is missing; write `name: edge`",
    ),
    wrong(
        "target name with a space",
        ("- host", "- {name: A B, preset: host}"),
        "8:12: targets.0.name: must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -, not the string 'A B'",
    ),
    wrong(
        "misspelt preset",
        ("- host", "- {name: a, preset: hots}"),
        "8:23: targets.0.preset: 'hots' is not a target; did you mean 'host'? (`tvmflow targets` lists them)",
    ),
    wrong(
        "tvm target without kind",
        ("- host", "- {name: a, tvm: {mcpu: x}}"),
        "8:20: targets.0.tvm: needs a kind, such as `kind: llvm`",
    ),
    wrong(
        "WebGPU without WebAssembly",
        ("- host", "- {name: a, tvm: {kind: webgpu, host: {mtriple: x86_64-linux-gnu}}}"),
        "8:20: targets.0.tvm: needs the code of browsers without WebGPU, such as `host: {kind: llvm, mtriple: wasm32-wasi}`",
    ),
    wrong(
        "WebGPU for a part of a model",
        (
            "- host",
            "- {name: a, parts: [{name: b, until: [t], preset: browser}, {name: c, preset: host}]}",
        ),
        "8:53: targets.0.parts.0.preset: is only for whole models",
    ),
    wrong(
        "name of the code for WebGPU",
        ("- host", "- browser\n  - {name: browser.webgpu, preset: host}"),
        "9:5: targets.1: 'browser.webgpu' is the name of WebGPU of the target 'browser'",
    ),
    wrong(
        "tvm target as text",
        ("- host", "- {name: a, tvm: llvm -mcpu=x}"),
        "8:20: targets.0.tvm: must be a mapping, such as {kind: llvm, mtriple: aarch64-linux-gnu, mcpu: cortex-a72}, not the string 'llvm -mcpu=x'",
    ),
    wrong(
        "no cores",
        ("- host", "- {name: a, preset: host, threads: 0}"),
        "8:38: targets.0.threads: must be at least 1",
    ),
    wrong("negative trials", ("trials: 4", "trials: -4"), "10:11: tune.trials: must be at least 0"),
    wrong(
        "half a trial",
        ("trials: 4", "trials: 4.5"),
        "10:11: tune.trials: must be an integer, not the number 4.5",
    ),
    wrong(
        "trials in words",
        ("trials: 4", "trials: many"),
        "10:11: tune.trials: must be an integer, not the string 'many'",
    ),
    wrong(
        "trials true",
        ("trials: 4", "trials: true"),
        "10:11: tune.trials: must be an integer, not true",
    ),
    wrong(
        "trials yes",
        ("trials: 4", "trials: yes"),
        "10:11: tune.trials: YAML reads yes as true or false; write true or false, or put it in quotes",
    ),
    wrong(
        "tune is a number",
        ("tune:\n  trials: 4", "tune: 4"),
        "9:7: tune: must be a mapping, such as {trials: 1000}, not the number 4",
    ),
    wrong(
        "tune is empty",
        ("tune:\n  trials: 4", "tune:"),
        "9:6: tune: must be a mapping, such as {trials: 1000}, but is empty",
    ),
    wrong(
        "octal trials",
        ("trials: 4", "trials: 010"),
        "10:11: tune.trials: YAML reads 010 as an octal number; remove the leading 0, or put it in quotes",
    ),
    wrong(
        "trials 1e3",
        ("trials: 4", "trials: 1e3"),
        "10:11: tune.trials: must be an integer, not the number 1e3",
    ),
    wrong(
        "trials to base 60",
        ("trials: 4", "trials: 1:30"),
        "10:11: tune.trials: YAML reads 1:30 as a base-60 number; put it in quotes",
    ),
    wrong(
        "too many trials",
        ("trials: 4", "trials: " + "9" * 50),
        "10:11: tune.trials: must be at most 10000000",
    ),
    wrong(
        "trials of 5000 digits",
        ("trials: 4", "trials: " + "9" * 5000),
        "10:11: tune.trials: the number has 5000 digits, more than 100",
    ),
    wrong(
        "strategy of AutoTVM",
        ("trials: 4", "strategy: ga"),
        "10:13: tune.strategy: 'ga' is called evolutionary in tvmflow",
    ),
    wrong(
        "misspelt strategy",
        ("trials: 4", "strategy: evolutionnary"),
        "10:13: tune.strategy: 'evolutionnary' is not a strategy; did you mean 'evolutionary'? (valid: evolutionary, replay-trace)",
    ),
    wrong(
        "misspelt cost model",
        ("trials: 4", "cost_model: xgbb"),
        "10:15: tune.cost_model: must be one of xgb, mlp, random, not the string 'xgbb'; did you mean 'xgb'?",
    ),
    wrong(
        "cost model is a list",
        ("trials: 4", "cost_model: [xgb]"),
        "10:15: tune.cost_model: must be one of xgb, mlp, random, not a list",
    ),
    wrong(
        "seed too large",
        ("trials: 4", "seed: 2147483648"),
        "10:9: tune.seed: must be at most 2147483647",
    ),
    wrong("no repeats", ("trials: 4", "repeat: 0"), "10:11: tune.repeat: must be at least 1"),
    wrong(
        "timeout 0",
        ("trials: 4", "trial_timeout_s: 0"),
        "10:20: tune.trial_timeout_s: must be greater than 0",
    ),
    wrong(
        "timeout inf",
        ("trials: 4", "trial_timeout_s: .inf"),
        "10:20: tune.trial_timeout_s: must be a finite number",
    ),
    wrong(
        "version as a number",
        ("name: net", "name: net\nversion: 1.0"),
        "3:10: version: must be a string, such as 1.2.0, not the number 1.0",
    ),
    wrong(
        "license that SPDX does not list",
        ("name: net", "name: net\nlicense: Our own"),
        "3:10: license: must be an SPDX license expression, such as Apache-2.0 or `MIT OR BSD-3-Clause`, not 'Our own'; "
        "write LicenseRef-NAME for a license that SPDX does not list",
    ),
    wrong(
        "license as a list",
        ("name: net", "name: net\nlicense: [MIT]"),
        "3:10: license: must be a string, such as Apache-2.0, not a list",
    ),
    wrong(
        "version in another way",
        ("name: net", "name: net\nversion: v1.2-rc1"),
        "3:10: version: must be a version such as 1.2.0 or 1.2.0rc1, not 'v1.2-rc1'",
    ),
    wrong(
        "timeout 1e999",
        ("trials: 4", "trial_timeout_s: 1e999"),
        "10:20: tune.trial_timeout_s: must be a finite number",
    ),
    wrong(
        "misspelt output",
        ("[bundle]", "[bundel]"),
        "11:11: outputs.0: 'bundel' is not an output; did you mean 'bundle'? (valid: android, archive, bundle, c-library, c-library-weights, c-source, cpp, objects, params, shared-library, static-library, system-library, web, wheel, xcframework)",
    ),
    wrong(
        "two misspelt outputs",
        ("[bundle]", "[bundel, shared-libary]"),
        "11:11: outputs.0: 'bundel' is not an output; did you mean 'bundle'? (valid: android, archive, bundle, c-library, c-library-weights, c-source, cpp, objects, params, shared-library, static-library, system-library, web, wheel, xcframework)",
        "11:19: outputs.1: 'shared-libary' is not an output; did you mean 'shared-library'? (valid: android, archive, bundle, c-library, c-library-weights, c-source, cpp, objects, params, shared-library, static-library, system-library, web, wheel, xcframework)",
    ),
    wrong(
        "outputs are a word",
        ("[bundle]", "bundle"),
        "11:10: outputs: must be a list, such as [shared-library, bundle], not the string 'bundle'",
    ),
    wrong(
        "no outputs",
        ("[bundle]", "[]"),
        "11:10: outputs: must be a list with at least one item, such as [shared-library, bundle], not an empty list",
    ),
    wrong(
        "output twice",
        ("[bundle]", "[bundle, bundle]"),
        "11:19: outputs.1: 'bundle' is listed twice",
    ),
    wrong(
        "an archive of nothing",
        ("[bundle]", "[archive]"),
        "11:10: outputs: an archive contains the other outputs; list at least one more output",
    ),
    wrong(
        "output is a number",
        ("[bundle]", "[3]"),
        "11:11: outputs.0: must be a string, such as bundle, not the number 3",
    ),
    wrong(
        "misspelt reference",
        ("data: data.npz", "against: refrence"),
        "13:12: verify.against: must be one of reference, none, not the string 'refrence'; did you mean 'reference'?",
    ),
    wrong(
        "reference no",
        ("data: data.npz", "against: no"),
        "13:12: verify.against: YAML reads no as true or false; write true or false, or put it in quotes",
    ),
    wrong(
        "reference null",
        ("data: data.npz", "against: null"),
        "13:12: verify.against: must be one of reference, none, but is empty",
    ),
    wrong(
        "reference false",
        ("data: data.npz", "against: false"),
        "13:12: verify.against: must be one of reference, none, not false",
    ),
    wrong(
        "accuracy without data",
        ("data: data.npz", "min_accuracy: 0.9"),
        "13:17: verify.min_accuracy: needs labelled data; set verify.data",
    ),
    wrong(
        "accuracy 95",
        ("rtol: 1.0e-3", "min_accuracy: 95"),
        "14:17: verify.min_accuracy: must be at most 1",
    ),
    wrong(
        "accuracy 95%",
        ("rtol: 1.0e-3", "min_accuracy: 95%"),
        "14:17: verify.min_accuracy: must be a number, not the string '95%'",
    ),
    wrong(
        "a place that there is not",
        ("data: data.npz", "run_on: board"),
        "13:11: verify.run_on: must be one of auto, local, qemu, rpc, chromium, not the string 'board'",
    ),
    wrong(
        "a speed under emulation",
        (
            "trials: 4\noutputs: [bundle]\nverify:",
            "trials: 4\n  min_speedup: 1.1\nverify:\n  run_on: qemu",
        ),
        "11:16: tune.min_speedup: needs a latency, and the target 'host' is verified under emulation (run_on: qemu or chromium), which measures none",
    ),
    wrong(
        "state of int4",
        ("pipeline: tune", "state: {past.*: {output: present.*, dtype: int4}}"),
        "15:44: state.past.*.dtype: must be float16 or int8, or be left out to keep the dtype of the model",
    ),
    wrong(
        "state without an output",
        ("pipeline: tune", "state: {past.*: {dtype: float16}}"),
        "15:17: state.past.*.output: is missing; write `output: present.*`",
    ),
    wrong(
        "misspelt field of a state",
        ("pipeline: tune", "state: {h: {output: hn, dtyp: float16}}"),
        "15:25: state.h.dtyp: unknown field; did you mean 'dtype'?",
    ),
    wrong(
        "one name of a state with a star",
        ("pipeline: tune", "state: {past.*: {output: present, dtype: float16}}"),
        "15:17: state.past.*: `*` must be in both names, or in none: 'past.*' and 'present'",
    ),
    wrong(
        "state that is a number",
        ("pipeline: tune", "state: {h: 3}"),
        "15:12: state.h: must be the name of an output, or a mapping with `output` and `dtype`",
    ),
    wrong("tolerance nan", ("1.0e-3", ".nan"), "14:9: verify.rtol: must be a finite number"),
    wrong("tolerance inf", ("1.0e-3", ".inf"), "14:9: verify.rtol: must be a finite number"),
    wrong("negative tolerance", ("1.0e-3", "-1"), "14:9: verify.rtol: must be at least 0"),
    wrong(
        "tolerance in quotes",
        ("1.0e-3", '"1e-3"'),
        "14:9: verify.rtol: must be a number, not the string '1e-3'",
    ),
    wrong("tolerance true", ("1.0e-3", "true"), "14:9: verify.rtol: must be a number, not true"),
    wrong(
        "misspelt pipeline",
        ("pipeline: tune", "pipeline: compil"),
        "15:11: pipeline: there is no pipeline 'compil'; did you mean 'compile'? (there are compile, fanout, release, retune, tune)",
    ),
    wrong(
        "no pipeline file",
        ("pipeline: tune", "pipeline: nightly.yaml"),
        "15:11: pipeline: there is no file nightly.yaml",
    ),
    wrong(
        "pipeline is a number",
        ("pipeline: tune", "pipeline: 3"),
        "15:11: pipeline: must be a string, not the number 3",
    ),
    wrong(
        "field twice",
        ("outputs: [bundle]", "outputs: [bundle]\ntargets: [host]"),
        "12:1: targets: duplicate field; first defined in line 7",
    ),
    wrong(
        "field of tune twice",
        ("trials: 4", "trials: 4\n  trials: 5"),
        "11:3: tune.trials: duplicate field; first defined in line 10",
    ),
    wrong(
        "tab as indentation",
        ("  trials", "\ttrials"),
        "10:1: found a tab; YAML allows only spaces here",
    ),
    wrong(
        "tab before a value",
        ("trials: 4", "trials:\t4"),
        "10:10: found a tab; YAML allows only spaces here",
    ),
    wrong(
        "tab in the next line",
        ("  trials: 4", "  trials: 4\n\tseed: 3"),
        "11:1: found a tab; YAML allows only spaces here",
    ),
    wrong(
        "merge key",
        ("  trials: 4", "  <<: {trials: 4}"),
        "10:3: tune: merge keys (<<) are not supported; write the fields out",
    ),
    wrong(
        "merge of an unknown anchor",
        ("  trials: 4", "  <<: *x"),
        "10:7: unknown alias; no anchor above has this name",
    ),
    wrong(
        "tag that runs code",
        ("trials: 4", "trials: !!python/object/apply:os.system [ls]"),
        "10:11: tune.trials: the tag !!python/object/apply:os.system is not allowed; remove it",
    ),
    wrong(
        "tag of ones own",
        ("trials: 4", "trials: !mine 4"),
        "10:11: tune.trials: the tag !mine is not allowed; remove it",
    ),
    wrong(
        "tag of YAML",
        ("trials: 4", "trials: !!str 4"),
        "10:11: tune.trials: the tag !!str is not allowed; remove it",
    ),
    wrong(
        "tag that does not fit",
        ("trials: 4", "trials: !!int [1]"),
        "10:11: tune.trials: the tag !!int is not allowed; remove it",
    ),
    wrong(
        "bool tag that does not fit",
        ("trials: 4", "trials: !!bool maybe"),
        "10:11: tune.trials: the tag !!bool is not allowed; remove it",
    ),
    wrong(
        "tag without a prefix",
        ("name: net", "name: !e!x aGk="),
        "2:7: this is not YAML: while parsing a node: found undefined tag handle '!e!'",
    ),
    wrong(
        "date as name",
        ("name: net", "name: 2024-01-01"),
        "2:7: name: YAML reads 2024-01-01 as a date; put it in quotes",
    ),
    wrong(
        "equals sign as name",
        ("name: net", "name: ="),
        "2:7: name: YAML reads = as a special value; put it in quotes",
    ),
    wrong(
        "field named by a number",
        ("pipeline: tune", "1: tune"),
        "15:1: a field name must be a string; YAML reads 1 as a number; put it in quotes",
    ),
    wrong(
        "field named yes",
        ("pipeline: tune", "yes: tune"),
        "15:1: a field name must be a string; YAML reads yes as true or false; put it in quotes",
    ),
    wrong(
        "field named by a list",
        ("pipeline: tune", "[a]: tune"),
        "15:1: a field name must be a string",
    ),
    wrong(
        "input named by a number",
        ("  data: {", "  0: {"),
        "6:3: inputs: a field name must be a string; YAML reads 0 as a number; put it in quotes",
    ),
    wrong(
        "name yes",
        ("name: net", "name: yes"),
        "2:7: name: YAML reads yes as true or false; write true or false, or put it in quotes",
    ),
    wrong(
        "name on",
        ("name: net", "name: on"),
        "2:7: name: YAML reads on as true or false; write true or false, or put it in quotes",
    ),
    wrong(
        "name NO",
        ("name: net", "name: NO"),
        "2:7: name: YAML reads NO as true or false; write true or false, or put it in quotes",
    ),
    wrong(
        "unknown alias",
        ("name: net", "name: *x"),
        "2:7: unknown alias; no anchor above has this name",
    ),
    wrong(
        "text with a percent sign",
        ("name: net", "name: %net"),
        "2:7: a string that starts with this character needs quotes",
    ),
    wrong(
        "text with a colon",
        ("name: net", "name: a: b"),
        "2:8: a ':' is not allowed here: the indentation is wrong, or a string with ': ' needs quotes",
    ),
    wrong(
        "no space after the colon",
        ("name: net", "name:net"),
        "2:1: expected a field, such as `name: …`",
    ),
    wrong(
        "bracket not closed",
        ("[bundle]", "[bundle"),
        "11:10: this bracket is not closed, or a comma is missing in it",
    ),
    wrong("quote not closed", ("name: net", 'name: "net'), "2:7: this quote is never closed"),
    wrong(
        "line too far in",
        ("  trials: 4", "  trials: 4\n   seed: 1"),
        "11:8: a ':' is not allowed here: the indentation is wrong, or a string with ': ' needs quotes",
    ),
    wrong(
        "line not far enough in",
        ("  onnx: m.onnx", "  onnx: m.onnx\n sha256: abc"),
        "5:2: this line does not continue what is above; check its indentation",
    ),
    wrong(
        "NUL character",
        ("name: net", "name: n\x00t"),
        "2:8: the character U+0000 is not allowed in YAML",
    ),
    wrong(
        "control character",
        ("name: net", "name: n\x07t"),
        "2:8: the character U+0007 is not allowed in YAML",
    ),
    wrong(
        "half a surrogate pair",
        ("m.onnx", '"\\ud800"'),
        "4:9: model.onnx: the string contains a lone surrogate (half of a character)",
    ),
    wrong(
        "field without a name",
        ("pipeline: tune", ": tune"),
        "15:1: this line does not continue what is above; check its indentation",
    ),
    wrong(
        "mxnet without inputs",
        (
            "onnx: m.onnx\ninputs:\n  data: {shape: [1, 3, 8, 8], dtype: float32}\n",
            "mxnet: {prefix: net, epoch: 3}\n",
        ),
        "1:1: inputs: a model of MXNet needs the shapes of its inputs here",
    ),
    wrong(
        "data at a URL",
        ("data.npz", "https://example.org/data.npz"),
        "13:9: verify.data: must be a file, not a URL",
    ),
    wrong(
        "anchor twice",
        ("name: net\nmodel:", "name: &x net\nmodel: &x"),
        "3:8: duplicate anchor; another value above has this name",
    ),
]


def wrong_dimension(name: str, dimensions: str, shape: str, *problems: str) -> Any:
    """The recipe with dynamic shapes, and all that is wrong with them."""
    edit = ("  data: {shape: [1, 3, 8, 8],", f"  data: {{shape: {shape},")
    return (
        wrong(name, edit, *problems)
        if not dimensions
        else pytest.param(
            edited(edit, ("targets:", f"dimensions: {dimensions}\ntargets:")),
            list(problems),
            id=name,
        )
    )


WRONG_DIMENSIONS = [
    wrong_dimension(
        "dimension that no input tells",
        "{seq: {max: 8}, past: {min: 0, max: 8}}",
        "[seq, seq + past]",
        "6:17: inputs.data.shape: no input determines the size of 'past': write that name alone for a size, in this input or "
        "in another",
    ),
    wrong_dimension(
        "expression below 0",
        "{seq: {max: 8}}",
        "[seq, seq - 2]",
        "6:23: inputs.data.shape.1: 'seq - 2' may be -1, which is below 0",
    ),
    wrong_dimension(
        "dimension that is misspelt",
        "{seq: {max: 8}}",
        "[1, sek]",
        "6:21: inputs.data.shape.1: there is no dimension 'sek'; did you mean 'seq'? (write a number, or define it under "
        "`dimensions`, such as `sek: {max: 512}`)",
    ),
    wrong_dimension(
        "dimension without a maximum",
        "{seq: {min: 8}}",
        "[1, seq]",
        "7:19: dimensions.seq.max: is missing; write `max: 512`",
    ),
    wrong_dimension(
        "dimension whose range is empty",
        "{seq: {min: 9, max: 8}}",
        "[1, seq]",
        "7:25: dimensions.seq.min: is 9, which is larger than `max`, 8",
    ),
    wrong_dimension(
        "dimension of one size",
        "{seq: {min: 8, max: 8}}",
        "[1, seq]",
        "7:33: dimensions.seq.max: is the same as `min`: write 8 in the shapes, in place of a dimension",
    ),
    wrong_dimension(
        "maximum that is not a multiple",
        "{seq: {multiple_of: 8, max: 500}}",
        "[1, seq]",
        "7:41: dimensions.seq.max: is 500, which is not a multiple of 8 (`multiple_of`); write 496 or 504",
    ),
    wrong_dimension(
        "minimum that is not a multiple",
        "{seq: {min: 1, multiple_of: 8, max: 512}}",
        "[1, seq]",
        "7:25: dimensions.seq.min: is 1, which is not a multiple of 8 (`multiple_of`); write 8",
    ),
    wrong_dimension(
        "tuned size out of range",
        "{seq: {max: 64, tune_at: [16, 128]}}",
        "[1, seq]",
        "7:43: dimensions.seq.tune_at.1: is 128, and the sizes are 1 to 64",
    ),
    wrong_dimension(
        "tuned size that is not a multiple",
        "{seq: {multiple_of: 8, max: 64, tune_at: [12]}}",
        "[1, seq]",
        "7:55: dimensions.seq.tune_at.0: is 12, which is not a multiple of 8 (`multiple_of`)",
    ),
    wrong_dimension(
        "tuned size twice",
        "{seq: {max: 64, tune_at: [16, 16]}}",
        "[1, seq]",
        "7:43: dimensions.seq.tune_at.1: 16 is there twice",
    ),
    wrong_dimension(
        "dimension without an input",
        "{seq: {max: 8}, batch: {max: 2}}",
        "[1, seq]",
        "7:36: dimensions.batch: is in no input's shape: write its name in place of a size there, or leave it out",
    ),
    wrong_dimension(
        "dimension with a word of Python's as its name",
        "{for: {max: 8}}",
        "[1, 8]",
        "7:19: dimensions.for: must start with a letter or _, contain only letters, digits and _, have at most 64 "
        "characters, and not be a word of Python's, nor `min`, `max` or `SIZE`",
    ),
    wrong_dimension(
        "dimensions that differ in case",
        "{seq: {max: 8}, SEQ: {max: 2}}",
        "[SEQ, seq]",
        "7:34: dimensions.SEQ: differs only in case from 'seq'; choose another name",
    ),
    wrong_dimension(
        "huge open shape",
        "{seq: {max: 2000000000}}",
        "[3, seq]",
        "6:17: inputs.data.shape: has more than 2^31 elements with seq at 2000000000",
    ),
    wrong_dimension(
        "value of an open shape",
        "{seq: {max: 8}}",
        "[3, seq], value: 1",
        "6:21: inputs.data.shape.1: is the dimension seq, and an input with a value has sizes that are numbers",
    ),
    wrong_dimension(
        "images of dynamic size",
        "{h: {max: 80}, w: {max: 80}}",
        "[1, 3, h, w], image: {}",
        "6:38: inputs.data.image: makes images of one size, and the input has a dynamic dimension "
        "besides its batch: remove one of them",
    ),
    wrong_dimension(
        "images for an input without channels",
        "{batch: {max: 8}}",
        "[batch, 5, 8, 8], image: {}",
        "6:42: inputs.data.image: no dimension for channels in the shape [8, 5, 8, 8] is 1 or 3",
    ),
    pytest.param(
        edited(
            ("[1, 3, 8, 8]", "[batch, 3, 8, 8]"),
            ("targets:\n  - host", "dimensions: {batch: {max: 8}}\ntargets:\n  - name: two\n    parts:\n"
             "      - {name: a, preset: host, until: [t]}\n      - {name: b, preset: host}"),
        ),
        ["9:5: targets.0: 'two' is in parts, which need fixed sizes: leave `dimensions` out, and use `variants`"],
        id="parts of an open model",
    ),
    pytest.param(
        edited(("targets:", "variants:\n  a: {dimensions: {n: {max: 4}}, inputs: {data: {shape: [n, m]}}}\ntargets:")),
        ["8:61: variants.a.inputs.data.shape.1: there is no dimension 'm' (write a number, or define it under "
         "`dimensions`, such as `m: {max: 512}`)"],
        id="unknown dimension of a variant",
    ),
]  # fmt: skip
NOT_RECIPES = [
    alone("empty file", "", "1:1: the file is empty"),
    alone("blank lines", "\n\n", "1:1: the file is empty"),
    alone("only a comment", "# nothing\n", "1:1: the file is empty"),
    alone("only dashes", "---\n", "1:1: the file is empty"),
    alone("only null", "~", "1:1: the file is empty"),
    alone("list at the top", "- a\n", "1:1: must be a mapping, such as `name: …`, not a list"),
    alone(
        "word at the top",
        "hello",
        "1:1: must be a mapping, such as `name: …`, not a single value",
    ),
    alone(
        "two documents",
        RECIPE + "---\n" + RECIPE,
        "16:1: a second document starts here; a file may hold only one",
    ),
    alone(
        "YAML bomb",
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\n",
        "5:1: more than 40000 names and values after expanding aliases",
    ),
    alone("anchor that holds itself", "a: &a [*a]\n", "1:1: nested more than 40 levels deep"),
    alone(
        "5000 brackets", "a: " + "[" * 5000 + "]" * 5000, "1:44: nested more than 40 levels deep"
    ),
    alone(
        "500 steps in",
        "\n".join(" " * i + "a:" for i in range(500)),
        "41:41: nested more than 40 levels deep",
    ),
    alone(
        "YAML of the future",
        "%YAML 3.2\n---\n" + RECIPE,
        "1:1: this is not YAML: found incompatible YAML document (version 1.* is required)",
    ),
    alone("UTF-16", RECIPE.encode("utf-16"), "1:1: is not UTF-8 text; save the file as UTF-8"),
    alone(
        "over 1 MiB",
        RECIPE + "#" * (1 << 20),
        "1:1: is larger than 1 MiB; is this the right file?",
    ),
    alone(
        "control character first",
        "\x01" + RECIPE,
        "1:1: the character U+0001 is not allowed in YAML",
    ),
    alone(
        "Latin-1",
        RECIPE.replace("name: net", "name: n\xe9t").encode("latin-1"),
        "2:8: is not UTF-8 text; save the file as UTF-8",
    ),
    alone(
        "mistakes everywhere",
        edited(
            ("name: net", "name: Net"),
            ("m.onnx", "n.onnx"),
            ("dtype: float32", "dtype: float"),
            ("- host", "- hots"),
            ("trials: 4", "trials: yes"),
            ("[bundle]", "[bundel]"),
            ("rtol: 1.0e-3", "rtoll: 1.0e-3\n  atol: 2024-01-01\n  atol: 0"),
            ("pipeline: tune", "pipeline: tuna"),
        ),
        "2:7: name: must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -, not the string 'Net'",
        "4:9: model.onnx: there is no file n.onnx; did you mean 'm.onnx'?",
        "6:38: inputs.data.dtype: 'float' is not a dtype; did you mean 'float64'? (valid: bool, float16, float32, float64, int16, int32, int64, int8, uint16, uint32, uint64, uint8)",
        "8:5: targets.0: 'hots' is not a target; did you mean 'host'? (`tvmflow targets` lists them)",
        "10:11: tune.trials: YAML reads yes as true or false; write true or false, or put it in quotes",
        "11:11: outputs.0: 'bundel' is not an output; did you mean 'bundle'? (valid: android, archive, bundle, c-library, c-library-weights, c-source, cpp, objects, params, shared-library, static-library, system-library, web, wheel, xcframework)",
        "14:3: verify.rtoll: unknown field; did you mean 'rtol'?",
        "15:9: verify.atol: YAML reads 2024-01-01 as a date; put it in quotes",
        "16:3: verify.atol: duplicate field; first defined in line 15",
        "17:11: pipeline: there is no pipeline 'tuna'; did you mean 'tune'? (there are compile, fanout, release, retune, tune)",
    ),
    alone(
        "no file at all that is named",
        edited(
            ("onnx: m.onnx", "mxnet: {prefix: nat, epoch: 3}"),
            ("data.npz", "no/data.npz"),
        ),
        "4:19: model.mxnet.prefix: there is no file nat-symbol.json; did you mean 'net-symbol.json'?",
        "13:9: verify.data: there is no file no/data.npz",
    ),
]


@pytest.mark.parametrize(("content", "problems"), WRONG + WRONG_DIMENSIONS + NOT_RECIPES)
def test_wrong_recipes(content: str | bytes, problems: list[str]) -> None:
    """All problems are reported in the order of their positions, in one RecipeError."""
    assert problems_in(write(Path("r.yaml"), content)) == problems


def test_an_unreadable_value_is_reported_once() -> None:
    """Problems that only follow from it (a field that seems to be missing or empty) are not reported."""
    text = edited(("onnx: m.onnx", "<<: {onnx: m.onnx}"), ("shape:", "1: [], 2:"))
    assert problems_in(write(Path("r.yaml"), text)) == [
        "4:3: model: merge keys (<<) are not supported; write the fields out",
        "6:10: inputs.data: a field name must be a string; YAML reads 1 as a number; put it in quotes",
        "6:17: inputs.data: a field name must be a string; YAML reads 2 as a number; put it in quotes",
    ]


def test_positions_name_the_file_as_on_the_command_line(folder: Path) -> None:
    """A relative path stays relative; missing files are shown from the recipe's folder."""
    (folder / "sub").mkdir()
    write(folder / "sub" / "r.yaml", RECIPE)
    for path in (Path("sub/r.yaml"), folder / "sub" / "r.yaml"):
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        assert caught.value.problems == [
            f"{path}:4:9: model.onnx: there is no file {path.parent}/m.onnx",
            f"{path}:13:9: verify.data: there is no file {path.parent}/data.npz",
        ]


def test_a_missing_recipe_suggests_the_nearest_name() -> None:
    """Recipes in the same folder are suggested."""
    write(Path("digits.yaml"), RECIPE)
    assert problems_in(Path("digit.yaml")) == [
        "1:1: there is no such file; did you mean 'digits.yaml'?"
    ]
    assert problems_in(Path("no/such/folder.yaml")) == ["1:1: there is no such file"]


def test_a_folder_and_a_path_through_a_file_are_rejected(folder: Path) -> None:
    """The message says why there is no file."""
    assert problems_in(folder) == ["1:1: is a folder, not a file"]
    assert problems_in(folder / "m.onnx" / "r.yaml") == [
        "1:1: cannot exist: m.onnx is not a folder"
    ]
    assert problems_in(Path("a" * 300)) == ["1:1: cannot be read: File name too long"]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_a_recipe_without_read_permission() -> None:
    """The message is that of the operating system."""
    path = write(Path("r.yaml"), RECIPE)
    path.chmod(0)
    assert problems_in(path) == ["1:1: cannot be read: Permission denied"]


def test_an_empty_file_says_how_to_start() -> None:
    """The fix is the first line of every recipe."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(Path("r.yaml"), "# nothing yet"))
    assert caught.value.fix == "start with the line `recipe: 1`"


def test_a_path_that_is_too_long_is_a_missing_file() -> None:
    """It is not an error of the operating system; the message is truncated."""
    [problem] = problems_in(write(Path("r.yaml"), edited(("m.onnx", "a" * 5000))))
    assert problem == f"4:9: model.onnx: there is no file {'a' * 500}…"


# ---------------------------------------------------------------- through the command


BY_COMMAND = [
    case
    for case in WRONG + NOT_RECIPES
    if case.id
    in {
        "misspelt field",
        "no epoch",
        "two sources",
        "dimension -1",
        "unknown target",
        "trials yes",
        "strategy of AutoTVM",
        "misspelt output",
        "accuracy without data",
        "misspelt pipeline",
        "tab as indentation",
        "tag that runs code",
        "empty file",
        "YAML bomb",
        "UTF-16",
        "half a surrogate pair",
        "control character first",
        "mistakes everywhere",
    }
]


@pytest.mark.parametrize(("content", "problems"), BY_COMMAND)
def test_the_command_reports_all_problems(
    content: str | bytes, problems: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`tvmflow plan`: exit code 2, all places on stderr, nothing on stdout."""
    write(Path("r.yaml"), content)
    assert main.main(["plan", "--store", "cache", "r.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.removeprefix("tvmflow: ").splitlines()
    assert lines[: len(problems)] == [f"r.yaml:{problem}" for problem in problems]


def test_problems_of_two_recipes_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its own file."""
    write(Path("a.yaml"), edited(("trials: 4", "trials: -4")))
    write(Path("b.yaml"), edited(("trials: 4", "trails: 4")))
    assert main.main(["plan", "--store", "cache", "a.yaml", "b.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "tvmflow: a.yaml:10:11: tune.trials: must be at least 0",
        "b.yaml:10:3: tune.trails: unknown field; did you mean 'trials'?",
    ]


def test_the_process_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    """For `run` as well as `plan`, also when the output encoding is ASCII."""
    project = Project(tmp_path)
    project.environment["PYTHONIOENCODING"] = "ascii"
    write(project.folder / "tiny.yaml", edited(("name: net", "name: n\u00e9t")))
    escaped = project.tvmflow("plan", "tiny.yaml")
    del project.environment["PYTHONIOENCODING"]
    plain = project.call("run", "tiny.yaml")
    for ran, name in ((escaped, "n\\xe9t"), (plain, "n\u00e9t")):
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (
            "tvmflow: tiny.yaml:2:7: name: must start with a lowercase letter or digit "
            f"and contain only lowercase letters, digits and . _ -, not the string '{name}'\n"
        )


def test_a_model_with_another_digest_is_rejected(tmp_path: Path) -> None:
    """The position is that of sha256, and the message has the digest of the file."""
    project = Project(tmp_path)
    digest = hashlib.sha256((project.folder / "tiny.onnx").read_bytes()).hexdigest()
    project.edit_recipe("onnx: tiny.onnx", f"onnx: tiny.onnx\n  sha256: {'a' * 64}")
    ran = project.call("plan", "tiny.yaml")
    assert ran.code == 2
    assert ran.err.startswith("tvmflow: tiny.yaml:6:11: model.sha256: ")
    assert digest in ran.err
    project.edit_recipe("a" * 64, digest.upper())
    assert project.call("plan", "tiny.yaml").code == 0


# ---------------------------------------------------------------- every field


def sections(model: type[BaseModel], *path: str | int) -> Iterator[tuple[Loc, type[BaseModel]]]:
    """Every section of a kind of document, with a path that a document may have for it."""
    yield path, model
    for name, field in model.model_fields.items():
        inner, steps = strip_annotation(field.annotation), [*path, name]
        while args := get_args(inner):
            is_mapping = get_origin(inner) is dict
            steps.append("x" if is_mapping else 0)
            inner = strip_annotation(args[1 if is_mapping else 0])
        assert not isinstance(inner, ForwardRef), f"{name} of {model.__name__}"
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from sections(inner, *steps)


def document_with(loc: Loc, value: Json) -> Document:
    """A document that has nothing but one value at a path."""
    for step in reversed(loc):
        value = [value] if isinstance(step, int) else {str(step): value}
    return Document(Path("r.yaml"), value, {}, {}, {})


def fields(model: type[BaseModel]) -> list[Loc]:
    """The paths of all fields of a kind of document."""
    return [(*loc, name) for loc, section in sections(model) for name in section.model_fields]


KINDS = [(Recipe, PipelineFile), (PipelineFile, Recipe), (LockFile, None)]


@pytest.mark.parametrize(("kind", "other"), KINDS)
def test_each_field_is_suggested_for_a_misspelling(
    kind: type[BaseModel], other: type[BaseModel] | None
) -> None:
    """At each depth of each kind of document."""
    for *section, name in fields(kind):
        wrong_name = f"{name}{str(name)[-1]}"
        _, problems = validate(document_with((*section, wrong_name), 1), kind, other, "another")
        expected = f"{dotted((*section, wrong_name))}: unknown field; did you mean '{name}'?"
        assert expected in [problem.text for problem in problems]


@pytest.mark.parametrize("value", [None, True, 3, -0.5, "\xc4", [[{}]], {"\xc4": {"a": []}}])
@pytest.mark.parametrize(("kind", "other"), KINDS)
def test_each_field_refuses_values_of_other_types_in_our_words(
    kind: type[BaseModel], other: type[BaseModel] | None, value: Json
) -> None:
    """No value ends in a traceback or in a text of pydantic's."""
    for loc in fields(kind):
        _, problems = validate(document_with(loc, value), kind, other, "another")
        texts = "\n".join(problem.text for problem in problems)
        assert not re.search(r"[Ii]nput should|Value error|Field required|pydantic", texts)
