"""Makes a small bundle the way the stages do, for tests of what comes after."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.compiler.lowering import ScheduledModel

if TYPE_CHECKING:
    from tvmflow.exporters.exporter import BuiltModel


OUTPUTS: Final = ("plus_one", "twice")


def make_bundle(path: Path, outputs: Sequence[str] = OUTPUTS, runtime: str = "c") -> Path:
    """A bundle of a model `x -> (x + 1, 2 x)`, compiled in a process of its own."""
    command = [sys.executable, "-m", "tests.support.bundles", str(path), runtime, *outputs]
    subprocess.run(command, check=True)
    return path


def _make(path: Path, runtime: str, outputs: Sequence[str]) -> None:
    import tvm
    import tvm_ffi

    from tvmflow.exporters import bundle
    from tvmflow.exporters.exporter import BuiltModel, ExportRequest
    from tvmflow.targets.host import read_host

    triple = f"{read_host().arch}-linux-gnu"
    target = {"kind": "llvm", "mtriple": triple}
    library = path.parent / "library.so"
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
    built = BuiltModel(request, library, {}, signature, manifest, path, {})
    link = _link_for_vm if runtime == "vm" else _link_c_library
    link(_make_model(), built)
    fields = {"runtime": "vm"} if runtime == "vm" else {"runtime": "c", "prefix": "small"}
    bundle.write(built.with_library(library, (), **fields), path)


def _make_model() -> Any:
    import numpy as np
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            one = builder.emit(relax.op.add(x, relax.const(np.float32(1))))
            two = builder.emit(relax.op.multiply(x, relax.const(np.float32(2))))
            both = builder.emit_output(relax.Tuple([one, two]))
        builder.emit_func_output(both)
    return builder.get()


def _link_for_vm(mod: Any, built: BuiltModel) -> None:
    import tvm

    from tvmflow.targets.linking import export_library

    target = built.manifest["target"]["tvm"]
    export_library(tvm.compile(mod, tvm.target.Target(target)), built.library, target)


def _link_c_library(mod: Any, built: BuiltModel) -> None:
    import tvm

    from tvmflow.compiler.c_program import compile_program
    from tvmflow.targets import c_runtime

    with tempfile.TemporaryDirectory() as folder:
        target = tvm.target.Target(built.manifest["target"]["tvm"])
        lowered = tvm.relax.transform.LegalizeOps()(mod)
        compile_program(ScheduledModel(lowered, [], target), "small_", Path(folder))
        compiled = {path.name: path for path in Path(folder).iterdir()}
        c_runtime.link(built.c_model, compiled, built.library)


if __name__ == "__main__":
    _make(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
