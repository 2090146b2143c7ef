"""How much of ONNX imports, compiles and computes the right numbers: the onnx package's own tests, as a table.

    python benchmarks/onnx_coverage.py [--kind KIND ...] [--match TEXT] [--peer] [--json FILE] [--list OUTCOME ...]

With --peer, TVM's own importer takes the models as they are, for comparison.

Each test runs in a child process, so a crash in native code ends one test and not the run. An operand
that ONNX has as an input and TVM needs as a constant (the shape of Reshape, the axes of ReduceSum, …) is
bound to the test's value first; such inputs are constants in real models.

    pass         the numbers are those that the test expects
    unsupported  refused by name: TVM lacks the operator, or has it wrong
    import       refused: the importer failed at a node that was named
    strings      the test is about strings, sequences or optional values, which a library cannot take
    wrong        another dtype, shape or value than expected: a bug that a user would meet silently
    compile      imported, and then not compiled or not run
    crash        the process died, hung, or raised what is no error of tvmflow's
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
OUTCOMES = ("pass", "unsupported", "import", "strings", "wrong", "compile", "crash")
TIMEOUT_S = 180.0


# ---------------------------------------------------------------- the child


def load_cases(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Tests by `kind/name`."""
    import warnings

    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            f"{kind}/{case.name}": case for kind in kinds for case in load_model_tests(kind=kind)
        }


def open_case(case: Any) -> tuple[Any, list[Any], list[Any]]:
    """`(model, inputs, expected outputs)`; arrays where they are tensors."""
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
    """A whole network with constant weights. Its input is the one the onnx package's runner makes up."""
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
    """The model with the inputs that TVM needs as constants made initializers, and the feed that is left."""
    import onnx
    from onnx import numpy_helper

    from tvmflow.frontends.onnx._operators import static_operands

    bound = onnx.ModelProto.FromString(model.SerializeToString())
    wanted = {name for node in bound.graph.node for name in static_operands(node) if name in feed}
    for name in wanted:
        bound.graph.initializer.append(numpy_helper.from_array(feed[name], name))
    rest = [value for value in bound.graph.input if value.name not in wanted]
    del bound.graph.input[:]
    bound.graph.input.extend(rest)
    return bound, {name: value for name, value in feed.items() if name not in wanted}


def judge(case: Any, folder: Path, *, peer: bool = False) -> tuple[str, str]:
    """`(outcome, why)` of one test."""
    import numpy as np
    import onnx

    from tvmflow.errors import ImportFailed
    from tvmflow.frontends import onnx as frontend
    from tvmflow.values import TensorSpec

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
        loaded = import_raw(model, feed) if peer else frontend.load({"model": path}, specs, {})
    except RawImportFailed as error:
        return "import", str(error)
    except ImportFailed as error:
        named = re.match(r"TVM (has no operator|computes)", error.message)
        return ("unsupported" if named else "import"), error.message
    try:
        actual = (run_raw if peer else run)(loaded, feed)
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        return "compile", f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
    why = difference(actual, expected, case.rtol, case.atol)
    return ("wrong", why) if why else ("pass", "")


class RawImportFailed(Exception):
    """TVM's importer raised something."""


def import_raw(model: Any, feed: dict[str, Any]) -> Any:
    """The model through TVM's importer alone, as its tutorials do it."""
    from tvm.relax.frontend.onnx import from_onnx

    from tvmflow.frontends._base import LoadedModel
    from tvmflow.values import TensorSpec

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

    from tvmflow.recipe import Kernels
    from tvmflow.stages import _kernels, _lowering

    target = tvm.target.Target.from_device("cpu").export()
    kernels = Kernels().model_dump(mode="json")
    library = _lowering.compile_untuned(
        loaded.mod, loaded.params, dict(target), kernels, _kernels.SCHEDULES
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
    for index, (ours, theirs) in enumerate(zip(actual, map(np.asarray, expected), strict=True)):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return f"output {index} is {ours.dtype}{ours.shape} instead of {theirs.dtype}{theirs.shape}"
        a, b = ours.astype("float64"), theirs.astype("float64")
        one_sided = int((np.isnan(a) != np.isnan(b)).sum())
        if one_sided:
            return f"output {index} has {one_sided} values that are NaN on one side alone"
        if not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            with np.errstate(all="ignore"):
                return f"output {index} is off by {np.nanmax(np.abs(a - b)):.3g} at {np.nanmax(np.abs(b)):.3g}"
    return ""


def child(kinds: tuple[str, ...], *, peer: bool) -> None:
    """Read test names, one a line; answer each with a line of JSON."""
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
                found = judge(cases[line.strip()], Path(folder), peer=peer)
            except Exception as error:
                found = ("crash", f"{type(error).__name__}: {error}")
        print(json.dumps(found), file=answers, flush=True)


# ---------------------------------------------------------------- the parent


class Child:
    """A process that judges tests, one after the other."""

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


def measure(kinds: tuple[str, ...], match: str, *, peer: bool) -> dict[str, tuple[str, str]]:
    """`(outcome, why)` of every test whose name matches."""
    results: dict[str, tuple[str, str]] = {}
    judge_process = Child(kinds, peer=peer)
    for name in judge_process.names:
        if not re.search(match, name):
            continue
        if not judge_process.alive:
            judge_process.close()
            judge_process = Child(kinds, peer=peer)
        results[name] = judge_process.judge(name)
    judge_process.close()
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
    results = measure(tuple(args.kind or KINDS), args.match, peer=args.peer)
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
    for wanted in args.list:
        for name, (outcome, why) in results.items():
            if outcome == wanted:
                print(f"{outcome}: {name}: {why[:200]}")


if __name__ == "__main__":
    main()
