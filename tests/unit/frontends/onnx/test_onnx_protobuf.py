"""Finding external data without importing onnx, in whatever bytes there are."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.support.onnx_models import classifier, model, value
from tvmflow.frontends.base import NotAModel
from tvmflow.frontends.onnx._header import read_header

MODEL = classifier().SerializeToString()


def external(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=location, data_type=1, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value="4")
    return tensor


def test_all_tensors_are_searched(tmp_path: Path) -> None:
    """Initializers, constants and branches of an If; each file is listed once, sorted."""
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=external("inner"))],
        "t",
        [],
        [value("c", [1])],
    )
    made = model(
        [
            helper.make_node("Constant", [], ["k"], value=external("constant")),
            helper.make_node("If", ["cond"], ["y"], then_branch=inner, else_branch=inner),
        ],
        [value("cond", [], "bool")],
        [value("y", [1])],
    )
    made.graph.initializer.extend([external("zz"), external("constant")])
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    assert read_header(path).data_files == ("constant", "inner", "zz")


def test_planning_does_not_import_onnx(tmp_path: Path) -> None:
    """The import would add a second to every plan."""
    path = tmp_path / "m.onnx"
    path.write_bytes(MODEL)
    code = (
        "import sys; from pathlib import Path; "
        "from tvmflow.frontends.onnx._header import read_header as e; "
        "assert e(Path(sys.argv[1])).data_files == (); print('onnx' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("content", [b"", b"a model", MODEL[: len(MODEL) // 2], b"\x0a\x02ab"])
def test_other_files_are_rejected(tmp_path: Path, content: bytes) -> None:
    """Empty, of another kind, truncated, or without a graph."""
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(NotAModel):
        read_header(path)


def test_more_nodes_than_any_model_has_are_refused(tmp_path: Path) -> None:
    """Reading goes no further."""
    nodes = b"\x0a\x00" * 100_001  # empty messages in GraphProto.node
    size = len(nodes)
    varint = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x3a" + varint + nodes)
    with pytest.raises(NotAModel, match="it has more than 100,000 nodes"):
        read_header(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, len(MODEL) - 1), st.binary(min_size=1, max_size=8))
def test_damaged_files_are_rejected_or_read(tmp_path: Path, at: int, patch: bytes) -> None:
    """Random bytes give locations or NotAModel, and no other error."""
    path = tmp_path / "m.onnx"
    path.write_bytes(MODEL[:at] + patch + MODEL[at + len(patch) :])
    with contextlib.suppress(NotAModel):
        read_header(path)
