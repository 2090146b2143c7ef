"""Loads a bundle and runs it: what a user's program imports. Needs numpy, tvm_ffi and TVM's runtime library alone.

The compiler (`import tvm`) is never loaded. Everything that can be known before the library
is loaded is checked before, because a library for another CPU dies of an illegal instruction
and says nothing.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tvmflow.errors import BundleError, EnvironmentProblem
from tvmflow.targets.host import foreign_system, read_host
from tvmflow.targets.platforms import host_triple, platform_of
from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CPU: Final = 1
_POOLED_ALLOCATOR: Final = 2
_ALIGNMENT: Final = 64
# bundle formats
_WHOLE: Final = 1
_IN_PARTS: Final = 2


class OperatorTime(NamedTuple):
    """What one operator of a model took in one run: `calls` of them, `seconds` in all."""

    name: str
    calls: int
    seconds: float


Main = Callable[..., Any]
"""A model's `main`: takes the runtime's tensors, and gives one or several."""

Watch = Callable[[str, bool], None]
"""Told the name of an operator, before it begins (True) and when it has ended."""


class Program(Protocol):
    """What a `Module` calls."""

    @property
    def main(self) -> Main: ...

    def watched(self, watch: Watch) -> Main:
        """A `main` of its own, which is slower, and tells of every operator."""
        ...


class Executable:
    """A library with one compiled model."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.main: Main = self._machine()["main"]

    def _machine(self) -> Any:
        machine = self._library["vm_load_executable"]()
        machine["vm_initialization"](_CPU, 0, _POOLED_ALLOCATOR)
        return machine

    def watched(self, watch: Watch) -> Main:
        # a machine that is watched stays slow
        machine = self._machine()

        def tell(_function: Any, name: str, before: bool, *_: Any) -> int:
            watch(name, before)
            return 0

        machine["set_instrument"](tell)
        main: Main = machine["main"]
        return main


class Module:
    """A loaded model. One call at a time: calls from several threads wait for each other."""

    def __init__(
        self,
        program: Program,
        signature: Mapping[str, Any],
        manifest: Mapping[str, Any],
        weights: Mapping[str, Array] | None = None,
        parts: Mapping[str, Module] | None = None,
    ):
        self.manifest = dict(manifest)
        """What the bundle says of itself: name, target, versions, digests."""
        self.inputs = tuple(TensorSpec.from_json(entry) for entry in signature["inputs"])
        """Name, shape and dtype of each input."""
        self.outputs = tuple(TensorSpec.from_json(entry) for entry in signature["outputs"])
        """Name, shape and dtype of each output."""
        self.parts = dict(parts or {})
        """The parts that the model was built in, by name, in order; none of one that was built as a whole."""
        self.program = program
        self._main = program.main
        self._lock = threading.Lock()
        self._buffers = {spec.name: _aligned(spec) for spec in self.inputs}
        # kept here because the runtime looks into their memory
        self._weights = {name: _filled(array) for name, array in (weights or {}).items()}

    def __repr__(self) -> str:
        def show(specs: tuple[TensorSpec, ...]) -> str:
            return ", ".join(f"{s.name}: {s.dtype}{list(s.shape)}" for s in specs)

        return f"<{__package__}.{type(self).__name__} {self.manifest['name']} ({show(self.inputs)}) -> ({show(self.outputs)})>"

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name for the inputs in `feed`, which must have exactly the signature's shapes and dtypes.

        Raises BundleError (a ValueError) that names every input that does not fit.
        """
        with self._lock:
            arguments = self._fill(feed)
            return self._collect(self._main(*arguments))

    def latency(
        self, feed: Mapping[str, Array], *, repeat: int = 10, min_seconds: float = 0.05
    ) -> list[float]:
        """Seconds per call, for each of `repeat` repeats of at least `min_seconds`, after a warm-up.

        The inputs are in place already and the outputs are left where the runtime put them.
        """
        with self._lock:
            arguments = self._fill(feed)
            started = time.perf_counter()
            self._main(*arguments)
            once = time.perf_counter() - started
            calls = max(1, int(min_seconds / max(once, 1e-7)))
            seconds = []
            for _ in range(repeat):
                started = time.perf_counter()
                for _ in range(calls):
                    self._main(*arguments)
                seconds.append((time.perf_counter() - started) / calls)
            return seconds

    def profile(self, feed: Mapping[str, Array], *, repeat: int = 10) -> list[OperatorTime]:
        """What each kernel and each step of the runtime took, the slowest first: of `repeat` runs, the median.

        Watching adds a few microseconds to each of their calls.
        """
        from statistics import median

        runs: list[dict[str, list[float]]] = []
        started = 0.0

        def watch(name: str, before: bool) -> None:
            nonlocal started
            if before:
                started = time.perf_counter()
            else:
                runs[-1].setdefault(name, []).append(time.perf_counter() - started)

        with self._lock:
            arguments = self._fill(feed)
            self._main(*arguments)
            main = self.program.watched(watch)
            for _ in range(repeat + 1):
                runs.append({})
                main(*arguments)
        del runs[0]
        times = {name: median(sum(run[name]) for run in runs) for name in runs[0]}
        found = [OperatorTime(name, len(runs[0][name]), took) for name, took in times.items()]
        return sorted(found, key=lambda each: -each.seconds)

    def _fill(self, feed: Mapping[str, Array]) -> list[Any]:
        import numpy as np

        problems = self._misfits(feed)
        if problems:
            raise BundleError("; ".join(problems), fix=f"this model takes {self!r}")
        for spec in self.inputs:
            np.copyto(self._buffers[spec.name][0], feed[spec.name])
        return [*(self._buffers[spec.name][1] for spec in self.inputs), *self.weights]

    @property
    def weights(self) -> list[Any]:
        """The runtime's tensors that `main` takes after the inputs."""
        return [tensor for _, tensor in self._weights.values()]

    def _misfits(self, feed: Mapping[str, Array]) -> list[str]:
        """A sentence for every input that is missing, unknown, or of another shape or dtype."""
        expected = {spec.name: spec for spec in self.inputs}
        problems = [f"there is no input '{name}'" for name in feed if name not in expected]
        for name, spec in expected.items():
            if name not in feed:
                problems.append(f"input '{name}' is missing")
                continue
            array = feed[name]
            shape, dtype = getattr(array, "shape", None), str(getattr(array, "dtype", type(array)))
            if shape is None or tuple(shape) != spec.shape:
                problems.append(f"input '{name}' has shape {shape}, not {spec.shape}")
            if dtype != spec.dtype:
                problems.append(f"input '{name}' has dtype {dtype}, not {spec.dtype}")
        return problems

    def _collect(self, result: Any) -> dict[str, Array]:
        import numpy as np

        names = [spec.name for spec in self.outputs]
        # the runtime takes its memory back at the next call
        return {n: np.from_dlpack(t).copy() for n, t in zip(names, _tensors(result), strict=True)}


def _tensors(result: Any) -> list[Any]:
    import tvm_ffi

    return [result] if isinstance(result, tvm_ffi.Tensor) else list(result)


class Chain:
    """Parts of a model, one after the other; what one gives to another stays where it is."""

    def __init__(
        self, parts: Mapping[str, Module], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self._parts = parts
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self.main = self._linked({name: part.program.main for name, part in parts.items()})

    def watched(self, watch: Watch) -> Main:
        """Operators' names begin with their part's."""

        def named(part: str) -> Watch:
            return lambda name, before: watch(f"{part}: {name}", before)

        mains = {name: part.program.watched(named(name)) for name, part in self._parts.items()}
        return self._linked(mains)

    def _linked(self, mains: Mapping[str, Main]) -> Main:
        steps = [
            (
                mains[name],
                [spec.name for spec in part.inputs],
                part.weights,
                [spec.name for spec in part.outputs],
            )
            for name, part in self._parts.items()
        ]

        def main(*arguments: Any) -> list[Any]:
            there = dict(zip(self._inputs, arguments, strict=True))
            for call, takes, weights, gives in steps:
                results = _tensors(call(*(there[name] for name in takes), *weights))
                there.update(zip(gives, results, strict=True))
            return [there[name] for name in self._outputs]

        return main


def load(path: str | Path, params: str | Path | Mapping[str, Array] | None = None) -> Module:
    """The model in a `.tvmflow` bundle, ready to run on this machine.

    A bundle without weights (`.lean.tvmflow`) takes them as `params`: a `.safetensors` or
    `.params` file, or arrays by name.

    Raises BundleError when a file is damaged, when it was built for another CPU or for another
    version of TVM's runtime, or when weights do not fit, and says which.
    """
    found = unpack(path)
    if not found.parts:
        return _loaded(str(path), found, params)
    if params is not None:
        raise _takes_no_weights(path)
    parts = {
        name: _loaded(f"{path}, part '{name}',", part, None) for name, part in found.parts.items()
    }
    names = [[spec["name"] for spec in found.signature[way]] for way in ("inputs", "outputs")]
    return Module(Chain(parts, *names), found.signature, found.manifest, None, parts)


def _loaded(path: str, found: Unpacked, params: str | Path | Mapping[str, Array] | None) -> Module:
    name = found.manifest.get("library", "library.so")
    digest = hashlib.sha256(found.library).hexdigest()
    _check(path, found.manifest, digest == found.manifest["sha256"][name])
    weights = _weights(path, found.manifest, params)
    library = _load_library(found.library, Path(name).suffix)
    return Module(Executable(library), found.signature, found.manifest, weights)


class Unpacked(NamedTuple):
    """What is in a bundle: a library, or the bundles of the parts that the model was built in, in order."""

    manifest: dict[str, Any]
    signature: dict[str, Any]
    library: bytes
    parts: dict[str, Unpacked]


def unpack(path: str | Path) -> Unpacked:
    """The content of a bundle, for whatever machine it is. Raises BundleError."""
    try:
        return _unpacked(path, path)
    except FileNotFoundError:
        raise BundleError(f"there is no file {path}", fix="`tvmflow run RECIPE` makes it") from None
    except (zipfile.BadZipFile, LookupError, ValueError, TypeError, OSError) as error:
        raise BundleError(
            f"{path} is not a whole tvmflow bundle: {error}", fix="copy or build it again"
        ) from error


def _unpacked(path: str | Path, source: str | Path | BytesIO) -> Unpacked:
    with zipfile.ZipFile(source) as archive:
        if archive.infolist()[0].header_offset:
            # of a torn bundle, the index that is found last is that of a part inside
            raise zipfile.BadZipFile("its end is missing")
        manifest = json.loads(archive.read("manifest.json"))
        signature = json.loads(archive.read("signature.json"))
        if manifest.get("bundle") not in (_WHOLE, _IN_PARTS):
            raise BundleError(
                f"{path} has bundle format {manifest.get('bundle')}, this tvmflow reads {_WHOLE} and {_IN_PARTS}",
                fix="load it with the tvmflow that made it",
            )
        if manifest["bundle"] == _WHOLE:
            library = archive.read(manifest.get("library", "library.so"))
            return Unpacked(manifest, signature, library, {})
        parts = {
            each["name"]: _unpacked(path, BytesIO(archive.read(each["file"])))
            for each in manifest["parts"]
        }
        return Unpacked(manifest, signature, b"", parts)


def _check(path: str | Path, manifest: Mapping[str, Any], whole: bool) -> None:
    """Everything that would go wrong later, and less clearly."""
    if not whole:
        raise BundleError(f"{path} is damaged: its library has another digest", fix="copy it again")
    target, host = manifest["target"], read_host()
    kind = target["tvm"].get("kind", "llvm")
    if kind != "llvm":
        raise BundleError(
            f"{path} was built for {kind}, and this runtime runs libraries for CPUs",
            fix="load the shared library with TVM itself: relax.VirtualMachine(tvm.runtime.load_module(…), tvm.cuda())",
        )
    platform = platform_of(host_triple(target["tvm"]) or host.arch)
    if platform.arch != host.arch:
        raise BundleError(
            f"{path} was built for {platform.arch}, this machine is {host.arch}",
            fix=f"build the recipe for a target of {host.arch}",
        )
    foreign = foreign_system(platform, host)
    if foreign:
        raise BundleError(
            f"{path} was built for {foreign[0]}, this machine runs {foreign[1]}",
            fix=f"build the recipe for a target of {foreign[1]} (its `mtriple` says which it is)",
        )
    missing = [name for name in target["features"] if host.flags and name not in host.flags]
    if missing:
        raise BundleError(
            f"{path} uses CPU instructions that this machine lacks: {', '.join(missing)}",
            fix="build the recipe for this machine (`host`) or for a lower CPU level",
        )
    built_with, here = manifest["tvm"], _installed("apache-tvm")
    if built_with.split(".")[:2] != here.split(".")[:2]:
        raise BundleError(
            f"{path} was built with TVM {built_with}, the runtime here is {here}",
            fix=f"install apache-tvm {built_with}, or build again with {here}",
        )


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise EnvironmentProblem(
            f"{distribution} is not installed", fix=f"pip install {distribution}"
        ) from None


def _load_library(content: bytes, suffix: str) -> Any:
    import tvm_ffi

    _load_runtime()
    # the loader maps the file, after which it may go
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        library = Path(folder, f"library{suffix}")
        library.write_bytes(content)
        return tvm_ffi.load_module(library)


def _load_runtime() -> None:
    import tvm_ffi

    for name in ("tvm_runtime", "tvm_runtime_extra"):
        tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")


def _aligned(spec: TensorSpec) -> tuple[Array, Any]:
    """An input buffer with the alignment that kernels count on, and the runtime's view of it."""
    import numpy as np
    import tvm_ffi

    dtype = np.dtype(spec.dtype)
    size = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array = raw[start : start + size].view(dtype).reshape(spec.shape)
    return array, tvm_ffi.from_dlpack(array)


def _filled(content: Array) -> tuple[Array, Any]:
    """The same for an array whose content is known."""
    import numpy as np

    spec = TensorSpec("", tuple(content.shape), str(content.dtype))
    array, tensor = _aligned(spec)
    np.copyto(array, content)
    return array, tensor


# ---------------------------------------------------------------- weights apart

_SAFETENSORS: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}


def _weights(
    path: str | Path, manifest: Mapping[str, Any], params: str | Path | Mapping[str, Array] | None
) -> dict[str, Array]:
    """What `main` takes after the inputs, in its order. Raises BundleError for whatever does not fit."""
    if "params" not in manifest:
        if params is None:
            return {}
        raise _takes_no_weights(path)
    stem = manifest["name"]
    if params is None:
        raise BundleError(
            f"{path} has no weights of its own",
            fix=f"load it with params=, such as the {stem}.safetensors that was built with it",
        )
    given = params if isinstance(params, Mapping) else read_params(params)
    specs = [TensorSpec.from_json(entry) for entry in manifest["params"]]
    known = {spec.name for spec in specs}
    problems = [f"there is no weight '{name}'" for name in given if name not in known]
    for spec in specs:
        array = given.get(spec.name)
        if array is None:
            problems.append(f"weight '{spec.name}' is missing")
        elif (tuple(array.shape), str(array.dtype)) != (spec.shape, spec.dtype):
            found = f"{array.dtype} {tuple(array.shape)}"
            problems.append(f"weight '{spec.name}' is {found}, not {spec.dtype} {spec.shape}")
    if problems:
        raise BundleError(
            f"the weights do not fit {path}: {'; '.join(problems)}",
            fix="give the weights of a build of the same model for the same target",
        )
    return {spec.name: given[spec.name] for spec in specs}


def _takes_no_weights(path: str | Path) -> BundleError:
    return BundleError(
        f"{path} carries its weights; it takes no others",
        fix="load the recipe's .lean.tvmflow (`outputs: [params]`) to give weights",
    )


def read_params(path: str | Path) -> dict[str, Array]:
    """The arrays in a `.safetensors` file, or in one that TVM's `save_param_dict` wrote. Raises BundleError."""
    if not Path(path).is_file():
        raise BundleError(
            f"there is no file {path}", fix="`outputs: [params]` in a recipe delivers it"
        )
    if Path(path).suffix == ".safetensors":
        return read_safetensors(path)
    import numpy as np
    import tvm_ffi

    _load_runtime()
    try:
        found = tvm_ffi.get_global_func("runtime.LoadParamsFromFile")(str(path))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise BundleError(
            f"{path} is not a file of TVM's parameters: {reason}", fix="copy or build it again"
        ) from error
    return {str(name): np.from_dlpack(tensor) for name, tensor in found.items()}


def read_safetensors(path: str | Path) -> dict[str, Array]:
    """The arrays in a `.safetensors` file, in the file's memory. Raises BundleError when it is damaged."""
    import numpy as np

    content = Path(path).read_bytes()
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:start])
        entries.pop("__metadata__", None)
        found = {}
        for name, entry in entries.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(memoryview(content)[begin:end], _SAFETENSORS[entry["dtype"]])
            found[name] = values.reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(
            f"{path} is not a whole safetensors file: {error}", fix="copy or build it again"
        ) from error
    return found
