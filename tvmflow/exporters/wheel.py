"""`wheel`: a Python package with the model and a copy of tvmflow's runtime, which loads it.

Running the model needs numpy, and TVM if its virtual machine executes the model, but not tvmflow. The wheel
`tvmflow-runtime` only loads and runs bundles: `python -m tvmflow.exporters.wheel FOLDER` writes it (`make
runtime-wheel`). Copied modules are renamed: `tvmflow.runtime.loading` is `digits_model._tvmflow.runtime.loading`.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from tvmflow.core.bill_of_materials import encode_bom, file_component, license_fields
from tvmflow.core.formatting import printable
from tvmflow.core.generated_text import identifier
from tvmflow.core.types import Json
from tvmflow.core.version import VERSION
from tvmflow.exporters import exporter
from tvmflow.exporters.archives import write_zip
from tvmflow.exporters.exporter import BuiltModel, ExportRequest, PartitionedModel
from tvmflow.runtime.bundles import VM, read_bundle, runtime_of
from tvmflow.targets.backends import backend_for
from tvmflow.targets.c_runtime import describe_tensors

# ---------------------------------------------------------------- modules in packages without tvmflow

COPIES: Final = "_tvmflow"
IMAGES_EXTRA: Final = ("Provides-Extra: images", 'Requires-Dist: pillow >=9.5; extra == "images"')
"""The extra for decoding image files; arrays of pixels do not need Pillow."""

PACKAGE: Final = Path(__file__).parent.parent
"""The folder of the package `tvmflow`."""

# The modules that every loaded bundle needs, by folder of `tvmflow/`.
_COPIED: Final[Mapping[str, str]] = {
    "core": "__init__ canonical_json dimensions disk_errors documents errors files formatting processes "
    "project signing types",
    "runtime": "__init__ arrays bundles c_loader image_files images labels loading module npz programs "
    "samples sessions statements weights",
    "targets": "__init__ features host platforms threads tvm_target",
}
# Additional modules for TVM's virtual machine.
_COPIED_FOR_VM: Final = ("runtime/virtual_machine.py", "targets/backends/**/*.py")


def list_modules(*, for_vm: bool) -> tuple[Path, ...]:
    """Return the modules to copy; `for_vm` adds those for TVM's virtual machine."""
    patterns = [
        f"{folder}/{name}.py" for folder, names in _COPIED.items() for name in names.split()
    ]
    patterns += _COPIED_FOR_VM if for_vm else ()
    return tuple(sorted(path for pattern in patterns for path in PACKAGE.glob(pattern)))


def module_files(package: str, *, for_vm: bool) -> Iterator[tuple[str, bytes]]:
    """Yield name in the package and content of each copied module."""
    yield f"{COPIES}/__init__.py", b""
    for path in list_modules(for_vm=for_vm):
        name = path.relative_to(PACKAGE).as_posix()
        yield f"{COPIES}/{name}", rename_imports(path.read_text(), package).encode()


def rename_imports(text: str, package: str) -> str:
    """Return a module's text with imports renamed to the copies in a package."""
    return text.replace("from tvmflow.", f"from {package}.{COPIES}.")


def write_wheel(
    path: Path,
    files: Mapping[str, bytes],
    metadata: str,
    *,
    tag: str,
    is_pure: bool,
    generator: str = VERSION,
) -> None:
    """Write the wheel `NAME-VERSION-TAG.whl` with files, metadata and the RECORD.

    `files` may also be in `.dist-info`. A pure wheel has no machine code.
    """
    info = f"{'-'.join(path.name.split('-')[:2])}.dist-info"
    content = dict(files)
    content[f"{info}/METADATA"] = metadata.encode()
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tvmflow {generator}\n"
        f"Root-Is-Purelib: {str(is_pure).lower()}\nTag: {tag}\n"
    ).encode()
    record = [f"{name},{_record_digest(data)},{len(data)}" for name, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    write_zip(path, content)


def _record_digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"


# ---------------------------------------------------------------- the runtime alone

_RUNTIME_PACKAGE: Final = "tvmflow_runtime"
_RUNTIME_INIT: Final = '''"""Loads and runs bundles of tvmflow: `load(path)` returns a `Module`, `run(feed)` runs it."""

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.runtime.loading import load
from tvmflow.runtime.module import Module

__all__ = ["BundleError", "EnvironmentProblem", "Module", "load"]
'''


def write_runtime_wheel(folder: Path) -> Path:
    """Write the wheel `tvmflow-runtime` and return its path."""
    content = {
        f"{_RUNTIME_PACKAGE}/__init__.py": rename_imports(_RUNTIME_INIT, _RUNTIME_PACKAGE).encode(),
        f"{_RUNTIME_PACKAGE}/py.typed": b"",
    }
    for name, data in module_files(_RUNTIME_PACKAGE, for_vm=True):
        content[f"{_RUNTIME_PACKAGE}/{name}"] = data
    path = folder / f"{_RUNTIME_PACKAGE}-{VERSION}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    write_wheel(path, content, _runtime_metadata(), tag="py3-none-any", is_pure=True)
    return path


def _runtime_metadata() -> str:
    tvm = ".".join(metadata.version("apache-tvm").split(".")[:2])
    fields = (
        "Metadata-Version: 2.4",
        "Name: tvmflow-runtime",
        f"Version: {VERSION}",
        "Summary: Loads and runs the libraries that tvmflow builds",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.10",
        "Requires-Dist: numpy >=1.26",
        *IMAGES_EXTRA,
        # For `load(trusted_keys=…)`.
        "Provides-Extra: signatures",
        'Requires-Dist: cryptography >=43; extra == "signatures"',
        # For bundles that TVM's virtual machine runs, such as GPU bundles.
        "Provides-Extra: vm",
        f'Requires-Dist: apache-tvm =={tvm}.*; extra == "vm"',
        "Description-Content-Type: text/markdown",
    )
    usage = (
        "    import tvmflow_runtime",
        "    module = tvmflow_runtime.load('net.tvmflow')",
        "    outputs = module.run({…})  # arrays by name",
    )
    return "\n".join([*fields, "", *usage, ""])


# ---------------------------------------------------------------- wheels of models

FORM: Final = ""

# The templates of the wheel's `__init__` and `__main__`.
_INIT: Final = "exporters/_wheel_package.py"
_MAIN: Final = "exporters/_wheel_main.py"

SOURCES: Final = (PACKAGE / _INIT, PACKAGE / _MAIN, *list_modules(for_vm=True))

# Makes tracebacks show the public names, not the modules of the copied runtime.
_PUBLIC_NAMES: Final = """
for _name in ("BundleError", "EnvironmentProblem", "Error", "Model"):
    _kind = globals()[_name]
    _kind.__module__, _kind.__name__, _kind.__qualname__ = __name__, _name, _name
"""

# (system, prefix of the C library's name) -> wheel tag. TVM's runtime needs glibc 2.27.
_TAGS: Final[Mapping[tuple[str, str], str]] = {
    ("linux", "gnu"): "manylinux_2_27_{arch}",
    ("linux", "musl"): "musllinux_1_2_{arch}",
    ("macos", ""): "macosx_11_0_{arch}",
    ("windows", ""): "win_{arch}",
}
# (system, architecture) -> its name in tags, if that differs from the Linux kernel's name.
_ARCHS: Final[Mapping[tuple[str, str], str]] = {
    ("linux", "armv7"): "armv7l",
    ("linux", "i386"): "i686",
    ("macos", "aarch64"): "arm64",
    ("windows", "aarch64"): "arm64",
    ("windows", "x86_64"): "amd64",
}


def module_name(name: str) -> str:
    """Return the name of the module that programs import.

    >>> module_name("res-net")
    'res_net_model'
    """
    return f"{identifier(name)}_model"


def distribution_name(name: str) -> str:
    """Return the name of the distribution that pip installs.

    >>> distribution_name("res-net")
    'res-net-model'
    """
    return "-".join(filter(None, module_name(name).split("_")))


def _platform_tag(request: ExportRequest) -> str:
    platform = request.platform
    arch = _ARCHS.get((platform.system, platform.arch), platform.arch)
    for (system, libc), tag in _TAGS.items():
        if platform.system == system and (platform.libc or "gnu").startswith(libc):
            return tag.format(arch=arch)
    return ""


def unsupported_reason(request: ExportRequest) -> str:
    """Return why a target cannot have a wheel (no tag for its platform), or an empty string."""
    no_tag = "" if _platform_tag(request) else f"there are no wheels for '{request.triple}'"
    return exporter.single_process_reason(request) or no_tag


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return `<name>_model-<version>-py3-none-<platform>.whl`, as pip requires."""
    return (f"{_stem(request)}-py3-none-{_platform_tag(request)}.whl",)


def _stem(request: ExportRequest) -> str:
    return f"{distribution_name(request.name).replace('-', '_')}-{request.version}"


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Write the wheel of a model."""
    request = built.request
    package, info = module_name(request.name), f"{_stem(request)}.dist-info"
    needs_tvm = _needs_tvm(built)
    content = {f"{package}/{name}": data for name, data in _package_files(package, needs_tvm)}
    content[f"{package}/model.tvmflow"] = built.bundle.read_bytes()
    content[f"{package}/py.typed"] = b""
    bom = make_wheel_bom(built, content, f"{package}/{COPIES}")
    content[f"{info}/sboms/{request.name}.cdx.json"] = bom
    write_wheel(
        folder / files(request)[0],
        content,
        _metadata(built, needs_tvm),
        tag=f"py3-none-{_platform_tag(request)}",
        is_pure=False,
        generator=built.manifest["tvmflow"],
    )


def _needs_tvm(built: BuiltModel | PartitionedModel) -> bool:
    bundle = read_bundle(built.bundle, with_libraries=False)
    return any(runtime_of(part.manifest) == VM for part in (bundle.parts or {"": bundle}).values())


def _package_files(package: str, needs_tvm: bool) -> Iterator[tuple[str, bytes]]:
    for name, source in (("__init__.py", _INIT), ("__main__.py", _MAIN)):
        text = (PACKAGE / source).read_text()
        text = text.replace("from tvmflow.exporters._wheel_package ", f"from {package} ")
        text = rename_imports(text, package) + (_PUBLIC_NAMES if source == _INIT else "")
        yield name, text.encode()
    yield from module_files(package, for_vm=needs_tvm)


def _metadata(built: BuiltModel | PartitionedModel, needs_tvm: bool) -> str:
    package = module_name(built.name)
    requirements = ["numpy >=1.26"]
    if needs_tvm:
        minor = ".".join(str(built.manifest["tvm"]).split(".")[:2])
        extra = backend_for({"kind": built.request.kind}).PYTHON_REQUIREMENTS
        requirements = [f"apache-tvm =={minor}.*", *requirements, *extra]
    license_expression = built.manifest.get("license")
    fields = [
        # The first metadata version with SPDX license expressions.
        "Metadata-Version: 2.4",
        f"Name: {distribution_name(built.name)}",
        f"Version: {built.request.version}",
        f"Summary: The model {built.name}, compiled for {built.request.target}",
        *([f"License-Expression: {license_expression}"] if license_expression else []),
        "Requires-Python: >=3.10",
        *(f"Requires-Dist: {requirement}" for requirement in requirements),
        *(IMAGES_EXTRA if "images" in built.manifest else ()),
        "Description-Content-Type: text/markdown",
    ]
    tensors = [f"    {printable(line)}" for line in describe_tensors(built.signature)]
    usage = [f"    import {package}", f"    outputs = {package}.run({{…}})  # arrays by name"]
    if "images" in built.manifest and "labels" in built.manifest:
        usage.append(f"    classes = {package}.load().classify(['image.jpg'])  # needs Pillow")
    return "\n".join([*fields, "", *usage, "", *tensors, ""])


# ---------------------------------------------------------------- bill of materials inside a wheel (PEP 770)

# Field of a manifest with a version -> distribution.
_TOOLS: Final = {"tvmflow": "tvmflow", "tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
_OWN_LICENSE: Final = "Apache-2.0"
_MODEL: Final = "model"
_RUNTIME: Final = "runtime"


def make_wheel_bom(
    built: BuiltModel | PartitionedModel, content: Mapping[str, bytes], runtime: str
) -> bytes:
    """Return the reproducible bill of materials of a wheel as canonical JSON.

    `runtime` is the folder of the copied runtime in the wheel.
    """
    manifest = built.manifest
    version = str(manifest["tvmflow"])
    purl = f"pkg:pypi/tvmflow@{version}"
    is_runtime = {name: name.startswith(f"{runtime}/") for name in content}
    model: dict[str, Json] = {
        "bom-ref": _MODEL,
        "type": "machine-learning-model",
        "name": built.name,
        "version": built.request.version,
        **license_fields(str(manifest.get("license", ""))),
        "components": _list_files({n: data for n, data in content.items() if not is_runtime[n]}),
        "properties": [
            {"name": "tvmflow:target", "value": built.request.target},
            *(
                {"name": f"tvmflow:{name}", "value": str(digest)}
                for name, digest in sorted(manifest.get("model", {}).items())
            ),
        ],
    }
    copied: dict[str, Json] = {
        "bom-ref": _RUNTIME,
        "type": "library",
        "name": "tvmflow",
        "version": version,
        "purl": purl,
        "description": "The modules of tvmflow that load a bundle, copied with other import paths",
        **license_fields(_OWN_LICENSE),
        "pedigree": {"notes": "imports are rewritten"},
        "components": _list_files({n: data for n, data in content.items() if is_runtime[n]}),
    }
    tools = [
        {"type": "application", "name": name, "version": str(manifest[field])}
        for field, name in _TOOLS.items()
    ]
    return encode_bom(
        {
            "metadata": {"component": model, "tools": {"components": tools}},
            "components": [copied],
            "dependencies": [{"ref": _MODEL, "dependsOn": [_RUNTIME]}],
        }
    )


def _list_files(content: Mapping[str, bytes]) -> list[Json]:
    return [file_component(n, hashlib.sha256(data).hexdigest()) for n, data in content.items()]


if __name__ == "__main__":
    sys.stdout.write(f"{write_runtime_wheel(Path(*sys.argv[1:2]))}\n")
