"""The wheel `tvmflow-runtime`: what loads and runs bundles.

It is for machines that need nothing else of tvmflow.

`python -m tvmflow.exporters.runtime_wheel FOLDER` writes it (`make runtime-wheel`).
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from tvmflow.core.version import VERSION
from tvmflow.exporters._copied_modules import (
    IMAGES_EXTRA,
    module_files,
    rename_imports,
    write_wheel,
)

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
