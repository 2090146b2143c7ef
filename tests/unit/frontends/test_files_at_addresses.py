"""Models whose files are at addresses: which files they are, and what pins each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from tests.support.hub import COMMIT, Hub, serving_hub
from tests.support.web import serving
from tvmflow.core.errors import DownloadError, RecipeError
from tvmflow.core.types import InputFile, StageSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import Where
from tvmflow.planning.decisions import PlanState
from tvmflow.recipe._model_fields import ModelSource
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles

WEIGHTS = b"\0" * 64
SYMBOL = b'{"nodes": [{"op": "null", "name": "data", "inputs": []}], "heads": [[0, 0, 0]], "arg_nodes": [0]}'


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def model_with_data(location: str = "weights/model.onnx_data") -> bytes:
    """Return a model that adds a weight, which is in another file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[16])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, [16])],
        [value("y", TensorProto.FLOAT, [16])],
        [weight],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return bytes(made.SerializeToString())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as server:
        server.files = {"onnx/m.onnx": model_with_data(), "onnx/weights/model.onnx_data": WEIGHTS}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield server


@pytest.fixture
def sources(tmp_path: Path) -> SourceFiles:
    return SourceFiles(LocalStore(str(tmp_path / "store")))


def where(*path: str) -> str:
    return f"net.yaml:{'.'.join(path)}"


def files(sources: SourceFiles, source: ModelSource, base: Path | None = None) -> list[InputFile]:
    position: Where = where
    return list(FRONTENDS[source.kind].files(source, base or Path(), position, sources))


def pins(resolved: list[InputFile]) -> dict[str, str]:
    return {file.role: file.sha256 for file in resolved}


def test_external_data_on_the_hub_needs_no_digest(
    hub: Hub, sources: SourceFiles, tmp_path: Path
) -> None:
    """The header names it, the commit pins it; a copy in a folder has the same digests, so the same key."""
    source = ModelSource(onnx=hub.address("onnx/m.onnx"))
    resolved = files(sources, source)
    assert pins(resolved) == {
        "model": digest(model_with_data()),
        "external/weights/model.onnx_data": digest(WEIGHTS),
    }
    assert resolved[1].url == hub.address("onnx/weights/model.onnx_data")
    contents = {file.role: Path(sources.fetch(file).path).read_bytes() for file in resolved}
    assert contents["external/weights/model.onnx_data"] == WEIGHTS
    count = len(hub.requests)
    assert pins(files(SourceFiles(sources._store), source)) == pins(resolved)
    assert len(hub.requests) == count
    (tmp_path / "weights").mkdir()
    (tmp_path / "m.onnx").write_bytes(contents["model"])
    (tmp_path / "weights/model.onnx_data").write_bytes(WEIGHTS)
    copies = files(sources, ModelSource(onnx="m.onnx"), tmp_path)
    assert {file.role: digest(Path(file.path).read_bytes()) for file in copies} == pins(resolved)


def test_a_missing_file_of_a_set_on_the_hub(hub: Hub, sources: SourceFiles) -> None:
    """The model names it, and the repository does not have it."""
    del hub.files["onnx/weights/model.onnx_data"]
    with pytest.raises(RecipeError, match=r"net\.yaml:onnx: .*no file 'onnx/weights/model"):
        files(sources, ModelSource(onnx=hub.address("onnx/m.onnx")))


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../b", ""])
def test_external_data_at_an_address_stays_in_its_folder(
    location: str, hub: Hub, sources: SourceFiles
) -> None:
    """Nothing else of the server is requested for a model of somebody else."""
    hub.files["onnx/m.onnx"] = model_with_data(location)
    with pytest.raises(RecipeError, match=r"net\.yaml:onnx: .* refers to data outside its folder"):
        files(sources, ModelSource(onnx=hub.address("onnx/m.onnx")))
    assert len(hub.requests) == 3


def test_external_data_on_a_web_server_is_pinned_by_name(sources: SourceFiles) -> None:
    """With all digests, nothing is downloaded to plan; then the header is compared with them."""
    with serving(model_with_data()) as web:
        one = {"onnx": web.url, "sha256": digest(web.body)}
        both = {**one, "files": {"weights/model.onnx_data": digest(WEIGHTS)}}
        resolved = files(sources, ModelSource(**both))
        assert [file.url for file in resolved] == [
            web.url,
            web.url.replace("model.onnx", "weights/model.onnx_data"),
        ]
        assert web.requests == []
        sources.fetch(resolved[0])
        assert pins(files(sources, ModelSource(**both))) == pins(resolved)
        web.body = WEIGHTS
        with pytest.raises(RecipeError, match="needs its sha256") as caught:
            files(sources, ModelSource(**one))
        pin = f"write `files: {{weights/model.onnx_data: {digest(WEIGHTS)}}}` below `model`"
        assert caught.value.fix == pin
        with pytest.raises(RecipeError) as wrong:
            files(sources, ModelSource(**one, files={"model.onnx_data": digest(WEIGHTS)}))
        assert wrong.value.message == (
            "net.yaml:files.model.onnx_data: model.files: the model has no external data in "
            "'model.onnx_data'; did you mean 'weights/model.onnx_data'?"
        )


def test_all_digests_of_a_model_with_external_data_are_named_at_once(sources: SourceFiles) -> None:
    """The model is downloaded for its own digest, and so says what else it needs."""
    location = "weights/a: b.data"
    with serving(model_with_data(location)) as web:
        web.others = {"/weights/a%3A%20b.data": WEIGHTS}
        with pytest.raises(RecipeError) as caught:
            files(sources, ModelSource(onnx=web.url))
        own, data = digest(web.body), digest(WEIGHTS)
        assert len(caught.value.problems) == 2
        assert caught.value.fix == (
            f'write `sha256: {own}` and `files: {{"{location}": {data}}}` below `model`'
        )
        pinned = ModelSource(onnx=web.url, sha256=own, files={location: data})
        resolved = files(sources, pinned)
        assert all(file.path for file in resolved)
        assert FRONTENDS["onnx"].find_unnamed_files(resolved) == ()
        assert len(web.requests) == 2


def test_external_data_that_only_the_downloaded_model_names_is_reported_with_its_digest(
    sources: SourceFiles,
) -> None:
    """The recipe pins the model alone, or not all of its files: what was planned cannot be complete."""
    with serving(model_with_data()) as web:
        web.others = {"/weights/model.onnx_data": WEIGHTS}
        planned = files(sources, ModelSource(onnx=web.url, sha256=digest(web.body)))
        assert [file.role for file in planned] == ["model"]
        fetched = [sources.fetch(file) for file in planned]
        unnamed = FRONTENDS["onnx"].find_unnamed_files(fetched)
        with pytest.raises(RecipeError) as caught:
            sources.check_complete(fetched, unnamed)
        assert caught.value.message == (
            f"net.yaml:onnx: {web.url} has weights in further files, which the recipe does not name: "
            "weights/model.onnx_data"
        )
        pin = f"files: {{weights/model.onnx_data: {digest(WEIGHTS)}}}"
        assert caught.value.fix == f"write `{pin}` below `model`"
        web.statuses = [404]
        web.others = {}
        with pytest.raises(RecipeError, match="404"):
            other = [file._replace(url=f"{file.url}_2") for file in unnamed]
            sources.check_complete(fetched, other)


@pytest.mark.parametrize("kind", ["mxnet", "pytorch", "tflite"])
def test_a_recipe_names_all_files_of_other_models(kind: str) -> None:
    assert FRONTENDS[kind].find_unnamed_files([InputFile("model", "m", "net.yaml:1:1")]) == ()


def test_a_name_may_be_written_in_several_ways(hub: Hub, sources: SourceFiles) -> None:
    """The same file has one role, with its digest written in the recipe or not, and is imported."""
    hub.files["onnx/m.onnx"] = model_with_data("./weights/model.onnx_data")
    source = ModelSource(
        onnx=hub.address("onnx/m.onnx"), files={"weights/model.onnx_data": digest(WEIGHTS)}
    )
    before = files(sources, source)
    assert [file.path for file in before] == ["", ""]
    paths = {file.role: Path(sources.fetch(file).path) for file in before}
    assert pins(files(sources, source)) == pins(before)
    assert FRONTENDS["onnx"].load(paths, ()).params["w"].tobytes() == WEIGHTS


def test_further_files_in_a_folder_may_be_pinned(sources: SourceFiles, tmp_path: Path) -> None:
    """Their digests are checked like those of the model."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "m.onnx").write_bytes(model_with_data())
    (tmp_path / "weights/model.onnx_data").write_bytes(WEIGHTS)
    source = ModelSource(onnx="m.onnx", files={"weights/model.onnx_data": "f" * 64})
    _, data = files(sources, source, tmp_path)
    assert (data.sha256, data.sha256_where) == ("f" * 64, "net.yaml:files.weights/model.onnx_data")
    spec = StageSpec("net:import", "import", "net", "", 1, {}, (data,), (), (), 1.0)
    with pytest.raises(RecipeError) as caught:
        PlanState(sources._store).digest_files(spec)
    assert caught.value.message.startswith(
        "net.yaml:files.weights/model.onnx_data: model.files.weights/model.onnx_data: "
    )


def test_a_checkpoint_of_mxnet_is_two_files(hub: Hub, sources: SourceFiles) -> None:
    """On the Hub the commit pins both; elsewhere each needs its digest, and both are named at once."""
    hub.files = {"digits-symbol.json": SYMBOL, "digits-0010.params": WEIGHTS}
    hub.small = {"digits-symbol.json"}
    prefix = f"hf://org/net/digits@{COMMIT}"
    resolved = files(sources, ModelSource(mxnet={"prefix": prefix, "epoch": 10}))
    assert pins(resolved) == {"symbol": digest(SYMBOL), "params": digest(WEIGHTS)}
    assert [file.where for file in resolved] == ["net.yaml:mxnet.prefix", "net.yaml:mxnet.epoch"]
    with serving(SYMBOL) as web:
        checkpoint = {"prefix": web.url.replace("model.onnx", "digits"), "epoch": 10}
        with pytest.raises(RecipeError) as caught:
            files(sources, ModelSource(mxnet=checkpoint))
        assert len(caught.value.problems) == 2
        pin = f"digits-symbol.json: {digest(SYMBOL)}, digits-0010.params: {digest(SYMBOL)}"
        assert caught.value.fix == f"write `files: {{{pin}}}` below `model`"
        pinned = {"digits-symbol.json": digest(SYMBOL), "digits-0010.params": digest(SYMBOL)}
        source = ModelSource(mxnet=checkpoint, files=pinned)
        assert set(pins(files(sources, source)).values()) == {digest(SYMBOL)}


def test_a_hub_that_does_not_answer_is_an_error_with_its_place(
    hub: Hub, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning needs the digests, so that it says what to do."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"net\.yaml:onnx: hf://org/net/onnx/m\.onnx@"):
        files(sources, ModelSource(onnx=hub.address("onnx/m.onnx")))
