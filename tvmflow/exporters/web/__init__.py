"""`web`: the model as an ES module for browsers, with types, a demo page, and npm metadata.

The model runs on WebGPU if the target has code for it, or else as WebAssembly.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tvmflow.core.files import hash_file
from tvmflow.core.formatting import size_text
from tvmflow.core.generated_text import (
    comment,
    html_text,
    javascript_key,
    javascript_value,
    markdown_code,
)
from tvmflow.core.types import Json, TensorSpec
from tvmflow.exporters import c_library
from tvmflow.exporters.exporter import (
    UNVERSIONED,
    BuiltModel,
    ExportRequest,
    cpu_only_reason,
    fill_template,
    link_or_copy,
    write_text,
)
from tvmflow.exporters.wheel import distribution_name
from tvmflow.runtime.images import read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.targets import c_runtime, form_names
from tvmflow.targets.backends.webgpu import WebgpuBackend
from tvmflow.targets.c_runtime import describe_tensors, states

NAME: Final = "web"
FORM: Final = c_library.FORM

_FOLDER: Final = Path(__file__).parent
_COPIED: Final = ("images.js", "page.css", "page.js", "runtime.js")
_WEBGPU: Final = "webgpu.js"
# Key in the JavaScript module -> name of the file that the WebGPU backend fetches.
_WEBGPU_FILES: Final[Mapping[str, str]] = {
    "program": form_names.WEBGPU_PROGRAM,
    "kernels": form_names.WEBGPU_KERNELS,
    "weights": form_names.WEBGPU_WEIGHTS,
}
_MODULE: Final = "model.js"
_TYPES: Final = "model.d.ts"
_STATE_TYPES: Final = "states.d.ts"
_PAGE: Final = "index.html"
_README: Final = "README.md"
_PACKAGE: Final = "package.json"
_LOADER: Final = "wasm.js"
SOURCES: Final = (
    *c_runtime.SOURCES,
    *(
        _FOLDER / name
        for name in (*_COPIED, _WEBGPU, _MODULE, _TYPES, _STATE_TYPES, _PAGE, _README)
    ),
)

# npm's limit for names.
_MAX_NAME: Final = 214
# dtype -> JavaScript's typed array; float16 and bfloat16 are stored as bits.
_ARRAYS: Final[Mapping[str, str]] = {
    **{f"{kind}{bits}": f"{kind.capitalize()}{bits}Array" for kind in ("int", "uint") for bits in (8, 16, 32)},
    **{"bool": "Uint8Array", "float16": "Uint16Array", "bfloat16": "Uint16Array"},
    **{"float32": "Float32Array", "float64": "Float64Array"},
    **{"int64": "BigInt64Array", "uint64": "BigUint64Array"},
}  # fmt: skip


def unsupported_reason(request: ExportRequest) -> str:
    """Return why a target cannot have a module for browsers, or an empty string."""
    reason = cpu_only_reason(request) or c_runtime.unsupported_reason(request.triple)
    name = distribution_name(request.name)
    if not reason and request.platform.system != "wasi":
        return f"browsers do not run code for {request.triple}: name the preset browser"
    if not reason and len(name) > _MAX_NAME:
        return f"npm takes no name of more than {_MAX_NAME} characters, such as {name}"
    return reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the files of the package, in a folder `<name>-web`."""
    name = request.name
    own = (f"{name}.js", f"{name}.d.ts", f"{name}.wasm")
    names = (*own, *_copied(request), _LOADER, _PAGE, _README, _PACKAGE)
    names = (*names, *_WEBGPU_FILES.values()) if request.has_webgpu else names
    return tuple(f"{name}-web/{file}" for file in names)


def _copied(request: ExportRequest) -> tuple[str, ...]:
    return (*_COPIED, _WEBGPU) if request.has_webgpu else _COPIED


def export(built: BuiltModel, folder: Path) -> None:
    """Write the package."""
    index = folder / f"{built.name}-web"
    index.mkdir(exist_ok=True)
    module = f"{built.name}.wasm"
    link_or_copy(built.library, index / module)
    fetched = {"wasm": FetchedFile.read(index / module)}
    program: Mapping[str, Json] = {}
    if built.request.has_webgpu:
        compiled = built.forms[form_names.BESIDE_WEBASSEMBLY]
        program = json.loads(compiled[form_names.WEBGPU_PROGRAM].read_text())
        for name, file in _WEBGPU_FILES.items():
            link_or_copy(compiled[file].resolve(), index / file)
            fetched[name] = FetchedFile.read(index / file)
    for name in _copied(built.request):
        shutil.copyfile(_FOLDER / name, index / name)
    texts = {
        _LOADER: c_runtime.write_loader(built.c_model, _LOADER),
        f"{built.name}.js": write_module(built, fetched),
        f"{built.name}.d.ts": write_types(built, fetched),
        _PAGE: write_page(built),
        _README: write_readme(built, fetched, program),
        _PACKAGE: write_package(built),
    }
    for name, text in texts.items():
        write_text(index / name, text)


class FetchedFile(NamedTuple):
    """A file that the module fetches."""

    name: str
    sha256: str
    bytes: int

    @classmethod
    def read(cls, path: Path) -> FetchedFile:
        """Return the name, digest and size of a file."""
        return cls(path.name, hash_file(str(path)), path.stat().st_size)


# Key in the JavaScript module -> the file.
_Fetched = Mapping[str, FetchedFile]


def _render(template: str, values: Mapping[str, str]) -> str:
    return fill_template((_FOLDER / template).read_text(encoding="utf-8"), values)


# ---------------------------------------------------------------- programs

# Backend -> (JavaScript import, description), in the order in which they are tried.
_BACKENDS: Final[Mapping[str, tuple[str, str]]] = {
    "webgpu": (
        '() => import("./webgpu.js")',
        "WebGPU, on the GPU: Chrome, Edge, Firefox and Safari since 2025 on most systems, on pages by HTTPS.",
    ),
    "wasm": (
        """\
async () => {
    const { load } = await import("./wasm.js");
    return { open: async (files, _, options) => load(await fetchFile(files.wasm, options)) };
  }""",
        "WebAssembly with SIMD, on one core of the CPU: every browser since 2023, and Node.",
    ),
}


def write_module(built: BuiltModel, fetched: _Fetched) -> str:
    """Return the JavaScript module that programs import."""
    entries = (
        f"  {name}: {{ url: new URL({javascript_value(f'./{file.name}')}, import.meta.url), "
        f"sha256: {javascript_value(file.sha256)}, bytes: {file.bytes} }},"
        for name, file in fetched.items()
    )
    values = {
        "DESCRIPTION": javascript_value(_describe_model(built)),
        "FILES": "\n".join(entries),
        "BACKENDS": "\n".join(f"  {name}: {_BACKENDS[name][0]}," for name in _backends(fetched)),
    }
    return _render(_MODULE, _describe(built) | values)


_OPTIONS: Final = """\
  /** The device of WebGPU, of a program that has one. */
  device?: object;
  powerPreference?: "low-power" | "high-performance";
"""


def write_types(built: BuiltModel, fetched: _Fetched) -> str:
    """Return the module's TypeScript declarations."""
    values = {
        "OPTIONS": _OPTIONS if WebgpuBackend.KIND in _backends(fetched) else "",
        "INPUTS": "\n".join(_list_types(built.signature["inputs"])),
        "OUTPUTS": "\n".join(_list_types(built.signature["outputs"])),
        "SIZES": "\n".join(f"  {javascript_value(entry.name)}: number;" for entry in built.c_model.dimensions),
        "BACKENDS": " | ".join(map(javascript_value, _backends(fetched))),
        "IMAGE_INPUTS": " | ".join(map(javascript_value, built.manifest.get("images", {}))) or "never",
        **_write_state_types(built),
    }  # fmt: skip
    return _render(_TYPES, _describe(built) | values)


def _write_state_types(built: BuiltModel) -> dict[str, str]:
    """Return the declarations that a model with states has; empty for others."""
    names = ("STATE_TYPES", "STATE_METHODS")
    if not built.signature.get("states"):
        return dict.fromkeys(names, "")
    places = states.list_step_indices(built.signature)
    inputs, outputs = built.signature["inputs"], built.signature["outputs"]
    values = {
        "STATE_NAMES": " | ".join(javascript_value(inputs[i]["name"]) for i in places["states"]),
        "STEP_INPUTS": "\n".join(_list_types(inputs[i] for i in places["step_inputs"])),
        "STEP_OUTPUTS": "\n".join(_list_types(outputs[i] for i in places["step_outputs"])),
    }
    parts = _render(_STATE_TYPES, values).split(c_runtime.SEPARATOR)
    return dict(zip(names, parts, strict=True))


def _list_types(tensors: Iterable[Mapping[str, Json]]) -> Iterator[str]:
    for tensor in tensors:
        yield f"  {javascript_value(tensor['name'])}: {_ARRAYS[tensor['dtype']]};"


def _backends(fetched: _Fetched) -> list[str]:
    return [name for name in _BACKENDS if name != WebgpuBackend.KIND or "program" in fetched]


def _describe(built: BuiltModel) -> dict[str, str]:
    lines = (f" * {comment(line)}" for line in describe_tensors(built.signature))
    return {"TITLE": comment(built.name), "NAME": built.name, "TENSORS": "\n".join(lines)}


def _describe_model(built: BuiltModel) -> dict[str, Json]:
    inputs = [TensorSpec.from_json(tensor) for tensor in built.signature["inputs"]]
    images = [
        {
            "input": name,
            # `crop` is omitted, because it equals the size of the input.
            **{field: value for field, value in entry.to_json().items() if field != "crop"},
            "size": list(entry.size),
            "table": base64.b64encode(entry.table().tobytes()).decode(),
        }
        for name, entry in read_preprocessing(built.manifest, inputs).items()
    ]
    labels = read_labels(built.manifest)
    tensors = {
        direction: [
            {field: tensor[field] for field in ("name", "dtype", "shape")}
            for tensor in built.signature[direction]
        ]
        for direction in ("inputs", "outputs")
    }
    return {
        "name": built.name,
        "version": built.request.version,
        **tensors,
        "images": images,
        **({"labels": labels.to_json()} if labels else {}),
    }


# ---------------------------------------------------------------- documents


def write_page(built: BuiltModel) -> str:
    """Return the demo page of the model."""
    version = built.request.version
    shown = "" if version == UNVERSIONED else f"Version {html_text(version)}"
    values = {"TITLE": html_text(built.name), "NAME": built.name, "VERSION": shown}
    return _render(_PAGE, values)


def write_package(built: BuiltModel) -> str:
    """Return the package.json of the package."""
    name, license_expression = built.name, built.manifest.get("license")
    fields = {
        "name": distribution_name(name),
        "version": npm_version(built.request.version),
        "description": f"The model {name}, compiled for browsers",
        **({"license": str(license_expression)} if license_expression else {}),
        "type": "module",
        "exports": {".": {"types": f"./{name}.d.ts", "default": f"./{name}.js"}},
        "types": f"./{name}.d.ts",
        "files": [file.partition("/")[2] for file in files(built.request)],
        "sideEffects": False,
    }
    return json.dumps(fields, indent=2) + "\n"


def npm_version(version: str) -> str:
    """Convert a Python version to npm's format; the order is kept, except for post-releases.

    >>> npm_version("1.2"), npm_version("1!2.3.4.5rc1.dev2"), npm_version("3.0.post1")
    ('1.2.0', '2.3.4-rc.1.dev.2+5', '3.0.0+post.1')
    """
    match = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = [str(int(number)) for number in match[1].split(".")] if match else ["0"]
    rest = re.findall(r"([a-z]+)[-_.]?(\d*)", version[match.end() :].lower()) if match else []
    before, after = list[str](), numbers[3:]
    for word, number in rest:
        words = after if word in ("post", "rev", "r") else before
        words.append(f"{word}.{int(number or 0)}")
    core = ".".join((*numbers, "0", "0")[:3])
    parts = (f"-{'.'.join(before)}" if before else "", f"+{'.'.join(after)}" if after else "")
    return core + "".join(parts)


_IMAGES: Final = """\
An image becomes an input with the sizes, colours and numbers of the recipe:

```js
const values = await model.image(image); // a File, a Blob, an <img>, a <canvas>, ImageData
```

"""
_STATES: Final = """\
The model keeps its states. `step` takes and gives the other inputs and outputs:

```js
model.setDimensions({ … }); // the sizes of this step, if the model has some
const outputs = await model.step({ … });
await model.reset(); // the next stream
```

`length`, `truncate`, `drop`, `dropped`, `fork`, `state`, `saveState` and `loadState` are about the states, and `sample` and `seed` choose the tokens of a language model.

"""
_CLASSES: Final = """\
The classes of an image:

```js
const [best] = await model.classify(image); // a File, a Blob, an <img>, a <canvas>, ImageData
console.log(best.label, best.probability);
```

"""


def write_readme(
    built: BuiltModel, fetched: _Fetched, program: Mapping[str, Json] = MappingProxyType({})
) -> str:
    """Return the README of the package; `program` is the WebGPU program."""
    tensors = (f"- {line}" for line in describe_tensors(built.signature, markdown_code))
    example = ", ".join(
        f"{javascript_key(spec.name)}: new {_ARRAYS[spec.dtype]}({math.prod(spec.shape)})"
        for spec in map(TensorSpec.from_json, built.signature["inputs"])
    )
    images = ""
    if "images" in built.manifest:
        is_alone = len(built.signature["inputs"]) == 1
        images = _CLASSES if "labels" in built.manifest and is_alone else _IMAGES
    backends = [f"- `{name}`: {_BACKENDS[name][1]}" for name in _backends(fetched)]
    needs = [
        *(f"the feature `{name}`" for name in program.get("features", ())),
        *(f"`{name}` of {value:,}" for name, value in program.get("limits", {}).items()),
    ]
    if needs:
        backends.append(f"\nWebGPU needs more than each GPU has: {', '.join(needs)}.")
    sizes = (
        f"- {markdown_code(file.name)}: {size_text(file.bytes)}, SHA-256 `{file.sha256}`"
        for file in fetched.values()
    )
    values = {
        "TITLE": built.name,
        "PACKAGE": distribution_name(built.name),
        "TENSORS": "\n".join(tensors),
        "EXAMPLE": example,
        "IMAGES": images,
        "STATES": _STATES if built.signature.get("states") else "",
        "BACKENDS": "\n".join(backends),
        "SIZES": "\n".join(sizes),
    }
    return _render(_README, values)
