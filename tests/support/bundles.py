"""Makes a small bundle the way the stages do, for tests of what comes after."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def make_bundle(path: Path, outputs: Sequence[str] = ("plus_one", "twice")) -> Path:
    """A bundle of a model `x -> (x + 1, 2 x)`, compiled in a process of its own."""
    subprocess.run([sys.executable, "-m", "tests.support.bundles", str(path), *outputs], check=True)
    return path


def _make(path: Path, outputs: Sequence[str]) -> None:
    import numpy as np
    import tvm
    import tvm_ffi
    from tvm import relax

    from tvmflow.exporters import bundle
    from tvmflow.exporters._base import BuiltModel, ExportRequest
    from tvmflow.targets.host import read_host
    from tvmflow.targets.linking import link_shared

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            one = builder.emit(relax.op.add(x, relax.const(np.float32(1))))
            two = builder.emit(relax.op.multiply(x, relax.const(np.float32(2))))
            both = builder.emit_output(relax.Tuple([one, two]))
        builder.emit_func_output(both)
    triple = f"{read_host().arch}-linux-gnu"
    target = {"kind": "llvm", "mtriple": triple}
    library = path.parent / "library.so"

    def link(output: str, files: list[str], **_: object) -> None:
        link_shared([Path(file) for file in files], Path(output), triple)

    tvm.compile(builder.get(), tvm.target.Target(target)).export_library(
        str(library), fcompile=link
    )
    entry = {"shape": [2, 3], "dtype": "float32"}
    signature = {
        "inputs": [{"name": "x", **entry}],
        "outputs": [{"name": name, **entry} for name in outputs],
    }
    manifest = {
        "name": "small",
        "target": {"name": "host", "tvm": target, "features": []},
        "verified_against": "none",
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
    }
    request = ExportRequest("small", "0", "host", "llvm", triple)
    built = BuiltModel(request, library, {}, signature, manifest, path, {}).with_library(
        library, ()
    )
    bundle.write(built, path)


if __name__ == "__main__":
    _make(Path(sys.argv[1]), sys.argv[2:])
