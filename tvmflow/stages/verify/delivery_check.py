"""Runs of each delivered output on a verified sample, in a new process as on a user's machine.

The process of `verify` has imported the compiler, so it could not detect that an output depends on the compiler. The
new processes also use another number of threads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from packaging.requirements import Requirement

from tvmflow.core.errors import TvmflowError
from tvmflow.core.processes import code_command
from tvmflow.core.types import Array, Json
from tvmflow.exporters import wheel
from tvmflow.exporters.exporter import link_or_copy
from tvmflow.runtime.arrays import dtype_of
from tvmflow.runtime.module import Module
from tvmflow.stages.base import StageContext, describe_signature
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.comparison import Tolerance
from tvmflow.stages.verify.libraries import Library, LocalLibrary, load_local
from tvmflow.stages.verify.reference_run import Case
from tvmflow.stages.verify.verdict import DeliveryVerdict
from tvmflow.stages.verify_settings import LOCAL, VerifySettings
from tvmflow.targets.c_runtime import LibraryFiles, symbol_prefix
from tvmflow.targets.linking import link_c_library, link_shared
from tvmflow.targets.linking.zig import Interface, run_zig
from tvmflow.targets.threads import VARIABLE
from tvmflow.targets.tvm_target import cpu_triple

Arrays = Mapping[str, Array]


_TIMEOUT_S: Final = 600.0

_BEFORE: Final = """
import json, pathlib, sys
import numpy as np
task = json.loads(pathlib.Path(sys.argv[1]).read_text())
file = task["file"]
with np.load(task["samples"]) as archive:
    feed = dict(zip(task["inputs"], (archive[name] for name in archive.files)))
"""
_AFTER: Final = """
# `ascontiguousarray` would give a scalar a dimension
arrays = [np.asarray(array, order="C") for array in outputs.values()]
np.savez(task["results"], *(array.reshape(-1).view(np.uint8) for array in arrays))
described = [[name, list(a.shape), str(a.dtype)] for name, a in zip(outputs, arrays)]
pathlib.Path(task["described"]).write_text(json.dumps(described))
"""
_BUNDLE: Final = """
import tvmflow
outputs = tvmflow.load(file, task.get("weights")).run(feed)
"""
_WHEEL: Final = """
import importlib
outputs = importlib.import_module(task["module"]).run(feed)
"""
_C_LIBRARY: Final = """
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.arrays import allocate_aligned
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.runtime.module import Module
weights = None
if "weights" in task:
    read = np.fromfile(task["weights"], np.uint8)
    weights = allocate_aligned(TensorSpec("weights", read.shape, "uint8"))
    weights[...] = read
tensors = dict(feed)
for each in task["libraries"]:
    path, signature = pathlib.Path(each["file"]), each["signature"]
    program = NativeProgram(path, each["prefix"], task["threads"], signature, weights)
    module = Module(program, signature, {})
    tensors |= module.run({spec.name: tensors[spec.name] for spec in module.inputs})
outputs = {name: tensors[name] for name in task["outputs"]}
"""
# If PyTorch is installed, TVM imports it, which takes seconds; nothing here needs it.
_TVM: Final = """
import ctypes
sys.modules["torch"] = None
import tvm
from tvm import relax
if task.get("is_system"):
    ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
    library = tvm.runtime.system_lib(task["prefix"] + "_")
else:
    library = tvm.runtime.load_module(file)
arguments = [tvm.runtime.tensor(np.asarray(array, order="C")) for array in feed.values()]
if "weights" in task:
    loaded = tvm.runtime.load_param_dict_from_file(task["weights"])
    arguments += [loaded[name] for name in sorted(loaded)]
results = relax.VirtualMachine(library, tvm.cpu())["main"](*arguments)
results = [results] if isinstance(results, tvm.runtime.Tensor) else list(results)
outputs = {name: result.numpy() for name, result in zip(task["outputs"], results)}
"""


class _Task(NamedTuple):
    """A new process that loads an output from a file: its program, and the fields of its request.

    If `folders` is given, it is the import path, in place of the packages of this environment.
    """

    code: str
    file: Path
    fields: Mapping[str, Json] = {}
    folders: tuple[Path, ...] = ()


class _Unloadable(Exception):
    """An output cannot be loaded on this machine as a user would; the message is the reason."""


def check_deliveries(library: Library, case: Case) -> dict[str, DeliveryVerdict]:
    """Load each output in a new process, and compare it with the verified library.

    Without a reference, bits must be equal. The result is empty if the library runs on another machine.
    """
    settings = case.settings
    if settings.run_on != LOCAL or not isinstance(library, LocalLibrary):
        return {}
    tolerance = case.reference.tolerance if case.reference else None
    loader = _Deliveries(library, case.read_feed(library), settings, case.context)
    verdicts: dict[str, DeliveryVerdict] = {}
    tasks: dict[str, list[_Task]] = {}
    for output, names in settings.deliveries.items():
        try:
            tasks[output] = list(loader.list_tasks(output, names))
        except _Unloadable as reason:
            verdicts[output] = {"passed": True, "not_run": str(reason)}
        except TvmflowError as error:
            verdicts[output] = {"passed": False, "failure": error.message}
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        running = [
            (name, pool.submit(loader.run, task)) for name, each in tasks.items() for task in each
        ]
        for name, future in running:
            verdict = loader.judge(name, future.result(), tolerance)
            # an output may have several forms: keep the verdict on the first wrong one
            if name not in verdicts or verdicts[name]["passed"]:
                verdicts[name] = verdict
    return {name: verdicts[name] for name in settings.deliveries if name in verdicts}


class _Deliveries:
    """The delivered outputs of a library, and a file with the sample to run them on."""

    def __init__(
        self, library: LocalLibrary, feed: Arrays, settings: VerifySettings, context: StageContext
    ) -> None:
        self._library, self._feed = library, feed
        self._settings, self._context = settings, context
        self._folder = context.work / "deliveries"
        # files of an earlier, rejected attempt may be left
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._expected: dict[str, Arrays] = {}
        self._threads = 2 if settings.threads == 1 else 1
        self._samples = self._folder / "samples.npz"
        self._is_plain = all(array.dtype.kind in "biuf" for array in feed.values())
        if self._is_plain:
            np.savez(self._samples, *feed.values())

    def list_tasks(self, output: str, names: Sequence[str]) -> Iterator[_Task]:
        """Yield the processes to load an output; _Unloadable if none can, TvmflowError if linking fails."""
        if not self._is_plain:
            raise _Unloadable("NumPy's files cannot hold its inputs")
        list_own = _TASKS.get(output)
        if list_own is None:
            raise _Unloadable(
                _NOT_LOADED.get(output, "it is not loaded by a program of this machine")
            )
        missing = [name for name in names if f"export/{name}" not in self._context.inputs]
        assert not missing, missing
        folder = self._next()
        files = {}
        for name in names:
            files[name] = folder / name
            files[name].parent.mkdir(parents=True, exist_ok=True)
            # the store keeps these files under other names
            link_or_copy(self._context.inputs[f"export/{name}"], files[name])
        return list_own(self, files)

    def run(self, task: _Task) -> Arrays | str:
        """Run a new process; return its outputs by name, or the message of its error."""
        folder = self._next()
        results, described, request = (
            folder / name for name in ("out.npz", "out.json", "task.json")
        )
        fields = {
            "file": str(task.file),
            "samples": str(self._samples),
            "inputs": [*self._feed],
            "outputs": [spec.name for spec in self._library.outputs],
            "results": str(results),
            "described": str(described),
            **task.fields,
        }
        request.write_text(json.dumps(fields))
        code = f"{_BEFORE}{task.code}{_AFTER}"
        if task.folders:
            path = [str(path) for path in task.folders]
            command = [
                sys.executable,
                "-I",
                "-S",
                "-c",
                f"import sys; sys.path += {path!r}\n{code}",
            ]
        else:
            command = code_command(f"\n{code}")
        try:
            done = subprocess.run(
                [*command, str(request)],
                cwd=folder,
                env={**os.environ, VARIABLE: str(self._threads)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it did not end within {_TIMEOUT_S:.0f} s"
        if done.returncode != 0 or not described.exists():
            # only the error's own line is not indented; the lines after it, such as the fix, are
            lines = [line for line in done.stderr.splitlines() if line[:1].strip()]
            return lines[-1] if lines else f"the process ended with {done.returncode}"
        with np.load(results) as archive:
            contents = [archive[f"arr_{index}"] for index in range(len(archive.files))]
        return {
            name: content.view(dtype_of(dtype)).reshape(shape)
            for (name, shape, dtype), content in zip(
                json.loads(described.read_text()), contents, strict=True
            )
        }

    def judge(
        self, output: str, found: Arrays | str, tolerance: Tolerance | None
    ) -> DeliveryVerdict:
        if isinstance(found, str):
            return {"passed": False, "failure": found}
        expected = self._expect(output)
        if found.keys() != expected.keys():
            return {"passed": False, "failure": f"its outputs are {', '.join(found)}"}
        if comparison.has_same_bits(found, expected):
            return {"passed": True, "is_equal": True}
        outputs = comparison.compare_outputs(found, expected, tolerance) if tolerance else {}
        is_passed = bool(outputs) and all(compared["passed"] for compared in outputs.values())
        return {"passed": is_passed, "is_equal": False, "outputs": outputs}

    def _expect(self, output: str) -> Arrays:
        """Return the expected values: the VM library's for outputs made from it, or this library's."""
        machine = self._context.inputs.get("export/vm.tvmflow")
        runtime = "vm" if machine and _TASKS.get(output) in _OF_TVM else ""
        if runtime not in self._expected:
            library = load_local(machine, self._settings) if machine and runtime else self._library
            [self._expected[runtime]] = library.run_all([dict(self._feed)])
        return self._expected[runtime]

    def _next(self) -> Path:
        """Return a new folder; safe to call from several threads."""
        return Path(tempfile.mkdtemp(dir=self._folder))

    # ---------------------------------------------------------------- outputs

    def load_bundle(self, files: Mapping[str, Path]) -> Iterator[_Task]:
        [bundle] = files.values()
        yield _Task(_BUNDLE, bundle)

    def load_wheel(self, files: Mapping[str, Path]) -> Iterator[_Task]:
        """Yield the process that imports a wheel; it can import only the wheel's requirements."""
        [path] = files.values()
        unpacked, required = path.parent / "unpacked", path.parent / "required"
        required.mkdir()
        with zipfile.ZipFile(path) as archive:
            archive.extractall(unpacked)
        [info] = unpacked.glob("*.dist-info/METADATA")
        _link_required(metadata.PathDistribution(info.parent), required)
        module = wheel.module_name(self._library.module.manifest["name"])
        yield _Task(_WHEEL, path, {"module": module}, (unpacked, required))

    def load_c_library(self, files: Mapping[str, Path]) -> Iterator[_Task]:
        """Yield processes that load the shared library of each part, or a program with the static one."""
        module = self._library.module
        weights = [str(path) for name, path in files.items() if name.endswith(".weights")]
        fields: dict[str, Json] = {"threads": self._threads}
        fields |= {"weights": weights[0]} if weights else {}
        paths = {path.name: path for path in files.values()}
        shared = [
            (each, path)
            for each in (module.parts.values() or [module])
            if (path := paths.get(_list_names(each).shared))
        ]
        if shared:
            libraries = [self._describe_c_library(*each) for each in shared]
            yield _Task(_C_LIBRARY, shared[0][1], {**fields, "libraries": libraries})
        for name, path in files.items():
            if name.endswith(".a"):
                linked = path.with_name("linked.so")
                described = self._describe_c_library(module, linked)
                interface = Interface("linked.so", [f"{described['prefix']}_*"])
                link_c_library(self._unpack(path), linked, self._triple, interface)
                yield _Task(_C_LIBRARY, linked, {**fields, "libraries": [described]})

    def load_shared(self, files: Mapping[str, Path]) -> Iterator[_Task]:
        self._require_plain_outputs()
        [path] = files.values()
        yield _Task(_TVM, path)

    def load_static(self, files: Mapping[str, Path]) -> Iterator[_Task]:
        """Link a static library into a shared one, and yield the process that loads it."""
        self._require_plain_outputs()
        [path] = (path for path in files.values() if path.suffix != ".h")
        linked = path.with_name("linked.so")
        link_shared(self._unpack(path), linked, self._triple)
        is_system = len(files) > 1
        yield _Task(
            _TVM, linked, {"is_system": is_system, "prefix": _prefix_of(self._library.module)}
        )

    def load_params(self, files: Mapping[str, Path]) -> Iterator[_Task]:
        """Yield processes that load a library and its separate weights, with tvmflow and with TVM."""
        self._require_plain_outputs()
        paths = {path.suffix: path for path in files.values()}
        yield _Task(_BUNDLE, paths[".tvmflow"], {"weights": str(paths[".safetensors"])})
        yield _Task(
            _TVM,
            paths[Path(_list_names(self._library.module).shared).suffix],
            {"weights": str(paths[".params"])},
        )

    def _require_plain_outputs(self) -> None:
        if self._library.module.manifest["target"]["tvm"]["kind"] != "llvm":
            raise _Unloadable("it runs on a GPU, by TVM's runtime")
        if any(spec.bounded_axis is not None for spec in self._library.outputs):
            raise _Unloadable("its outputs have sizes that TVM's runtime does not cut them to")

    def _describe_c_library(self, module: Module, path: Path) -> dict[str, Json]:
        signature = describe_signature(module.inputs, module.outputs, module.dimensions)
        return {"file": str(path), "prefix": _prefix_of(module), "signature": signature}

    def _unpack(self, archive: Path) -> list[Path]:
        folder = self._next()
        run_zig(folder, "ar", "x", str(archive), action="unpacking a static library")
        return sorted(folder.iterdir())

    @property
    def _triple(self) -> str:
        return cpu_triple(self._library.module.manifest["target"]["tvm"])


_OF_TVM: Final = (_Deliveries.load_shared, _Deliveries.load_static, _Deliveries.load_params)
_TASKS: Final[Mapping[str, Callable[[_Deliveries, Mapping[str, Path]], Iterator[_Task]]]] = {
    "bundle": _Deliveries.load_bundle,
    "wheel": _Deliveries.load_wheel,
    "c-library": _Deliveries.load_c_library,
    "c-library-weights": _Deliveries.load_c_library,
    "cpp": _Deliveries.load_c_library,
    "shared-library": _Deliveries.load_shared,
    "params": _Deliveries.load_params,
    "static-library": _Deliveries.load_static,
    "system-library": _Deliveries.load_static,
}
_NOT_LOADED: Final[Mapping[str, str]] = {
    "android": "it needs a device with Android, or an emulator of one",
    "archive": "it holds the other files",
    "c-source": "it is compiled where it is used",
    "objects": "TVM's loader links it, with a C++ compiler",
    "web": "it needs a browser (verify.run_on: chromium)",
    "xcframework": "it needs a Mac or an iPhone",
}


def _prefix_of(module: Module) -> str:
    return symbol_prefix(module.manifest["name"]).removesuffix("_")


def _list_names(module: Module) -> LibraryFiles:
    return LibraryFiles.of(module.manifest["name"], cpu_triple(module.manifest["target"]["tvm"]))


def _link_required(distribution: metadata.Distribution, folder: Path) -> None:
    """Link everything that a distribution requires into a folder, with transitive requirements."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            required = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError as error:
            raise _Unloadable(f"{requirement.name}, which it requires, is not installed") from error
        if (folder / str(required.metadata["Name"])).exists():
            continue
        tops = {file.parts[0] for file in required.files or () if file.parts[0] not in ("..", ".")}
        is_known = True
        for top in sorted(tops):
            link = folder / top
            if not link.exists():
                is_known = False
                link.symlink_to(Path(str(required.locate_file(top))).resolve())
        if not is_known:
            _link_required(required, folder)
