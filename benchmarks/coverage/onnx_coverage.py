"""ONNX coverage: how many of the onnx package's own tests import, compile and give the expected numbers.

    python benchmarks/coverage/onnx_coverage.py [--kind KIND ...] [--match TEXT] [--peer] [--jobs N] [--json FILE] [--list OUTCOME ...]

With --peer, TVM's own importer imports the models, for comparison.

Each test runs in a child process, so a crash in native code ends one test and not the run. An operand
that ONNX has as an input and TVM needs as a constant (the shape of Reshape, the axes of ReduceSum, …) is
bound to the test's value first, also where it is computed; such inputs are constants in real models.

    pass         the expected numbers
    unsupported  rejected with the name of the operator: TVM lacks it or miscomputes it
    import       rejected: the importer failed at a named node
    strings      strings, sequences or optional values, which a library cannot take
    wrong        another dtype, shape or value than expected: a silent error
    compile      imported, but not compiled or not run
    crash        the process died, hung, or raised an error that is not tvmflow's
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
OUTCOMES = ("pass", "unsupported", "import", "strings", "wrong", "compile", "crash")
TIMEOUT_S = 180.0

REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
).split()
STATIC_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(REDUCTIONS, (1,)),
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
"""Positions of operands that determine a shape or the code: they must be constants."""


# ---------------------------------------------------------------- the child


def load_cases(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the tests by `kind/name`."""
    import warnings

    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            f"{kind}/{case.name}": case for kind in kinds for case in load_model_tests(kind=kind)
        }


def open_case(case: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return `(model, inputs, expected outputs)`; tensors are arrays."""
    import onnx

    if case.model is not None:
        inputs, outputs = case.data_sets[0]
        return case.model, list(inputs), list(outputs)
    if case.url is not None:
        path = Path(onnx.__file__).parent / case.url.removeprefix("onnx/")
        return _light(path)
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    data = folder / "test_data_set_0"
    inputs = [_read(data / f"input_{i}.pb", value) for i, value in enumerate(_real_inputs(model))]
    outputs = [_read(data / f"output_{i}.pb", value) for i, value in enumerate(model.graph.output)]
    return model, inputs, outputs


def _light(path: Path) -> tuple[Any, list[Any], list[Any]]:
    """Return a network with constant weights, and the input that the onnx package's runner generates."""
    import numpy as np
    import onnx

    model = onnx.load(path)
    (value,) = _real_inputs(model)
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    size = int(np.prod(shape))
    data = (np.arange(size) / size).reshape(shape).astype(np.float32)
    (output,) = model.graph.output
    return model, [data], [_read(path.with_name(f"{path.stem}_output_0.pb"), output)]


def _real_inputs(model: Any) -> list[Any]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _read(path: Path, value: Any) -> Any:
    import onnx
    from onnx import numpy_helper

    if not value.type.HasField("tensor_type"):
        return None
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def is_tensor(value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind not in "OSU"


def bind_constants(model: Any, feed: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Turn the inputs that TVM needs as constants into initializers; return the model and the other inputs."""
    import onnx
    from onnx import numpy_helper

    bound = onnx.ModelProto.FromString(model.SerializeToString())
    constants = {
        node.input[position]
        for node in bound.graph.node
        for position in STATIC_OPERANDS.get(node.op_type, ())
        if position < len(node.input)
    }
    # Also those of which such an operand is computed.
    for node in reversed(bound.graph.node):
        if constants.intersection(node.output) and node.op_type not in ("Shape", "Size"):
            constants.update(node.input)
    constants.intersection_update(feed)
    for name in constants:
        bound.graph.initializer.append(numpy_helper.from_array(feed[name], name))
    rest = [value for value in bound.graph.input if value.name not in constants]
    del bound.graph.input[:]
    bound.graph.input.extend(rest)
    return bound, {name: value for name, value in feed.items() if name not in constants}


def judge(case: Any, folder: Path, *, peer: bool = False) -> tuple[str, str]:
    """Return the outcome of a test and its reason."""
    import numpy as np
    import onnx

    from tvmflow.core.errors import ImportFailed
    from tvmflow.core.types import TensorSpec
    from tvmflow.frontends import FRONTENDS

    model, inputs, expected = open_case(case)
    if not all(is_tensor(value) for value in [*inputs, *expected]):
        return "strings", ""
    names = [value.name for value in _real_inputs(model)]
    feed = {name: np.asarray(value) for name, value in zip(names, inputs, strict=False)}
    model, feed = bind_constants(model, feed)
    path = folder / "model.onnx"
    onnx.save(model, path)
    specs = tuple(TensorSpec(name, value.shape, str(value.dtype)) for name, value in feed.items())
    try:
        loaded = import_raw(model, feed) if peer else FRONTENDS["onnx"].load({"model": path}, specs)
    except RawImportFailed as error:
        return "import", str(error)
    except ImportFailed as error:
        named = re.match(r"TVM (has no operator|miscomputes)", error.message)
        return ("unsupported" if named else "import"), error.message
    try:
        actual = (run_raw if peer else run)(loaded, feed)
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        return "compile", f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
    why = difference(actual, expected, case.rtol, case.atol)
    return ("wrong", why) if why else ("pass", "")


class RawImportFailed(Exception):
    """An error of TVM's importer."""


def import_raw(model: Any, feed: dict[str, Any]) -> Any:
    """Import a model with TVM's importer alone, as its tutorials do."""
    from tvm.relax.frontend.onnx import from_onnx

    from tvmflow.core.types import TensorSpec
    from tvmflow.frontends.base import LoadedModel

    shapes = {name: list(value.shape) for name, value in feed.items()}
    try:
        mod = from_onnx(model, shape_dict=shapes, keep_params_in_input=False)
    except Exception as error:
        raise RawImportFailed(f"{type(error).__name__}: {error}") from error
    mod["main"] = mod["main"].with_attr("num_input", len(mod["main"].params))
    names = [value.name for value in _real_inputs(model)]
    inputs = tuple(TensorSpec(n, feed[n].shape, str(feed[n].dtype)) for n in names)
    return LoadedModel(mod, {}, inputs, ())


def run(loaded: Any, feed: dict[str, Any]) -> list[Any]:
    """Compile for this machine's CPU as a recipe with defaults has it, untuned, and run once."""
    import tvm
    from tvm import relax

    from tvmflow.compiler import lowering
    from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions

    target = tvm.target.Target.from_device("cpu").export()
    library = (
        lowering.lower(loaded.mod, tvm.target.Target(dict(target)), LoweringOptions())
        .schedule_untuned(loaded.params, dict(target), SCHEDULES_VERSION)
        .compile()
    )
    return _called(relax.VirtualMachine(library, tvm.cpu()), [feed[s.name] for s in loaded.inputs])


def run_raw(loaded: Any, feed: dict[str, Any]) -> list[Any]:
    """Compile with TVM's own pipeline, and run once."""
    import tvm
    from tvm import relax

    target = tvm.target.Target({"kind": "llvm"})
    with target:
        library = tvm.compile(relax.get_pipeline("zero")(loaded.mod), target)
    return _called(relax.VirtualMachine(library, tvm.cpu()), [feed[s.name] for s in loaded.inputs])


def _called(machine: Any, values: list[Any]) -> list[Any]:
    import tvm

    result = machine["main"](*[tvm.runtime.tensor(value) for value in values])
    many = not isinstance(result, tvm.runtime.Tensor)
    return [value.numpy() for value in (result if many else [result])]


def difference(actual: list[Any], expected: list[Any], rtol: float, atol: float) -> str:
    import numpy as np

    if len(actual) != len(expected):
        return f"{len(actual)} outputs instead of {len(expected)}"
    for index, (output, reference) in enumerate(
        zip(actual, map(np.asarray, expected), strict=True)
    ):
        if output.dtype != reference.dtype or output.shape != reference.shape:
            return f"output {index} is {output.dtype}{output.shape} instead of {reference.dtype}{reference.shape}"
        a, b = output.astype("float64"), reference.astype("float64")
        one_sided = int((np.isnan(a) != np.isnan(b)).sum())
        if one_sided:
            return f"output {index} has {one_sided} values that are NaN on one side alone"
        if not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            with np.errstate(all="ignore"):
                return f"output {index} is off by {np.nanmax(np.abs(a - b)):.3g} at {np.nanmax(np.abs(b)):.3g}"
    return ""


def child(kinds: tuple[str, ...], *, peer: bool) -> None:
    """Read test names, one a line, and print the result of each as a line of JSON."""
    import os
    import warnings

    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases = load_cases(kinds)
    print(json.dumps(sorted(cases)), file=answers, flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = judge(cases[line.strip()], Path(folder), peer=peer)
            except Exception as error:
                result = ("crash", f"{type(error).__name__}: {error}")
        print(json.dumps(result), file=answers, flush=True)


# ---------------------------------------------------------------- the parent


class Child:
    """A process that runs tests one after the other."""

    def __init__(self, kinds: tuple[str, ...], *, peer: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *(["--peer"] if peer else []), "--child", *kinds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.names: list[str] = json.loads(self._answer())

    def judge(self, name: str) -> tuple[str, str]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        timer = threading.Timer(TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            answer = self._answer()
        finally:
            timer.cancel()
        if not answer:
            return "crash", f"the process ended with {self._process.wait()}"
        outcome, why = json.loads(answer)
        return outcome, why

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()

    def _answer(self) -> str:
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        return stream.readline()


def measure(
    kinds: tuple[str, ...], match: str, *, peer: bool, jobs: int = 1
) -> dict[str, tuple[str, str]]:
    """Return the outcome and its reason of every test whose name matches, run by this many processes."""
    processes: queue.SimpleQueue[Child] = queue.SimpleQueue()
    for _ in range(jobs):
        processes.put(Child(kinds, peer=peer))

    def judge_one(name: str) -> tuple[str, str]:
        process = processes.get()
        if not process.alive:
            process.close()
            process = Child(kinds, peer=peer)
        try:
            return process.judge(name)
        finally:
            processes.put(process)

    first = processes.get()
    processes.put(first)
    names = [name for name in first.names if re.search(match, name)]
    with ThreadPoolExecutor(jobs) as pool:
        results = dict(zip(names, pool.map(judge_one, names), strict=True))
    for _ in range(jobs):
        processes.get().close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: all")
    parser.add_argument(
        "--match", default="", help="only the tests that this regular expression finds"
    )
    parser.add_argument("--peer", action="store_true", help="TVM's importer on the raw models")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--json", type=Path, help="write every outcome here")
    parser.add_argument(
        "--list",
        action="append",
        choices=OUTCOMES,
        default=["wrong", "crash"],
        help="name the tests",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(tuple(args.child), peer=args.peer)
        return
    results = measure(tuple(args.kind or KINDS), args.match, peer=args.peer, jobs=args.jobs)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    counts = Counter((name.split("/")[0], outcome) for name, (outcome, _) in results.items())
    print(f"{'':18}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES) + f"{'all':>12}")
    for kind in [*(args.kind or KINDS), "all"]:
        row = [
            sum(n for (k, o), n in counts.items() if o == outcome and kind in (k, "all"))
            for outcome in OUTCOMES
        ]
        print(f"{kind:18}" + "".join(f"{n:12}" for n in row) + f"{sum(row):12}")
    for listed in args.list:
        for name, (outcome, why) in results.items():
            if outcome == listed:
                print(f"{outcome}: {name}: {why[:200]}")


if __name__ == "__main__":
    main()
