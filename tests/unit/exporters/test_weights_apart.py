"""`params`: a library without weights takes them from any of the files, and nothing that does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tvmflow
from tests.support import exports
from tests.support.exports import Array, Exported
from tvmflow.errors import BundleError
from tvmflow.weights import read_params


@pytest.fixture(scope="module")
def wanted(exported: Exported) -> Array:
    return exports.reference(exported)


def lean(exported: Exported) -> Path:
    return exported.dist / "digits.lean.tvmflow"


@pytest.mark.parametrize("file", ["digits.safetensors", "digits.params"])
def test_library_and_weights_together_are_the_model(
    exported: Exported, wanted: Array, file: str
) -> None:
    """In either format, the scores are those of the library that carries its weights."""
    module = tvmflow.load(lean(exported), params=exported.dist / file)
    ours = [module.run({"data": x[None]})["softmax_output"] for x in exports.held_out()[0]]
    np.testing.assert_array_equal(np.concatenate(ours), wanted)


def test_tvm_alone_runs_them_in_the_order_of_their_names(exported: Exported, wanted: Array) -> None:
    """What the page says about doing without tvmflow."""
    import tvm

    library = tvm.runtime.load_module(str(exported.dist / "digits.lean.so"))
    weights = tvm.runtime.load_param_dict_from_file(str(exported.dist / "digits.params"))
    ordered = [weights[name] for name in sorted(weights)]
    np.testing.assert_array_equal(exports.scores_of(library, *ordered), wanted)


def test_the_two_files_hold_the_same_and_safetensors_reads_it(exported: Exported) -> None:
    """Ours is a reader of a public format: the format's own reads the same."""
    from safetensors.numpy import load_file

    one = load_file(exported.dist / "digits.safetensors")
    two = read_params(exported.dist / "digits.safetensors")
    three = read_params(exported.dist / "digits.params")
    assert sorted(one) == sorted(two) == sorted(three) and len(one) > 4
    for name, array in one.items():
        np.testing.assert_array_equal(two[name], array)
        np.testing.assert_array_equal(three[name], array)


def test_the_library_without_weights_is_smaller(exported: Exported) -> None:
    """They are nowhere in it."""
    weights = (exported.dist / "digits.params").stat().st_size
    whole, rest = ((exported.dist / f"digits{each}.so").stat().st_size for each in ("", ".lean"))
    assert rest < whole - weights // 2


def test_other_weights_of_the_same_shapes_are_taken(exported: Exported, wanted: Array) -> None:
    """Arrays by name do as well as a file; the scores follow them."""
    weights = dict(read_params(exported.dist / "digits.safetensors"))
    (bias,) = (name for name, array in weights.items() if array.shape == (10,))
    weights[bias] = weights[bias] + np.eye(10, dtype="float32")[3] * 100
    module = tvmflow.load(lean(exported), params=weights)
    scores = module.run({"data": exports.held_out()[0][:1]})["softmax_output"]
    assert scores.argmax() == 3 and scores[0, 3] > 0.999


def test_weights_that_do_not_fit_are_all_named(exported: Exported) -> None:
    """Missing, unknown, of another shape, of another type: one error with every one of them."""
    weights = dict(read_params(exported.dist / "digits.safetensors"))
    first, second, third, *_ = sorted(weights)
    del weights[first]
    weights[second] = weights[second].reshape(-1)
    weights[third] = weights[third].astype("float64")
    weights["surplus"] = np.zeros(1)
    with pytest.raises(BundleError, match="do not fit") as raised:
        tvmflow.load(lean(exported), params=weights)
    for words in (
        "there is no weight 'surplus'",
        f"weight '{first}' is missing",
        f"weight '{second}' is float32 ({weights[second].size},), not float32 (",
        f"weight '{third}' is float64 (",
    ):
        assert words in raised.value.message
    assert raised.value.fix


def test_weights_are_asked_for_and_refused_where_they_do_not_belong(exported: Exported) -> None:
    """Each of the two bundles says which way it is loaded."""
    with pytest.raises(BundleError, match="has no weights of its own") as raised:
        tvmflow.load(lean(exported))
    assert "digits.safetensors" in raised.value.fix
    with pytest.raises(BundleError, match="carries its weights; it takes no others"):
        tvmflow.load(exported.dist / "digits.tvmflow", params=exported.dist / "digits.params")


@pytest.mark.parametrize("suffix", [".safetensors", ".params"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_of_weights_is_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    """Torn, foreign, empty: a sentence with the name, no crash."""
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=f"w{suffix} is not a"):
        read_params(path)


def test_a_torn_file_of_weights_is_named(exported: Exported, tmp_path: Path) -> None:
    """The header is whole and the values are not."""
    path = tmp_path / "torn.safetensors"
    path.write_bytes((exported.dist / "digits.safetensors").read_bytes()[:-8])
    with pytest.raises(BundleError, match=r"torn\.safetensors is not a whole safetensors file"):
        read_params(path)


def test_a_missing_file_of_weights_is_named(exported: Exported) -> None:
    """No file, no traceback."""
    with pytest.raises(BundleError, match=r"there is no file nowhere\.params"):
        tvmflow.load(lean(exported), params="nowhere.params")
