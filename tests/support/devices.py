"""Libraries whose kernels run by OpenCL, built in this process and run in others: a driver has threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tvmflow.compiler import lowering
from tvmflow.compiler.c_program import compile_program
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.types import Json
from tvmflow.frontends.base import LoadedModel
from tvmflow.targets import c_runtime
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.c_runtime import DescribedModel
from tvmflow.targets.host import read_host
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]

TRIPLE: Final = f"{read_host().arch}-linux-gnu"
TARGET: Final = BACKENDS["opencl"].complete_target(
    {"kind": "opencl", "host": {"kind": "llvm", "mtriple": TRIPLE}}
)

# Runs a library on arrays in a file, and says whether TVM was imported.
_RUN: Final = """
import json, sys
from pathlib import Path
import numpy as np
from tvmflow.runtime.c_loader import NativeProgram

library, signature, feed, results = sys.argv[1:]
signature = json.loads(signature)
program = NativeProgram(Path(library), "net", 2, signature)
arrays = np.load(feed)
inputs = [arrays[tensor["name"]] for tensor in signature["inputs"]]
kernels = {}
program.profiled_main(lambda name, seconds: kernels.setdefault(name, seconds))(*inputs)
outputs = program.main(*inputs)
np.savez(results, *outputs)
print(json.dumps([kernels, "tvm" in sys.modules]))
"""


class DeviceLibrary(NamedTuple):
    """A library for OpenCL.

    Attributes:
        library: The shared library, with the prefix `net`.
        objects: What it was linked from besides the runtime, by name.
        described: The model as the library describes it.
    """

    library: Path
    objects: Mapping[str, Path]
    described: DescribedModel

    @classmethod
    def build(
        cls, model: LoadedModel, folder: Path, target: Mapping[str, Json] = TARGET
    ) -> DeviceLibrary:
        """Compile a model, untuned, in a folder."""
        scheduled = lowering.lower(
            model.mod, make_target(target), LoweringOptions()
        ).schedule_untuned(model.params, target, 1)
        objects = folder / "objects"
        objects.mkdir()
        compile_program(scheduled, "net_", objects)
        signature = {
            direction: [spec.to_json() for spec in getattr(model, direction)]
            for direction in ("inputs", "outputs")
        }
        described = DescribedModel(
            "net", signature, (), TRIPLE, executor=BACKENDS["opencl"].EXECUTOR
        )
        files = {path.name: path for path in objects.iterdir()}
        library = folder / "libnet.so"
        c_runtime.link(described, files, library)
        return cls(library, files, described)

    @property
    def program(self) -> str:
        """The C code that launches the kernels."""
        return self.objects[c_runtime.PROGRAM].read_text()

    def run(self, feed: Mapping[str, Array]) -> tuple[list[Array], dict[str, float]]:
        """Return the outputs in a process without TVM, and the seconds of each kernel."""
        arguments, results = self.library.with_name("feed.npz"), self.library.with_name("out.npz")
        np.savez(arguments, **feed)
        names = json.dumps(self.described.signature), str(arguments), str(results)
        done = subprocess.run(
            [sys.executable, "-c", _RUN, str(self.library), *names],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        kernels, has_tvm = json.loads(done.stdout.splitlines()[-1])
        assert not has_tvm
        arrays = np.load(results)
        return [arrays[name] for name in arrays.files], kernels

    def compile_program(
        self, folder: Path, main: str, replaced: Mapping[str, str], *flags: str
    ) -> Path:
        """Compile a C program with the library's sources, in whose C code texts are replaced."""
        text = self.program
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        folder.mkdir()
        (folder / "edited.c").write_text(text)
        c_runtime.write_sources(self.described, {c_runtime.PROGRAM: folder / "edited.c"}, folder)
        (folder / "main.c").write_text(main)
        objects = [str(path) for path in self.objects.values() if path.suffix == ".o"]
        command = ["cc", "-std=gnu11", "-g", "main.c", c_runtime.SOURCE, *objects, *flags]
        libraries = ["-lm", "-lpthread", "-ldl", "-o", "program"]
        subprocess.run([*command, *libraries], cwd=folder, check=True, capture_output=True)
        return folder / "program"


def run_program(
    program: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of `compile_program`."""
    return subprocess.run(
        [program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
