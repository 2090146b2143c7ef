"""`params`: the library without weights, and the weights in files of their own, so that either can be replaced.

The weights are those that the kernels take, folded and laid out when the library was built. They
are made from the model's own weights, and are not the same.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from tvmflow.compiler.form_names import PARAMS, WEIGHTS_FILE
from tvmflow.exporters import bundle
from tvmflow.exporters.base import BuiltModel, ExportRequest, loadable_cpu_reason
from tvmflow.runtime.bundles import VM
from tvmflow.runtime.weights import read_safetensors
from tvmflow.targets.linking import link_shared

FORM: Final = PARAMS
SOURCES: Final[tuple[Path, ...]] = ()

unsupported_reason = loadable_cpu_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return bundle and shared library without weights; the weights as safetensors and in TVM's format."""
    lean = f"{request.name}.lean"
    library = f"{lean}{request.platform.shared_suffix}"
    return (f"{lean}.tvmflow", library, f"{request.name}.safetensors", f"{request.name}.params")


def export(built: BuiltModel, folder: Path) -> None:
    """Write library and weights, each in two forms: for tvmflow, and for TVM without it."""
    import tvm

    lean, library, safetensors, params = (folder / name for name in files(built.request))
    compiled = built.forms[FORM]
    # `main` takes the weights in the order of their names
    weights = sorted(read_safetensors(compiled[WEIGHTS_FILE]).items())
    objects = [path for name, path in compiled.items() if name != WEIGHTS_FILE]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        linked = Path(scratch, library.name)
        link_shared(objects, linked, built.request.triple)
        specs = [
            {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
            for name, array in weights
        ]
        bundle.write(built.with_library(linked, objects, params=specs, runtime=VM), lean)
        shutil.move(linked, library)
    shutil.copyfile(compiled[WEIGHTS_FILE], safetensors)
    tensors = {name: tvm.runtime.tensor(array) for name, array in weights}
    params.write_bytes(bytes(tvm.runtime.save_param_dict(tensors)))
