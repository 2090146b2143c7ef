"""`params`: a library without weights takes them from any of the files, and nothing that does not fit."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

import tvmflow
from tests.support import exports
from tests.support.exports import Array, Exported
from tvmflow.core import signing
from tvmflow.core.errors import BundleError
from tvmflow.core.files import hash_file
from tvmflow.provenance.statement import make_release_statement
from tvmflow.runtime.statements import PAYLOAD_TYPE
from tvmflow.runtime.weights import read_params


@pytest.fixture(scope="module")
def expected_scores(exported: Exported) -> Array:
    return exports.reference(exported)


def lean(exported: Exported) -> Path:
    return exported.dist / "digits.lean.tvmflow"


@pytest.mark.parametrize("file", ["digits.safetensors", "digits.params"])
def test_library_and_weights_together_are_the_model(
    exported: Exported, expected_scores: Array, file: str
) -> None:
    """In either format, the scores are those of the library that includes its weights."""
    module = tvmflow.load(lean(exported), params=exported.dist / file)
    scores = [module.run({"data": x[None]})["softmax_output"] for x in exports.held_out()[0]]
    np.testing.assert_array_equal(np.concatenate(scores), expected_scores)


def test_tvm_alone_runs_them_in_the_order_of_their_names(
    exported: Exported, expected_scores: Array
) -> None:
    """What the page says about doing without tvmflow."""
    import tvm

    library = tvm.runtime.load_module(str(exported.dist / "digits.lean.so"))
    weights = tvm.runtime.load_param_dict_from_file(str(exported.dist / "digits.params"))
    ordered = [weights[name] for name in sorted(weights)]
    np.testing.assert_array_equal(exports.scores_of(library, *ordered), expected_scores)


def test_the_two_files_hold_the_same_and_safetensors_reads_it(exported: Exported) -> None:
    """The reader of the format's own package reads the same."""
    from safetensors.numpy import load_file

    from_package = load_file(exported.dist / "digits.safetensors")
    from_safetensors = read_params(exported.dist / "digits.safetensors")
    from_params = read_params(exported.dist / "digits.params")
    assert (
        sorted(from_package) == sorted(from_safetensors) == sorted(from_params)
        and len(from_package) > 4
    )
    for name, array in from_package.items():
        np.testing.assert_array_equal(from_safetensors[name], array)
        np.testing.assert_array_equal(from_params[name], array)


def test_weights_in_bfloat16_are_read(tmp_path: Path) -> None:
    """The weights of models in bfloat16, which NumPy alone does not know."""
    import ml_dtypes
    from safetensors.numpy import save_file

    weights = {"w": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)}
    save_file(weights, tmp_path / "w.safetensors")
    [(name, array)] = read_params(tmp_path / "w.safetensors").items()
    assert (name, str(array.dtype)) == ("w", "bfloat16")
    np.testing.assert_array_equal(array, weights["w"])


def test_the_library_without_weights_is_smaller(exported: Exported) -> None:
    """The weights are not in the library."""
    weights = (exported.dist / "digits.params").stat().st_size
    with_weights, without_weights = (
        (exported.dist / f"digits{suffix}.so").stat().st_size for suffix in ("", ".lean")
    )
    assert without_weights < with_weights - weights // 2


def test_other_weights_of_the_same_shapes_are_taken(
    exported: Exported, expected_scores: Array
) -> None:
    """Weights may be arrays by name; the scores follow them."""
    weights = dict(read_params(exported.dist / "digits.safetensors"))
    (bias,) = (name for name, array in weights.items() if array.shape == (10,))
    weights[bias] = weights[bias] + np.eye(10, dtype="float32")[3] * 100
    module = tvmflow.load(lean(exported), params=weights)
    scores = module.run({"data": exports.held_out()[0][:1]})["softmax_output"]
    assert scores.argmax() == 3 and scores[0, 3] > 0.999


def test_weights_that_do_not_fit_are_all_named(exported: Exported) -> None:
    """Missing, unknown, of another shape, of another dtype: one error names all of them."""
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


def test_the_error_says_whether_a_bundle_takes_weights(exported: Exported) -> None:
    """The error of either bundle says how it is loaded."""
    with pytest.raises(BundleError, match="has no weights of its own") as raised:
        tvmflow.load(lean(exported))
    assert "digits.safetensors" in raised.value.fix
    with pytest.raises(BundleError, match="includes its weights and takes no others"):
        tvmflow.load(exported.dist / "digits.tvmflow", params=exported.dist / "digits.params")


@pytest.mark.parametrize("suffix", [".safetensors", ".params"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_of_weights_is_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    """Truncated, foreign, empty: a message with the name, no crash."""
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=f"w{suffix} is not a"):
        read_params(path)


def test_a_truncated_file_of_weights_is_named(exported: Exported, tmp_path: Path) -> None:
    """The header is complete and the values are not."""
    path = tmp_path / "torn.safetensors"
    path.write_bytes((exported.dist / "digits.safetensors").read_bytes()[:-8])
    with pytest.raises(BundleError, match=r"torn\.safetensors is not a complete safetensors file"):
        read_params(path)


def test_a_missing_file_of_weights_is_named(exported: Exported) -> None:
    """No file, no traceback."""
    with pytest.raises(BundleError, match=r"there is no file nowhere\.params"):
        tvmflow.load(lean(exported), params="nowhere.params")


def test_every_type_that_tvm_writes_is_read(tmp_path: Path) -> None:
    """Values, shapes and types are those that were saved."""
    import tvm

    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
    arrays = {name: np.arange(6).reshape(1, 2, 3).astype(name) for name in names}
    arrays["scalar"] = np.float32(7).reshape(())
    tensors = {name: tvm.runtime.tensor(array) for name, array in arrays.items()}
    path = tmp_path / "w.params"
    path.write_bytes(bytes(tvm.runtime.save_param_dict(tensors)))
    read = read_params(path)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)


@pytest.mark.parametrize("suffix", [".safetensors", ".params"])
def test_a_damaged_byte_of_weights_is_an_error_or_another_value(
    exported: Exported, tmp_path: Path, suffix: str
) -> None:
    """Sizes and offsets in the file are not believed: nothing else is raised, and nothing is allocated for them."""
    good, path = (exported.dist / f"digits{suffix}").read_bytes(), tmp_path / f"w{suffix}"
    rng = random.Random(1)
    for _ in range(300):
        content = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            content[rng.randrange(400)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        path.write_bytes(content)
        with contextlib.suppress(BundleError):
            assert sum(array.nbytes for array in read_params(path).values()) <= len(good)


def test_weights_are_loaded_only_if_a_trusted_key_signed_for_them(
    exported: Exported, tmp_path: Path
) -> None:
    """The statement covers the file of weights as it does the bundle."""
    bundle, weights = tmp_path / "digits.lean.tvmflow", tmp_path / "digits.safetensors"
    for path in (bundle, weights):
        path.write_bytes((exported.dist / path.name).read_bytes())
    signing.generate_key(tmp_path / "key")
    digests = {path.name: hash_file(path) for path in (bundle, weights)}
    text = make_release_statement("digits", "1", digests, {})
    signers = [signing.load_private_key(tmp_path / "key")]
    envelope = signing.sign_envelope(PAYLOAD_TYPE, text, signers)
    (tmp_path / "digits.intoto.jsonl").write_text(json.dumps(envelope))
    trusted = tmp_path / "key.pub"
    assert tvmflow.load(bundle, weights, trusted_keys=trusted)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert tvmflow.load(bundle, weights)
    with pytest.raises(BundleError, match=r"digits\.safetensors is not loaded, because no trusted"):
        tvmflow.load(bundle, weights, trusted_keys=trusted)
