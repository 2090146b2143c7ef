"""Generates docs/recipe.md and the JSON Schemas in docs/ from the models of recipes and pipelines: `make docs-reference`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.schema import SCHEMA_DIALECT
from tvmflow.core.types import Json
from tvmflow.core.version import schema_url
from tvmflow.planning.recipes import pipeline_schema
from tvmflow.recipe import json_schema
from tvmflow.recipe.targets import OUTPUT_NAMES
from tvmflow.recipe.yaml_files import inline_yaml
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.presets import NAMES, PRESETS
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple

_PAGES: Final = Path(__file__).resolve().parent.parent / "docs"
EXAMPLE: Final = """\
# yaml-language-server: $schema=../docs/recipe.schema.json
recipe: 1                            # version of the format
name: digits                         # delivers to dist/digits/<target>/
version: "1.2.0"                     # of the delivered files
license: Apache-2.0                  # of the model, as an SPDX expression

model:
  mxnet: {prefix: models/digits, epoch: 10}   # models/digits-symbol.json and -0010.params
  # onnx: models/digits.onnx         # or a file, or a URL
  # sha256: 9f86d081884c7d65…        # required for a URL

inputs:
  data:
    shape: [1, 1, 8, 8]              # with the batch axis
    dtype: float32
    range: [0.0, 1.0]                # of random inputs
    image: {resize: [8, 8], colour: GRAY, scale: 1/255}   # preprocessing
    # value: 16000                   # a constant instead of an input
# state: {state: next_state}         # tensors that the library holds from call to call
# dimensions:                        # dynamic dimensions, for use in shapes
#   batch: {min: 1, max: 8}
labels: models/digits-labels.txt     # class names, one per line

variants:                            # builds digits-one, digits-eight, digits-half
  one: {}
  eight: {inputs: {data: {shape: [8, 1, 8, 8]}}}
  half: {kernels: {precision: mixed}}

targets:
  - host                             # this machine
  - x86-64-v3                        # a preset
  - name: edge                       # a TVM target
    tvm: {kind: llvm, mtriple: x86_64-linux-gnu, mcpu: znver3}
    threads: 8

kernels:
  math: vector                       # vectorized exp, tanh, …

tune:
  trials: 64                         # per target; 0: no search
  seed: 0

outputs: [c-library, bundle]
runtime: auto                        # c, vm or auto
checks: true                         # check indices and divisors at run time

verify:
  against: reference                 # MXNet, PyTorch, LiteRT or ONNX Runtime
  data: models/digits-test.npz       # an array per input, and `label`
  rtol: 1e-3
  atol: 1e-4
  min_accuracy: 0.95

pipeline: tune
stage_memory: 8GiB
"""

_INTRODUCTION: Final = """\
# Recipe reference: fields, defaults and limits

A recipe is a YAML file that describes a build: model, inputs, targets, tuning, outputs and checks. This page lists every field of recipes and pipelines. Paths are relative to the recipe's folder.

Three fields are enough:

```yaml
recipe: 1
name: mobilenet
model: {onnx: mobilenet.onnx}
```

`tvmflow run mobilenet.yaml` then builds a bundle for this machine without tuning, and compares it with ONNX Runtime on random inputs.

## A complete example

```yaml
"""

_AFTER_EXAMPLE: Final = """\
```

[recipes/](../recipes) has more recipes. [Editors](editors.md) complete and check fields with the JSON Schema.

## Mistakes

`tvmflow plan RECIPE` validates a recipe and compares it with the inputs of the model. It runs nothing. It reports all mistakes together, each with file, line and column, and ends with exit code 2:

<!-- not run: a test of this page compares the messages (tests/unit/recipe/test_recipe_docs.py) -->
```console
$ tvmflow plan digits.yaml
tvmflow: digits.yaml:6:17: inputs.data.shape: must be a list, such as [1, 3, 224, 224], not the string '1x1x8x8'
digits.yaml:8:5: targets.0: 'hots' is not a target; did you mean 'host'? (`tvmflow targets` lists them)
digits.yaml:10:3: tune.trails: unknown field; did you mean 'trials'?
```

Recipes use a subset of YAML: mappings, lists, strings, numbers, `true`, `false`, comments, anchors and aliases. Not allowed are `yes` and `no`, dates, numbers with a leading 0, duplicate fields, tags and merge keys (`<<`). `1e-3` is a number. A string that looks like another type needs quotes.

## Limits for untrusted models

A model has at most 100,000 nodes, 100,000 weights, and 10,000 inputs and outputs. A tensor, even a constant that a node creates, has at most 2^31 elements. Messages escape control characters in names and shorten long names; `--json` has the full names. See [SECURITY.md](../SECURITY.md).

## All fields

"""

_PIPELINES: Final = """\
### Pipelines

A pipeline file lists the stages to run, or recipes to run together ([releases.md](releases.md)). [pipelines/](../pipelines) has `tune` (all stages) and `compile` (no search). A recipe may name its own file, such as `pipeline: nightly.yaml`; `--pipeline` overrides it.

```yaml
pipeline: 1
name: nightly
description: All stages except the checks.
stages: [import, extract_tasks, tune, pick_best, build, export]
```

"""

_REMARKS: Final[Mapping[str, str]] = {
    "dimensions": "Each entry has the name of a dimension, and these fields:",
    "inputs": "Each entry has the name of an input, and these fields:",
    "state": "Each entry has the name of an input, and these fields:",
    "variants": "Each entry has the name of a variant, and these fields:",
    "targets": "See [targets.md](targets.md). Presets:",
    "targets.parts": "A part has the fields of a target, except `levels`, `outputs`, `verify` and `parts`, and this field:",
}
_PLAIN_TYPES: Final = {
    "string": "string",
    "integer": "integer",
    "number": "number",
    "boolean": "`true` or `false`",
    "object": "mapping",
}


def recipe_reference() -> str:
    """Return all fields of a recipe and of a pipeline as Markdown tables."""
    schema = json_schema()
    sections = _sections(schema)
    parts = ["### The top level\n\n", _table(schema, sections)]
    for name, section in sections.items():
        part = schema["$defs"][name]
        parts += [f"\n### `{section}`\n\n{part['description']}"]
        if section in _REMARKS:
            parts += [f" {_REMARKS[section]}"]
        parts += ["\n\n"]
        if section == "targets":
            parts += [_presets(), "\n"]
        owner = schema["$defs"][_TARGET] if name == _PART else None
        parts += [_table(part, sections, owner)]
    pipelines = pipeline_schema()
    all_sections = {**_sections(pipelines), **sections}
    parts += ["\n", _PIPELINES, _table(pipelines, all_sections)]
    for name, section in all_sections.items():
        if name in sections or name.endswith(_OVERRIDES):
            continue
        part = pipelines["$defs"][name]
        parts += [f"\n### `{section}`\n\n{part['description']}\n\n", _table(part, all_sections)]
    return "".join(parts)


def recipe_page() -> str:
    """Return the content of docs/recipe.md."""
    return f"{_INTRODUCTION}{EXAMPLE}{_AFTER_EXAMPLE}{recipe_reference()}"


def editor_schema() -> dict[str, Json]:
    """Return the schema of a file that may be a recipe or a pipeline: `*.tvmflow.yaml`."""
    is_pipeline = {"properties": {"pipeline": {"const": 1}}, "required": ["pipeline"]}
    return {
        "$schema": SCHEMA_DIALECT,
        "$id": schema_url("tvmflow"),
        "title": "tvmflow",
        "description": "A recipe or a pipeline of tvmflow.",
        "type": "object",
        "if": is_pipeline,
        "then": {"$ref": "pipeline.schema.json"},
        "else": {"$ref": "recipe.schema.json"},
    }


def catalog() -> dict[str, Json]:
    """Return a catalog in the format of SchemaStore, from which editors learn the schemas' purpose."""
    entry = {
        "name": "tvmflow",
        "description": "Recipes and pipelines of tvmflow",
        "fileMatch": ["*.tvmflow.yaml", "*.tvmflow.yml"],
        "url": schema_url("tvmflow"),
    }
    return {
        "$schema": "https://json.schemastore.org/schema-catalog.json",
        "version": 1,
        "schemas": [entry],
    }


_GENERATED_JSON: Final[Mapping[str, Callable[[], Mapping[str, Json]]]] = {
    "recipe.schema.json": json_schema,
    "pipeline.schema.json": pipeline_schema,
    "tvmflow.schema.json": editor_schema,
    "schema-catalog.json": catalog,
}


def generated_files() -> dict[str, str]:
    """Return the content of each generated file in docs/, by its name."""
    documents = {
        name: json.dumps(make(), indent=2) + "\n" for name, make in _GENERATED_JSON.items()
    }
    return {"recipe.md": recipe_page(), **documents}


def main() -> None:
    """Write all files."""
    for name, text in generated_files().items():
        (_PAGES / name).write_text(text, encoding="utf-8")


_GPUS: Final = {"cuda": "CUDA", "opencl": "OpenCL"}
_SYSTEMS: Final = {
    "android": "Android",
    "ios": "iOS",
    "linux": "Linux",
    "macos": "macOS",
    "none": "bare metal",
    "wasi": "WebAssembly",
    "windows": "Windows",
}
_LISTED_ELSEWHERE: Final = (
    (NAMES, "preset"),
    (OUTPUT_NAMES, "[output](exports.md)"),
)
"""Long lists of names, each with what one of the names is called in a table."""
_TARGET, _PART = "TargetSpec", "ModelPart"
# What overrides a section has the fields of that section, which has a table already.
_OVERRIDES: Final = "Overrides"


def _sections(schema: Mapping[str, Json]) -> dict[str, str]:
    """Return the path of each nested model in the file, the shortest one, in the order of the fields."""
    paths: dict[str, str] = {}
    for name, path in _nested_models(schema, schema, ""):
        if not name.endswith(_OVERRIDES) and path.count(".") <= paths.get(name, path).count("."):
            # A shorter path also takes the later place.
            paths.pop(name, None)
            paths[name] = path
    return paths


def _nested_models(
    schema: Mapping[str, Json], part: Mapping[str, Json], path: str
) -> Iterator[tuple[str, str]]:
    for field, value in part["properties"].items():
        for name in _references(value):
            inner = f"{path}.{field}" if path else field
            yield name, inner
            yield from _nested_models(schema, schema["$defs"][name], inner)


def _references(value: Json) -> Iterator[str]:
    """Give the names of the models that a field's schema refers to."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for name, inner in value.items():
            if name not in ("default", "examples"):
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _presets() -> str:
    """Return a table of the presets, with a row for each platform."""
    platforms: dict[str, list[str]] = {}
    for name, preset in PRESETS.items():
        presets = platforms.setdefault(_platform(preset.tvm or {}), [])
        presets.append(f"`{name}`: {preset.description}")
    rows = [f"| {platform} | {'<br>'.join(texts)} |" for platform, texts in platforms.items()]
    return "\n".join(["| platform | presets |", "|---|---|", *rows, ""])


def _platform(tvm: TvmTarget) -> str:
    """Return the platform of a preset: its system, of Linux with the architecture, and its kind of GPU."""
    platform = parse_triple(cpu_triple(tvm))
    system = _SYSTEMS.get(platform.system, "any")
    name = f"{system} {platform.arch}" if platform.system == "linux" else system
    gpu = _GPUS.get(tvm.get("kind", ""))
    return f"{name}, {gpu}" if gpu else name


def _table(
    part: Mapping[str, Json], sections: Mapping[str, str], owner: Mapping[str, Json] | None = None
) -> str:
    """Return the fields of a section as a table, without those that the section shares with its owner."""
    rows = ["| field | type (default) | meaning |", "|---|---|---|"]
    for name, field in part["properties"].items():
        if owner is not None and name in owner["properties"]:
            continue
        default = ", **required**" if name in part.get("required", ()) else _default(field)
        rows.append(f"| `{name}` | {_type(field, sections)}{default} | {field['description']} |")
    return "\n".join(rows) + "\n"


def _default(field: Mapping[str, Json]) -> str:
    if field["default"] in (None, "", []) or isinstance(field["default"], dict):
        return ""
    return f" (`{inline_yaml(field['default'])}`)"


def _type(field: Mapping[str, Json], sections: Mapping[str, str]) -> str:
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    names = [_kind({**field, **kind}, sections) for kind in kinds]
    return (", or " if any(", " in name for name in names) else " or ").join(names)


def _kind(field: Mapping[str, Json], sections: Mapping[str, str]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2].removesuffix(_OVERRIDES)
        return f"[mapping](#{sections[name].replace('.', '')})"
    if "const" in field:
        return f"`{field['const']}`"
    for names, kind in _LISTED_ELSEWHERE:
        if field.get("enum") == list(names):
            return kind
    if "enum" in field:
        values = [f"`{value}`" for value in field["enum"]]
        return f"{', '.join(values[:-1])} or {values[-1]}"
    if "prefixItems" in field:
        return "two numbers"
    if field["type"] == "array":
        return f"list of: {_type(field['items'], sections)}" if "items" in field else "nested lists"
    inside = field.get("additionalProperties")
    if isinstance(inside, dict):
        entry = _type(inside, sections)
        return f"{entry} by name"
    return f"{_PLAIN_TYPES[field['type']]}{_limits(field)}"


def _limits(field: Mapping[str, Json]) -> str:
    """Return the range of a number, such as `, 0–100` or ` above 0, at most 1`."""
    low, high = field.get("minimum"), field.get("maximum")
    if "exclusiveMinimum" in field:
        above = f" above {_number(field['exclusiveMinimum'])}"
        return above if high is None else f"{above}, at most {_number(high)}"
    if low is None:
        return ""
    if "exclusiveMaximum" in field:
        return f", at least {_number(low)}, below {_number(field['exclusiveMaximum'])}"
    return f", at least {_number(low)}" if high is None else f", {_number(low)}–{_number(high)}"


def _number(value: float) -> str:
    return f"{value:,}".removesuffix(".0")


if __name__ == "__main__":
    main()
