"""The wheel `tvmflow-runtime`, and the modules that it and the wheels of models hold.

They load and run bundles.

It is for machines that need nothing else of tvmflow. In the wheel `digits_model`, the module
`tvmflow.runtime.loading` is `digits_model._tvmflow.runtime.loading`.

`python -m tvmflow.exporters.runtime_wheel FOLDER` writes it (`make runtime-wheel`).
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from tvmflow.core.version import VERSION
from tvmflow.exporters.archives import write_zip

_PACKAGE: Final = "tvmflow_runtime"
_INIT: Final = '''"""Loads and runs bundles of tvmflow: `load(path)` returns a `Module`, `run(feed)` runs it."""

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.runtime.loading import load
from tvmflow.runtime.module import Module

__all__ = ["BundleError", "EnvironmentProblem", "Module", "load"]
'''


def write_runtime_wheel(folder: Path) -> Path:
    """Write the wheel and return its path."""
    content = {
        f"{_PACKAGE}/__init__.py": rename_imports(_INIT, _PACKAGE).encode(),
        f"{_PACKAGE}/py.typed": b"",
    }
    for name, data in module_files(_PACKAGE, for_vm=True):
        content[f"{_PACKAGE}/{name}"] = data
    path = folder / f"{_PACKAGE}-{VERSION}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    write_wheel(path, content, _metadata(), tag="py3-none-any", is_pure=True)
    return path


def _metadata() -> str:
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
        # `load(trusted_keys=…)`
        "Provides-Extra: signatures",
        'Requires-Dist: cryptography >=43; extra == "signatures"',
        # bundles for TVM's virtual machine, such as those for GPUs
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


if __name__ == "__main__":
    sys.stdout.write(f"{write_runtime_wheel(Path(*sys.argv[1:2]))}\n")


# ---------------------------------------------------------------- modules in packages without tvmflow


COPIES: Final = "_tvmflow"
IMAGES_EXTRA: Final = ("Provides-Extra: images", 'Requires-Dist: pillow >=9.5; extra == "images"')
"""Pillow decodes images; arrays of pixels need none."""

PACKAGE: Final = Path(__file__).parent.parent
"""The folder of tvmflow's own package."""

# All modules that loading a bundle needs, below `tvmflow/`, whatever its runtime.
_COPIED: Final = (
    "core/__init__.py",
    "core/canonical_json.py",
    "core/control_groups.py",
    "core/dimensions.py",
    "core/disk_errors.py",
    "core/documents.py",
    "core/errors.py",
    "core/files.py",
    "core/formatting.py",
    "core/project.py",
    "core/signing.py",
    "core/types.py",
    "runtime/__init__.py",
    "runtime/arrays.py",
    "runtime/bundles.py",
    "runtime/c_loader.py",
    "runtime/image_files.py",
    "runtime/images.py",
    "runtime/labels.py",
    "runtime/loading.py",
    "runtime/module.py",
    "runtime/npz.py",
    "runtime/open_tensors.py",
    "runtime/programs.py",
    "runtime/resampling.py",
    "runtime/samples.py",
    "runtime/stored_arrays.py",
    "runtime/statements.py",
    "runtime/threads.py",
    "runtime/trust.py",
    "runtime/weights.py",
    "runtime/zips.py",
    "targets/__init__.py",
    "targets/features.py",
    "targets/host.py",
    "targets/platforms.py",
    "targets/threads.py",
    "targets/tvm_target.py",
)
# Those for TVM's virtual machine.
_COPIED_FOR_VM: Final = (
    "core/processes.py",
    "runtime/virtual_machine.py",
    "targets/backends/**/*.py",
)


def list_modules(*, for_vm: bool) -> tuple[Path, ...]:
    """Return the modules that a package needs; `for_vm` if it runs TVM's virtual machine."""
    patterns = (*_COPIED, *_COPIED_FOR_VM) if for_vm else _COPIED
    return tuple(sorted(path for pattern in patterns for path in PACKAGE.glob(pattern)))


def module_files(package: str, *, for_vm: bool) -> Iterator[tuple[str, bytes]]:
    """Yield name, below the package, and content of its modules.

    They import each other instead of tvmflow.
    """
    yield f"{COPIES}/__init__.py", b""
    for path in list_modules(for_vm=for_vm):
        name = path.relative_to(PACKAGE).as_posix()
        yield f"{COPIES}/{name}", rename_imports(path.read_text(), package).encode()


def rename_imports(text: str, package: str) -> str:
    """Return a module's text with imports from the copies in a package."""
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
    """Write a wheel: a zip of a package and of what pip needs, with the digest of every file.

    The path is `NAME-VERSION-TAG.whl`, with the tag of Python, ABI and platform; the files are those of the
    package, and others in its `.dist-info`. A pure wheel holds no machine code.
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
