"""`params`: the library without weights, and the weights apart, so that either can be exchanged.

The weights are those that the kernels take, folded and laid out when they were built: not the
model's own, though made from them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from tvmflow.exporters import bundle
from tvmflow.exporters._base import Asked, Built, cpu_only
from tvmflow.targets.linking import link_shared

FORM: Final = "params"
SOURCES: Final[tuple[Path, ...]] = ()

WEIGHTS: Final = "weights.safetensors"
"""What `build` calls the weights."""

why_not = cpu_only


def files(asked: Asked) -> tuple[str, ...]:
    """Bundle and shared library without weights; the weights as safetensors and as TVM's own format."""
    lean = f"{asked.name}.lean"
    library = f"{lean}{asked.platform.shared_suffix}"
    return (f"{lean}.tvmflow", library, f"{asked.name}.safetensors", f"{asked.name}.params")


def export(built: Built, folder: Path) -> None:
    """Both halves, each in two forms: for tvmflow, and for TVM without it."""
    lean, library, safetensors, params = (folder / name for name in files(built.asked))
    made = built.forms[FORM]
    objects = [path for name, path in made.items() if name != WEIGHTS]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        linked = Path(scratch, library.name)
        link_shared(objects, linked, built.asked.triple)
        bundle.write(built.of(linked, objects, params=_specs(made[WEIGHTS])), lean)
        shutil.move(linked, library)
    shutil.copyfile(made[WEIGHTS], safetensors)
    _write_params(made[WEIGHTS], params)


def _specs(path: Path) -> list[dict[str, Any]]:
    """Name, shape and dtype of each weight, in the order in which `main` takes them: that of their names."""
    from tvmflow.weights import read_safetensors

    arrays = read_safetensors(path)
    return [
        {"name": name, "shape": list(arrays[name].shape), "dtype": str(arrays[name].dtype)}
        for name in sorted(arrays)
    ]


def _write_params(weights: Path, output: Path) -> None:
    import tvm

    from tvmflow.weights import read_safetensors

    arrays = read_safetensors(weights)
    tensors = {name: tvm.runtime.tensor(arrays[name]) for name in sorted(arrays)}
    output.write_bytes(bytes(tvm.runtime.save_param_dict(tensors)))
