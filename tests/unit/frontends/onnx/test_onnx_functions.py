"""Functions of a model: their calls compute what ONNX Runtime computes, whatever they bind and wherever they are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import agree, draw, load, open_session, save
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.onnx import _inlining

# each is called on x of 3 rows and 4 columns, some of them negative
MODELS = {
    "defaults, one of them given": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) { y = my.act(x) z = my.act<alpha=2.0>(x) }
<domain: "my", opset_import: ["" : 20]> act <alpha: float = 0.25> (x) => (y)
{ m = Elu<alpha: float = @alpha>(x) y = LeakyRelu<alpha: float = @alpha>(m) }""",
    "defaults of each kind": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (y, z) { y = my.f(x) z = my.f<perm=[0,1], way="none", axis=0, add=float[1] {7.0}>(x) }
<domain: "my", opset_import: ["" : 20]>
f <perm: ints = [1,0], way: string = "tanh", axis: int = 1, add: tensor = float[1] {5.0}> (x) => (y)
{ t = Transpose<perm: ints = @perm>(x) g = Gelu<approximate: string = @way>(t) a = Constant<value: tensor = @add>()
  s = Softmax<axis: int = @axis>(g) y = Add(s, a) }""",
    "references without a value": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) { y = my.f(x) z = my.f<alpha=0.7>(x) }
<domain: "my", opset_import: ["" : 20]> f <alpha> (x) => (y) { y = LeakyRelu<alpha: float = @alpha>(x) }""",
    "functions that call functions": """<ir_version: 10, opset_import: ["" : 20, "my" : 1, "sub" : 3]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z, float[3,4] w)
{ y = sub.outer(x) z = sub.outer<b=0.9>(x) w = sub.outer<b=0.3, c=2.0>(y) }
<domain: "my", opset_import: ["" : 20]> act <alpha: float = 0.25> (x) => (y) { y = LeakyRelu<alpha: float = @alpha>(x) }
<domain: "sub", opset_import: ["" : 20, "my" : 1]> outer <b, c: float = 1.5> (x) => (z)
{ y = my.act<alpha: float = @b>(x) c = Constant<value_float: float = @c>() m = Mul(y, c) z = my.act(m) }""",
    "an operator that came later than the opset": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y) { y = my.f(x) }
<domain: "my", opset_import: ["" : 12]> f (x) => (y)
{ c = Constant<value_int=3>() f = CastLike(c, x) m = Mul(f, x) y = Softmax<axis=-1>(m) }""",
    "optional inputs": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z, float[3,4] w)
{ lo = Constant<value_float=-0.5>() y = my.f(x) z = my.f(x, lo) w = my.f(x, , lo) }
<domain: "my", opset_import: ["" : 20]> f (x, low, high) => (y) { y = Clip(x, low, high) }""",
    "outputs that nobody reads": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,2] y, int64[3,2] i) { a, b = my.f(x) y, i = my.f(a) }
<domain: "my", opset_import: ["" : 20]> f (x) => (v, i)
{ k = Constant<value_ints=[2]>() v, i = TopK(x, k) }""",
    "overloads": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) { y = my.f:a(x) z = my.f:b(x) }
<domain: "my", overload: "a", opset_import: ["" : 20]> f (x) => (y) { y = Neg(x) }
<domain: "my", overload: "b", opset_import: ["" : 20]> f (x) => (y) { y = Abs(x) }""",
    "the name of another domain's operator": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y) { r = Relu(x) q = my.Relu(x) y = Sub(r, q) }
<domain: "my", opset_import: ["" : 20]> Relu (x) => (y) { y = Exp(x) }""",
    "names of the graph inside": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x, float[3,4] y) => (float[3,4] m, float[3,4] o) { m = my.f(y, x) n = my.f(m, x) o = my.f(n, n) }
<domain: "my", opset_import: ["" : 20]> f (x, m) => (o) { y = Neg(x) n = Mul(y, m) o = Sub(n, x) }""",
    "branches and loops inside": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) { y = my.f(x) n = Neg(x) z = my.f<by=3.0>(n) }
<domain: "my", opset_import: ["" : 20]> f <by: float = 2.0> (x) => (z) {
  zero = Constant<value_float=0.0>() s = ReduceSum<keepdims=0>(x) c = Greater(s, zero) k = Constant<value_float: float = @by>()
  a = If (c) <then_branch = t () => (float[3,4] o) { o = Mul(x, k) },
              else_branch = e () => (float[3,4] o) { k2 = Constant<value_float: float = @by>() m = Add(x, k2) o = Mul(m, k) }>
  trips = Constant<value_int=3>() yes = Constant<value = bool {1}>()
  z = Loop (trips, yes, a) <body = b (int64 i, bool d, float[3,4] v) => (bool e, float[3,4] w)
    { e = Identity(d) h = LeakyRelu<alpha: float = @by>(v) w = Add(h, x) }> }""",
    "calls in branches": """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y) {
  zero = Constant<value_float=0.0>() s = ReduceSum<keepdims=0>(x) c = Greater(s, zero)
  y = If (c) <then_branch = t () => (float[3,4] o) { m = my.f(x) o = my.f(m) },
              else_branch = e () => (float[3,4] o) { m = Neg(x) o = my.f<alpha=3.0>(m) }> }
<domain: "my", opset_import: ["" : 12]> f <alpha: float = 0.5> (x) => (y) {
  m = Softmax<axis=1>(x) n = LeakyRelu<alpha: float = @alpha>(x) y = Add(m, n) }""",
}


# beside each model with functions, one without them: ONNX Runtime ignores opsets of functions
OPSETS = {
    "an older opset": (
        """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y) { s = Softmax<axis=0>(x) q = my.f(x) y = Add(s, q) }
<domain: "my", opset_import: ["" : 11]> f (x) => (y)
{ c = Clip(x) s = Softmax<axis=0>(c) r = ReduceSum<axes=[1], keepdims=0>(s) u = Unsqueeze<axes=[1]>(r) y = Add(s, u) }""",
        """<ir_version: 10, opset_import: ["" : 13]>
g (float[3,4] x) => (float[3,4] y) {
  s = Softmax<axis=0>(x) f = Flatten<axis=0>(x) g = Softmax<axis=1>(f) h = Shape(x) i = Reshape(g, h)
  a = Constant<value_ints=[1]>() r = ReduceSum<keepdims=1>(i, a) q = Add(i, r) y = Add(s, q) }""",
    ),
    "the oldest opset": (
        """<ir_version: 10, opset_import: ["" : 18, "my" : 1]>
g (float[3,4] x) => (float[3,4] y) { y = my.f(x) }
<domain: "my", opset_import: ["" : 7]> f (x) => (y)
{ c = Clip<min=-0.5, max=0.5>(x) d = Dropout<ratio=0.3>(c) p = Pad<pads=[0,1,0,1], value=2.0>(d)
  y = Slice<axes=[1], starts=[0], ends=[4]>(p) }""",
        """<ir_version: 3, opset_import: ["" : 7]>
g (float[3,4] x) => (float[3,4] y)
{ c = Clip<min=-0.5, max=0.5>(x) d = Dropout<ratio=0.3>(c) p = Pad<pads=[0,1,0,1], value=2.0>(d)
  y = Slice<axes=[1], starts=[0], ends=[4]>(p) }""",
    ),
    "a newer opset": (
        """<ir_version: 10, opset_import: ["" : 11, "my" : 1]>
g (float[3,4] x) => (float[3,4] y) { s = Softmax<axis=0>(x) r = ReduceSum<axes=[1]>(s) q = my.f(x) y = Add(r, q) }
<domain: "my", opset_import: ["" : 18]> f (x) => (y)
{ a = Constant<value_ints=[1]>() m = ReduceMean(x, a) s = Softmax<axis=0>(x) y = Mul(m, s) }""",
        """<ir_version: 10, opset_import: ["" : 18]>
g (float[3,4] x) => (float[3,4] y) {
  f = Flatten<axis=0>(x) g = Softmax<axis=1>(f) h = Shape(x) i = Reshape(g, h) a = Constant<value_ints=[1]>()
  r = ReduceSum(i, a) m = ReduceMean(x, a) s = Softmax<axis=0>(x) q = Mul(m, s) y = Add(r, q) }""",
    ),
    "opsets of functions that call each other": (
        """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y) { y = my.f(x) }
<domain: "my", opset_import: ["" : 13, "my" : 1]> f (x) => (y) { s = Softmax<axis=0>(x) h = my.h<axis=1>(s) y = Sub(h, s) }
<domain: "my", opset_import: ["" : 12]> h <axis: int = 0> (x) => (y) { t = Transpose<perm=[1, 0]>(x) s = Softmax<axis: int = @axis>(t) y = Transpose<perm=[1, 0]>(s) }""",
        """<ir_version: 10, opset_import: ["" : 20]>
g (float[3,4] x) => (float[3,4] y) { s = Softmax<axis=0>(x) h = Softmax<axis=0>(s) y = Sub(h, s) }""",
    ),
}
# what ONNX Runtime refuses
REFUSED = {
    "graphs as attributes": (
        """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) {
  k = Constant<value_float=3.0>()
  y = my.f <body = b () => (float[3,4] o) { m = Mul(x, k) o = Neg(m) }> (x)
  z = my.f <body = b () => (float[3,4] o) { m = Add(y, k) o = Exp(m) }> (y) }
<domain: "my", opset_import: ["" : 20]> f <body> (x) => (y) {
  k = Constant<value_float=0.0>() s = ReduceSum<keepdims=0>(x) c = Greater(s, k)
  m = If (c) <then_branch: graph = @body, else_branch = e () => (float[3,4] o) { o = Abs(x) }>
  n = If (c) <then_branch = t () => (float[3,4] o) { o = Abs(x) }, else_branch: graph = @body>
  y = Add(m, n) }""",
        """<ir_version: 10, opset_import: ["" : 20]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) {
  k = Constant<value_float=3.0>() zero = Constant<value_float=0.0>()
  m = Mul(x, k) n = Neg(m) s = ReduceSum<keepdims=0>(x) c = Greater(s, zero) a = Abs(x)
  p = Where(c, n, a) q = Where(c, a, n) y = Add(p, q)
  m2 = Add(y, k) n2 = Exp(m2) s2 = ReduceSum<keepdims=0>(y) c2 = Greater(s2, zero) a2 = Abs(y)
  p2 = Where(c2, n2, a2) q2 = Where(c2, a2, n2) z = Add(p2, q2) }""",
    ),
    "outputs that are inputs": (
        """<ir_version: 10, opset_import: ["" : 20, "my" : 1]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) { y, z = my.f(x) }
<domain: "my", opset_import: ["" : 20]> f (x) => (x, y) { y = Neg(x) }""",
        """<ir_version: 10, opset_import: ["" : 20]>
g (float[3,4] x) => (float[3,4] y, float[3,4] z) { y = Identity(x) z = Neg(x) }""",
    ),
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("title", MODELS)
def test_calls_compute_what_onnx_runtime_computes(title: str, sign: int, tmp_path: Path) -> None:
    """Attributes, opsets, names and scopes are those of the call, on both sides of a branch."""
    made = onnx.parser.parse_model(MODELS[title])
    feed = {v.name: sign * (draw(3, 4, seed=n) + 0.2) for n, v in enumerate(made.graph.input)}
    for output in made.graph.output:
        output.type.tensor_type.elem_type = output.type.tensor_type.elem_type or TensorProto.FLOAT
    agree(made, tmp_path, feed)


@pytest.mark.parametrize("title", [*OPSETS, *REFUSED])
def test_functions_compute_what_their_nodes_do(title: str, tmp_path: Path) -> None:
    """An operator means in a function what it means in the opset of the function."""
    made, plain = map(onnx.parser.parse_model, (OPSETS | REFUSED)[title])
    feed = {"x": draw(3, 4)}
    expected = open_session(plain).run(None, feed)
    for own, right in zip(compute(load(made, tmp_path), feed), expected, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("title", OPSETS)
def test_the_reference_keeps_opsets_of_functions(title: str, tmp_path: Path) -> None:
    """It says that ONNX Runtime would not."""
    made, plain = map(onnx.parser.parse_model, OPSETS[title])
    feed = {"x": draw(3, 4)}
    loaded = load(made, tmp_path)
    (scratch := tmp_path / "reference").mkdir()
    with FRONTENDS["onnx"].reference(
        save(made, tmp_path), loaded.inputs, loaded.outputs, threads=1, scratch=scratch
    ) as reference:
        [computed] = reference.run(feed).values()
        assert "inlined" in reference.note
    np.testing.assert_allclose(computed, open_session(plain).run(None, feed)[0], rtol=1e-6)


def test_operators_that_are_expanded_have_their_defaults(tmp_path: Path) -> None:
    """ONNX defines Swish by a function that refers to its alpha."""
    made = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]> g (float[3,4] x) => (float[3,4] y) { y = Swish(x) }'
    )
    agree(made, tmp_path, {"x": draw(3, 4)})


INVALID = {
    "more inputs": (
        "f(x, x)",
        "(x) => (y) { y = Neg(x) }",
        "has 2 inputs, and its function 'f' has 1",
    ),
    "itself": ("f(x)", "(x) => (y) { y = my.f(x) }", "one of the model's functions calls itself"),
    "a value from nowhere": (
        "f(x)",
        "(x) => (y) { y = Neg(z) }",
        "its function 'f': 'Neg' (node with output 'y') reads 'z'",
    ),
    "no value for its output": (
        "f(x)",
        "(x) => (y) { z = Neg(x) }",
        "its function 'f': nothing makes its output 'y'",
    ),
    "a graph in another opset": (
        "f <body = b () => (float[3,4] o) { o = Neg(x) }>(x)",
        "<body> (x) => (y) { s = Softmax(x) c = Constant<value = bool {1}>() y = If (c) <then_branch: graph = @body, else_branch: graph = @body> }",
        "the function 'f' (called by node with output 'y') has the opset 7 and a graph as an attribute",
    ),
}


@pytest.mark.parametrize("title", INVALID)
def test_functions_that_cannot_be_inlined(title: str, tmp_path: Path) -> None:
    """The message names the function."""
    call, body, message = INVALID[title]
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20, "my" : 1]> g (float[3,4] x) => (float[3,4] y) {{ y = my.{call} }}
        <domain: "my", opset_import: ["" : 7, "my" : 1]> f {body}"""
    )
    with pytest.raises(ImportFailed, match=re.escape(message)):
        load(made, tmp_path)


def nest(levels: int, call: str) -> str:
    """Return a call whose body is a call, and so on; `call` has OF for what is inside."""
    inner = "o = Neg(x)"
    for _ in range(levels):
        inner = call.replace("OF", inner)
    return inner.replace("o = ", "y = ", 1)


_BRANCHES = "c = Constant<value = bool {{1}}>() y = If (c) <then_branch{}, else_branch{}>"
_NEG = " = e () => (float[3,4] o) { o = Neg(x) }"
BOMBS = {
    "calls": (
        "y = my.f0(x)",
        [f"f{n} (x) => (y) {{ a = my.f{n + 1}(x) y = my.f{n + 1}(a) }}" for n in range(40)]
        + ["f40 (x) => (y) { y = Neg(x) }"],
        "makes the model one of 1,001 nodes, and the limit is 1,000",
    ),
    "graphs that are attributes": (
        nest(25, "o = my.f <body = b () => (float[3,4] o) { OF }> (x)"),
        [f"f <body> (x) => (y) {{ {_BRANCHES.format(*[': graph = @body'] * 2)} }}"],
        "nodes, and the limit is 1,000",
    ),
    "constants": (
        " ".join(f"t{n} = my.f(x)" for n in range(200)) + " y = Neg(x)",
        [f"f (x) => (y) {{ y = Constant<value = int8[900] {{{'1,' * 899}1}}>() }}"],
        "makes the model hold copies of 100.",
    ),
    "branches": (
        "y = my.f0(x)",
        [
            f"f{n} (x) => (y) {{ {_BRANCHES.format(_NEG.replace('Neg', f'my.f{n + 1}'), _NEG)} }}"
            for n in range(60)
        ]
        + ["f60 (x) => (y) { y = Neg(x) }"],
        "makes the model one of graphs nested more than 30 levels deep",
    ),
}


@pytest.mark.parametrize("title", BOMBS)
def test_functions_that_grow_without_end_are_not_inlined(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call becomes is counted before it does; lower limits keep the test short."""
    monkeypatch.setattr(_inlining, "MAX_NODES", 1000)
    monkeypatch.setattr(_inlining, "_MAX_BYTES", 100_000 if title == "constants" else 1 << 28)
    nodes, bodies, message = BOMBS[title]
    head = '<domain: "my", opset_import: ["" : 20, "my" : 1]> '
    made = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20, "my" : 1]> g (float[3,4] x) => (float[3,4] y) '
        f"{{ {nodes} }} " + " ".join(head + body for body in bodies)
    )
    with pytest.raises(ImportFailed, match=re.escape(message)):
        _inlining.inline_functions(made)
