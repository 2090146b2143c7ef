"""Writes docs/recipe.md and docs/recipe.schema.json: `python -m tvmflow.recipe_docs`, in a checkout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tvmflow.mistakes import in_yaml
from tvmflow.recipe import PipelineFile, json_schema
from tvmflow.targets._presets import PRESETS

EXAMPLE: Final = """\
# yaml-language-server: $schema=../docs/recipe.schema.json
recipe: 1                            # the version of this language
name: digits                         # finished files go to dist/digits/<target>/
version: "1.2.0"                     # of what is delivered

model:
  mxnet: {prefix: models/digits, epoch: 10}   # models/digits-symbol.json and -0010.params
  # or:
  # onnx: models/digits.onnx         # a path from this file's folder, or a URL
  # sha256: 9f86d081884c7d65…        # of that file; a URL needs it

inputs:                              # an ONNX model with fixed shapes needs none of this
  data:
    shape: [1, 1, 8, 8]              # the batch is fixed too
    dtype: float32
    range: [0.0, 1.0]                # of random inputs, where verify has no data

variants:                            # with other inputs: digits-one and digits-eight
  one: {}                            # as above
  eight: {inputs: {data: {shape: [8, 1, 8, 8]}}}

targets:
  - host                             # this machine
  - x86-64-v3                        # a preset; `tvmflow targets` lists them
  - name: edge                       # or a machine of your own, as TVM describes it
    tvm: {kind: llvm, mtriple: x86_64-linux-gnu, mcpu: znver3}
    num_cores: 8

kernels:
  math: vector                         # exp and its like as vector code; libm: the C library's

tune:
  trials: 64                         # measurements per target; 0 builds at once
  seed: 0

outputs: [shared-library, bundle]

verify:
  against: reference                 # MXNet itself, or ONNX Runtime
  data: models/digits-test.npz       # an array for each input, and `label`
  rtol: 1e-3
  atol: 1e-4
  min_accuracy: 0.95                 # below that, nothing is delivered

pipeline: tune                       # all stages
"""

_INTRODUCTION: Final = """\
# Recipes

A recipe is a YAML file that says what you want: the model, its input shapes, the machines to build for, how much tuning, which files, which checks. It does not say how, and nothing in it depends on where it is run from: every path starts at the recipe's own folder.

Three fields are enough:

```yaml
recipe: 1
name: mobilenet
model: {onnx: mobilenet.onnx}
```

`tvmflow run mobilenet.yaml` then builds a bundle for this machine, without tuning, and compares it with ONNX Runtime on random inputs. Everything else has a default.

## A complete example

```yaml
"""

_AFTER_EXAMPLE: Final = """\
```

[recipes/](../recipes) has more of them, ready to run.

## Mistakes

`tvmflow plan RECIPE` checks a recipe without running anything. All mistakes are reported at once, each with file, line and column, and the command ends with exit code 2:

```console
$ tvmflow plan digits.yaml
tvmflow: digits.yaml:6:17: inputs.data.shape: must be a list, such as [1, 3, 224, 224], not the text '1x1x8x8'
digits.yaml:8:5: targets.0: 'hots' is not a target; did you mean 'host'? (`tvmflow targets` lists them)
digits.yaml:10:3: tune.trails: there is no such field; did you mean 'trials'?
```

Recipes use the plain part of YAML: fields, lists, text, numbers, `true`, `false`, comments, anchors and aliases. What YAML would quietly read as something else is a mistake here: `yes` and `no`, dates, numbers with a leading 0, the same field twice, tags, merge keys (`<<`). `1e-3` is a number. Text that looks like something else goes in quotes.

## In an editor

Editors that speak to the [YAML language server](https://github.com/redhat-developer/yaml-language-server) (VS Code with the YAML extension, Neovim, Emacs and others) complete and check recipes when the first line names the [schema](recipe.schema.json):

```yaml
# yaml-language-server: $schema=../docs/recipe.schema.json
```

Outside this repository, `tvmflow schema > recipe.schema.json` writes the schema of the version that you have installed; name that file instead. `tvmflow plan` finds more than a schema can: files that are missing, fields that contradict each other.

## Every field

"""

_PIPELINES: Final = """\
### Pipelines

Which stages run, in order. `tune` and `compile` are in [pipelines/](../pipelines); a recipe may name a file of its own (`pipeline: nightly.yaml`, from the recipe's folder), and `--pipeline` overrides it. A stage must come after those that it needs.

```yaml
pipeline: 1
name: nightly
description: Everything but the checks.
stages: [import, extract_tasks, tune, pick_best, build, export]
```

One that names its recipes can be run by itself, `tvmflow run pipelines/release.yaml`: [releases.md](releases.md).

"""

# Where each part of the language stands in a recipe, in the order of the page.
_SECTIONS: Final[Mapping[str, str]] = {
    "ModelSource": "model",
    "MxnetSource": "model.mxnet",
    "InputSpec": "inputs",
    "Variant": "variants",
    "TargetSpec": "targets",
    "ModelPart": "targets.parts",
    "Remote": "targets.remote",
    "Toolchain": "targets.toolchain",
    "Kernels": "kernels",
    "Tune": "tune",
    "Verify": "verify",
}
_PIPELINE_SECTIONS: Final[Mapping[str, str]] = {
    "Release": "release",
    "Gates": "release.gates",
    "Retune": "retune",
}
# What changes a part has that part's fields.
_CHANGES: Final[Mapping[str, str]] = {"TuneChange": "Tune", "VerifyChange": "Verify"}
_REMARKS: Final[Mapping[str, str]] = {
    "inputs": "A field for each input, by the name that the model gives it; below it:",
    "variants": "A field for each variant, by its name; below it:",
    "targets": "Each entry is one of these words, or fields ([targets.md](targets.md) has more):",
}
_PLAIN_TYPES: Final = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true` or `false`",
    "object": "fields",
}


def recipe_reference() -> str:
    """Every field of a recipe and of a pipeline file, as Markdown: type, default, meaning."""
    schema = json_schema()
    parts = ["### The top level\n\n", _table(schema)]
    for name, section in _SECTIONS.items():
        part = schema["$defs"][name]
        parts += [f"\n### `{section}`\n\n{part['description']}"]
        if section in _REMARKS:
            parts += [f" {_REMARKS[section]}"]
        parts += ["\n\n"]
        if section == "targets":
            parts += [_presets(), "\n"]
        parts += [_table(part)]
    pipelines = PipelineFile.model_json_schema()
    parts += ["\n", _PIPELINES, _table(pipelines)]
    for name, section in _PIPELINE_SECTIONS.items():
        part = pipelines["$defs"][name]
        parts += [f"\n### `{section}`\n\n{part['description']}\n\n", _table(part)]
    return "".join(parts)


def recipe_page() -> str:
    """The whole of docs/recipe.md."""
    return f"{_INTRODUCTION}{EXAMPLE}{_AFTER_EXAMPLE}{recipe_reference()}"


def schema_file() -> str:
    """The whole of docs/recipe.schema.json."""
    return json.dumps(json_schema(), indent=2) + "\n"


def main() -> None:
    """Write both files."""
    docs = Path(__file__).parent.parent / "docs"
    (docs / "recipe.md").write_text(recipe_page(), encoding="utf-8")
    (docs / "recipe.schema.json").write_text(schema_file(), encoding="utf-8")


def _presets() -> str:
    rows = [f"| `{name}` | {preset.description} |" for name, preset in PRESETS.items()]
    return "\n".join(["| word | machine |", "|---|---|", *rows, ""])


def _table(part: Mapping[str, Any]) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in part["properties"].items():
        default = "**required**" if name in part.get("required", ()) else _default(field)
        rows.append(f"| `{name}` | {_type(field)} | {default} | {field['description']} |")
    return "\n".join(rows) + "\n"


def _default(field: Mapping[str, Any]) -> str:
    if field["default"] in (None, {}, ""):
        return "none"
    if isinstance(field["default"], dict):
        return "as below"
    return f"`{in_yaml(field['default'])}`"


def _type(field: Mapping[str, Any]) -> str:
    """What a value must be, in words."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return " or ".join(_kind({**field, **kind}) for kind in kinds)


def _kind(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        section = {**_SECTIONS, **_PIPELINE_SECTIONS}[_CHANGES.get(name, name)]
        return f"[fields](#{section.replace('.', '')})"
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("enum") == sorted(PRESETS):
        return "a preset's name"
    if "enum" in field:
        words = [f"`{word}`" for word in field["enum"]]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    if "prefixItems" in field:
        return "two numbers"
    if field["type"] == "array":
        return f"list of: {_type(field['items'])}"
    inside = field.get("additionalProperties")
    if isinstance(inside, dict):
        return f"{_kind(inside)} by name"
    return f"{_PLAIN_TYPES[field['type']]}{_limits(field)}"


def _limits(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if "exclusiveMinimum" in field:
        return f" above {field['exclusiveMinimum']:g}, to {high:,g}"
    if low is None:
        return ""
    return f" from {low:,}" if high is None else f", {low:,} to {high:,}"


if __name__ == "__main__":
    main()
