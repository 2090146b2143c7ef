"""Generates docs/recipe.md and the JSON Schemas in docs/ from the models of recipes and pipelines: `make docs-reference`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tools.message_index import messages_page
from tvmflow.core.schema import SCHEMA_DIALECT
from tvmflow.core.types import Json
from tvmflow.core.version import schema_url
from tvmflow.planning.recipes import PipelineFile, pipeline_schema
from tvmflow.recipe import json_schema
from tvmflow.recipe.yaml_files import inline_yaml
from tvmflow.targets.presets import PRESETS

_PAGES: Final = Path(__file__).resolve().parent.parent / "docs"
EXAMPLE: Final = """\
# yaml-language-server: $schema=../docs/recipe.schema.json
recipe: 1                            # version of the format
name: digits                         # files are delivered to dist/digits/<target>/
version: "1.2.0"                     # version of the delivered files
license: Apache-2.0                  # of the model, as an SPDX expression

model:
  mxnet: {prefix: models/digits, epoch: 10}   # models/digits-symbol.json and -0010.params
  # or:
  # onnx: models/digits.onnx         # a path from the recipe's folder, or a URL
  # sha256: 9f86d081884c7d65…        # digest of that file; required for a URL

inputs:                              # what the model leaves open: see inputs.md
  data:
    shape: [1, 1, 8, 8]              # the batch size is fixed too
    dtype: float32
    range: [0.0, 1.0]                # of random inputs, when verify has no data
    image: {resize: [8, 8], colour: GRAY, scale: 1/255}   # how an image becomes this input
    # value: 16000                   # or a constant, which removes the input from the library
# dimensions:                        # sizes that each call chooses: names in the shapes of an ONNX model's inputs
#   batch: {min: 1, max: 8}
labels: models/digits-labels.txt     # names of the classes, one per line

variants:                            # other shapes or precisions: digits-one, digits-eight, digits-half
  one: {}                            # as above
  eight: {inputs: {data: {shape: [8, 1, 8, 8]}}}
  half: {kernels: {precision: mixed}}

targets:
  - host                             # this machine
  - x86-64-v3                        # a preset; `tvmflow targets` lists them
  - name: edge                       # or any target, as TVM describes it
    tvm: {kind: llvm, mtriple: x86_64-linux-gnu, mcpu: znver3}
    threads: 8

kernels:
  math: vector                       # vectorized exp, tanh, …; libm: call the C library

tune:
  trials: 64                         # measurements per target; 0: no tuning
  seed: 0

outputs: [c-library, bundle]
runtime: auto                        # or c (needs nothing), or vm (TVM's virtual machine)
checks: true                         # or off: inputs never hold an index out of range, nor a divisor of 0

verify:
  against: reference                 # MXNet, PyTorch, LiteRT or ONNX Runtime
  data: models/digits-test.npz       # an array for each input, and `label`
  rtol: 1e-3
  atol: 1e-4
  min_accuracy: 0.95                 # nothing is delivered below this

pipeline: tune                       # all stages
stage_memory: 8GiB                   # a stage that takes more is stopped
"""

_INTRODUCTION: Final = """\
# Recipes

A recipe is a YAML file that describes what to build: the model, its input shapes, the targets, the tuning budget, the outputs and the checks. All paths in it start at the folder of the recipe, wherever you run it.

Three fields are enough:

```yaml
recipe: 1
name: mobilenet
model: {onnx: mobilenet.onnx}
```

`tvmflow run mobilenet.yaml` then builds a bundle for this machine, without tuning, and compares it with ONNX Runtime on random inputs. All other fields have defaults.

## A complete example

```yaml
"""

_AFTER_EXAMPLE: Final = """\
```

More recipes, ready to run, are in [recipes/](../recipes).

## Mistakes

`tvmflow plan RECIPE` validates a recipe without running anything. It reports all mistakes together, each with file, line and column, and ends with exit code 2:

<!-- not run: a test of this page compares the messages (tests/unit/recipe/test_recipe_docs.py) -->
```console
$ tvmflow plan digits.yaml
tvmflow: digits.yaml:6:17: inputs.data.shape: must be a list, such as [1, 3, 224, 224], not the string '1x1x8x8'
digits.yaml:8:5: targets.0: 'hots' is not a target; did you mean 'host'? (`tvmflow targets` lists them)
digits.yaml:10:3: tune.trails: unknown field; did you mean 'trials'?
```

Recipes use a subset of YAML: mappings, lists, strings, numbers, `true`, `false`, comments, anchors and aliases. Values that YAML would read as something unexpected are rejected: `yes` and `no`, dates, numbers with a leading 0, duplicate fields, tags and merge keys (`<<`). `1e-3` is a number. Strings that look like another type need quotes.

Planning also reads the header of the model and compares it with `inputs`: [inputs.md](inputs.md) describes it.

## Models from elsewhere

A model is data from somebody else, and tvmflow treats it as such:

- External data of an ONNX model is read only from the folder of the model, after all symbolic links are followed.
- The graph, the opset and the data of all weights are checked before any pass sees them. A model may have at most 100,000 nodes, 100,000 weights, 10,000 inputs and outputs, and 2^31 elements in a tensor; if a few numbers in the file would make a larger constant, it is refused before it is made.
- Names are shown with control characters escaped, and shortened if they are long; `--json` has them as they are.
- A model that the framework itself refuses is never reported as agreeing with it. If ONNX Runtime refuses a model that ONNX's reference evaluator can run, the evaluator is the reference, under its own name, and the report also shows the refusal.

## In an editor

Editors complete, explain and check recipes and pipelines with their JSON Schemas: see [editors.md](editors.md). `tvmflow plan` also finds mistakes that a schema cannot describe: missing files, and fields that contradict each other.

## All fields

"""

_PIPELINES: Final = """\
### Pipelines

A pipeline lists the stages to run, in order; without `stages`, it runs all of them, like the pipeline `tune`. `tune` and `compile` (without search) are in [pipelines/](../pipelines); a recipe may name its own file (`pipeline: nightly.yaml`, from the recipe's folder), and `--pipeline` overrides it. A stage must come after the stages that it needs.

```yaml
pipeline: 1
name: nightly
description: All stages except the checks.
stages: [import, extract_tasks, tune, pick_best, build, export]
```

You can run a pipeline that lists recipes by itself, `tvmflow run pipelines/release.yaml`: see [releases.md](releases.md).

"""

_REMARKS: Final[Mapping[str, str]] = {
    "dimensions": "One field for each dimension, with its name; each has these fields:",
    "inputs": "One field for each input, with the name of the input; each has these fields:",
    "variants": "One field for each variant, with its name; each has these fields:",
    "targets": "[targets.md](targets.md) has more about targets. Presets:",
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
        parts += [_table(part, sections)]
    pipelines = PipelineFile.model_json_schema()
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
    """Return a catalog in the format of SchemaStore, which tells editors what the schemas are for."""
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
    for name, text in {**generated_files(), "messages.md": messages_page()}.items():
        (_PAGES / name).write_text(text, encoding="utf-8")


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
    rows = [f"| `{name}` | {preset.description} |" for name, preset in PRESETS.items()]
    return "\n".join(["| preset | machine |", "|---|---|", *rows, ""])


def _table(part: Mapping[str, Json], sections: Mapping[str, str]) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in part["properties"].items():
        default = "**required**" if name in part.get("required", ()) else _default(field)
        rows.append(f"| `{name}` | {_type(field, sections)} | {default} | {field['description']} |")
    return "\n".join(rows) + "\n"


def _default(field: Mapping[str, Json]) -> str:
    if field["default"] in (None, {}, ""):
        return "none"
    if isinstance(field["default"], dict):
        return "see below"
    return f"`{inline_yaml(field['default'])}`"


def _type(field: Mapping[str, Json], sections: Mapping[str, str]) -> str:
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return " or ".join(_kind({**field, **kind}, sections) for kind in kinds)


def _kind(field: Mapping[str, Json], sections: Mapping[str, str]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2].removesuffix(_OVERRIDES)
        return f"[mapping](#{sections[name].replace('.', '')})"
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("enum") == sorted(PRESETS):
        return "name of a preset"
    if "enum" in field:
        values = [f"`{value}`" for value in field["enum"]]
        return f"{', '.join(values[:-1])} or {values[-1]}"
    if "prefixItems" in field:
        return "two numbers"
    if field["type"] == "array":
        return f"list of: {_type(field['items'], sections)}" if "items" in field else "nested lists"
    inside = field.get("additionalProperties")
    if isinstance(inside, dict):
        return f"{_kind(inside, sections)} by name"
    return f"{_PLAIN_TYPES[field['type']]}{_limits(field)}"


def _limits(field: Mapping[str, Json]) -> str:
    low, high = field.get("minimum"), field.get("maximum", 0)
    if "exclusiveMinimum" in field:
        return f" above {_number(field['exclusiveMinimum'])}, at most {_number(high)}"
    if low is None:
        return ""
    return (
        f", at least {_number(low)}"
        if "maximum" not in field
        else f", {_number(low)} to {_number(high)}"
    )


def _number(value: float) -> str:
    return f"{value:,}".removesuffix(".0")


if __name__ == "__main__":
    main()
