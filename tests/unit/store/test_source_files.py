"""Files of models are found at addresses, pinned, checked, and downloaded once."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.hub import COMMIT, TOKEN, Hub, serving_hub
from tests.support.registry import docker_registry, front, needs_registry
from tests.support.web import serving
from tvmflow.core.errors import DownloadError, RecipeError
from tvmflow.core.types import InputFile
from tvmflow.release.oci_artifacts import push_artifact
from tvmflow.store.addresses import parse_oci_reference
from tvmflow.store.downloads import download
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles

MODEL = random.Random(0).randbytes(300_000)
DIGEST = hashlib.sha256(MODEL).hexdigest()
WHERE = "net.yaml:4:9"


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as server:
        server.files = {"onnx/model.onnx": MODEL, "config.json": b"{}"}
        server.small = {"config.json"}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def sources(tmp_path: Path) -> SourceFiles:
    return SourceFiles(LocalStore(str(tmp_path / "store")))


def at(url: str, sha256: str = "") -> InputFile:
    return InputFile("model", "", WHERE, url, sha256)


def refusal(sources: SourceFiles, file: InputFile, kind: type = RecipeError) -> tuple[str, str]:
    """Return message and remedy of the error, which begins with the position of the field."""
    with pytest.raises(kind) as caught:
        sources.fetch(sources.resolve(file))
    error = caught.value
    assert isinstance(error, RecipeError | DownloadError)
    assert error.message.startswith(f"{WHERE}: ")
    assert "hunter" not in str(error)
    return error.message.removeprefix(f"{WHERE}: "), error.fix


def test_a_commit_of_the_hub_pins_a_file(hub: Hub, sources: SourceFiles) -> None:
    """One request says its digest, a second one gets it; then none is made, with another object either."""
    file = sources.resolve(at(hub.address("onnx/model.onnx")))
    assert (file.sha256, file.path) == (DIGEST, "")
    assert Path(sources.fetch(file).path).read_bytes() == MODEL
    paths = [path for path, _ in hub.requests]
    assert paths == [
        f"/api/models/org/net/revision/{COMMIT}?blobs=true",
        f"/org/net/resolve/{COMMIT}/onnx/model.onnx",
        "/onnx/model.onnx",
    ]
    again = SourceFiles(sources._store)
    as_the_hub_writes_it = f"hf://org/net@{COMMIT}/onnx/model.onnx"
    for address in (hub.address("onnx/model.onnx"), as_the_hub_writes_it):
        resolved = again.resolve(at(address))
        assert resolved == sources.fetch(file)
    assert len(hub.requests) == 3


def test_a_small_file_of_the_hub_is_checked_by_gits_digest(hub: Hub, sources: SourceFiles) -> None:
    """It is downloaded for its sha256, which is remembered; other content is refused."""
    address = hub.address("config.json")
    file = sources.resolve(at(address))
    assert file.sha256 == hashlib.sha256(b"{}").hexdigest() and file.path
    count = len(hub.requests)
    assert sources.resolve(at(address)) == file
    assert len(hub.requests) == count
    hub.files["other.json"], hub.small = b"{}", {"config.json", "other.json"}
    fresh = SourceFiles(LocalStore(f"{sources._store.root}2"))
    info, hub.files["other.json"] = hub.info(), b"[]"
    hub.info = lambda: info  # type: ignore[method-assign]
    text, _ = refusal(fresh, at(hub.address("other.json")), DownloadError)
    assert "git's digest" in text


@pytest.mark.parametrize("revision", ["main", ""])
def test_a_branch_of_the_hub_is_refused_with_its_commit(
    revision: str, hub: Hub, sources: SourceFiles
) -> None:
    """The remedy is the address to write."""
    text, fix = refusal(sources, at(hub.address("onnx/model.onnx", revision)))
    assert ("is a branch or a tag" in text) == bool(revision)
    assert fix == f"write {hub.address('onnx/model.onnx')}"


def test_names_that_the_hub_does_not_know(hub: Hub, sources: SourceFiles) -> None:
    """Repository, revision and file are told apart, and the nearest file is named."""
    text, fix = refusal(sources, at(hub.address("onnx/modle.onnx")))
    assert text.endswith(
        "the repository has no file 'onnx/modle.onnx' at this commit; did you mean 'onnx/model.onnx'?"
    )
    assert fix == f"its files are listed at {hub.url}/org/net/tree/{COMMIT}"
    text, _ = refusal(sources, at(hub.address("onnx/model.onnx", "f" * 40)))
    assert text.endswith(f"org/net has no revision '{'f' * 40}'; its newest commit is {COMMIT}")
    text, fix = refusal(sources, at(f"hf://org/nett/model.onnx@{COMMIT}"))
    assert text.endswith("the Hub has no repository 'org/nett' that is public")
    assert fix == "check its name; if it is private, set $HF_TOKEN to a token"


def test_a_token_of_the_hub_is_for_the_hub_alone(
    hub: Hub, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent to the Hub, and not to the server that the Hub redirects to."""
    hub.private = True
    refusal(sources, at(hub.address("onnx/model.onnx")))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert sources.fetch(sources.resolve(at(hub.address("onnx/model.onnx")))).path
    assert [token for _, token in hub.requests[-3:]] == [f"Bearer {TOKEN}"] * 2 + [""]
    monkeypatch.setenv("HF_TOKEN", "hf_hunter3")
    fresh = SourceFiles(LocalStore(f"{sources._store.root}2"))
    text, _ = refusal(fresh, at(hub.address("onnx/model.onnx")), DownloadError)
    assert text.endswith("the Hub does not accept the token in $HF_TOKEN")


def test_the_token_file_of_the_hubs_tools_is_read(
    hub: Hub, sources: SourceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message about a token that is not accepted names the file."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text(f"{TOKEN}\n")
    hub.private = True
    assert sources.resolve(at(hub.address("onnx/model.onnx"))).sha256 == DIGEST
    path = tmp_path / "elsewhere"
    path.write_text("hf_hunter3")
    monkeypatch.setenv("HF_TOKEN_PATH", str(path))
    fresh = SourceFiles(LocalStore(f"{sources._store.root}2"))
    text, _ = refusal(fresh, at(hub.address("onnx/model.onnx")), DownloadError)
    assert text.endswith(f"the Hub does not accept the token in {path}")


def test_a_gated_repository_needs_its_terms_accepted(
    hub: Hub, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token planning says so; with one of another account, the download does."""
    hub.gated, hub.accepted = True, False
    text, fix = refusal(sources, at(hub.address("onnx/model.onnx")), DownloadError)
    assert text.endswith("the repository is gated")
    assert (
        fix
        == f"accept its terms at {hub.url}/org/net, and set $HF_TOKEN to a token of that account"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    _, fix = refusal(sources, at(hub.address("onnx/model.onnx")), DownloadError)
    assert fix.startswith(
        f"accept its terms at {hub.url}/org/net with the account of the token in $HF_TOKEN"
    )


def test_a_digest_that_the_hub_does_not_have(hub: Hub, sources: SourceFiles) -> None:
    """The recipe's sha256 is compared with the Hub's before anything is downloaded."""
    text, _ = refusal(sources, at(hub.address("onnx/model.onnx"), "f" * 64))
    assert f"has the digest {DIGEST}, not {'f' * 64}" in text
    assert len(hub.requests) == 1


def test_other_answers_of_the_hub(
    hub: Hub, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary one is tried again; one that denies access says what would give it."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.statuses = [503, 429]
    assert sources.resolve(at(hub.address("onnx/model.onnx"))).sha256 == DIGEST
    fresh = SourceFiles(LocalStore(f"{sources._store.root}2"))
    hub.statuses = [403]
    text, fix = refusal(fresh, at(hub.address("onnx/model.onnx")), DownloadError)
    assert text.endswith(f"the Hub gives no access to {hub.url}/org/net")
    assert fix == "set $HF_TOKEN to a token"
    hub.statuses = [500] * 3
    text, _ = refusal(fresh, at(hub.address("onnx/model.onnx")), DownloadError)
    assert text.endswith("the Hub answers 500 Internal Server Error")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.statuses = [403]
    text, _ = refusal(fresh, at(hub.address("onnx/model.onnx")), DownloadError)
    assert text.endswith(f"the token in $HF_TOKEN gives no access to {hub.url}/org/net")


def test_a_hub_that_is_gone_when_a_file_is_downloaded(
    hub: Hub, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the server, not the organization; without a network nothing is tried."""
    file = sources.resolve(at(hub.address("onnx/model.onnx")))
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    with pytest.raises(DownloadError, match=r"(the host|no answer from) hub\.invalid"):
        download(file.url, file.sha256, Path(sources._store.downloads), retries=0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"no request is sent to the Hub: \$HF_HUB_OFFLINE"):
        sources.fetch(file)


def test_what_a_server_calls_a_digest_is_checked(hub: Hub, sources: SourceFiles) -> None:
    """It would become the name of a file; and the commit is the one that was requested."""
    info, other = hub.info(), {**hub.info(), "sha": "f" * 40}
    info["siblings"][0]["lfs"]["sha256"] = "../../outside"
    for answer in (info, other):
        hub.info = partial(dict, answer)  # type: ignore[method-assign]
        text, fix = refusal(sources, at(hub.address("onnx/model.onnx")), DownloadError)
        assert text.endswith(f"{hub.url} does not answer as the Hub does")
        assert fix == "check $HF_ENDPOINT"


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"sha": ' + b"9" * 5000 + b"}", b"[]", b"\xff"]
)
def test_an_answer_that_is_no_hubs_is_refused(
    body: bytes, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deeply it nests: Python's own reader would end with a RecursionError."""
    with serving(body) as server:
        address = server.url.removesuffix("/model.onnx")
        monkeypatch.setenv("HF_ENDPOINT", address)
        file = at(f"hf://org/net/onnx/model.onnx@{COMMIT}")
        text, _ = refusal(sources, file, DownloadError)
    assert text.endswith(f"{address} does not answer as the Hub does")


@pytest.mark.parametrize("endpoint", ["http://[bad", "hub.example", "ftp://hub.example"])
def test_an_endpoint_that_is_no_url_is_refused(
    endpoint: str, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is wrong, not the recipe."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    file = at(f"hf://org/net/onnx/model.onnx@{COMMIT}")
    text, _ = refusal(sources, file, DownloadError)
    assert "$HF_ENDPOINT" in text


def test_a_license_that_is_no_spdx_expression_is_reported_once(
    hub: Hub, sources: SourceFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """When the commit is looked up."""
    hub.card = {"license": "other", "license_name": "gemma"}
    for _ in range(2):
        sources.resolve(at(hub.address("onnx/model.onnx")))
    [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message.startswith("org/net: the license on the Hub, 'gemma', is not an SPDX expression")


def test_offline_is_an_error_of_the_environment(
    hub: Hub, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the variable, or the server that does not answer."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text, _ = refusal(sources, at(hub.address("onnx/model.onnx")), DownloadError)
    assert text.endswith("no request is sent to the Hub: $HF_HUB_OFFLINE is set")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    text, fix = refusal(sources, at(hub.address("onnx/model.onnx")), DownloadError)
    assert "no answer from http://127.0.0.1:9" in text and "network" in fix
    assert hub.requests == []


def test_a_file_without_digest_is_refused_with_the_one_it_has(sources: SourceFiles) -> None:
    """The remedy is the line to write, and the download is kept for it."""
    with serving(MODEL) as web:
        text, fix = refusal(sources, at(web.url))
        expected = (
            f"{web.url} needs its sha256, so that the model cannot change: now it is {DIGEST}"
        )
        assert text == expected
        assert fix == f"write `sha256: {DIGEST}` below `model`"
        further = at(web.url)._replace(sha256_field="files.model.onnx_data")
        assert f"write `files: {{model.onnx_data: {DIGEST}}}`" in refusal(sources, further)[1]
        served = web.served
        assert sources.resolve(at(web.url, DIGEST)).path.endswith(DIGEST)
        assert web.served == served


def test_tokens_of_web_servers(
    sources: SourceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable of the host, or else ~/.netrc; a redirect to another server gets neither."""
    with serving(MODEL) as web, serving(MODEL) as other:
        web.statuses = [401]
        _, fix = refusal(sources, at(web.url, DIGEST), DownloadError)
        assert fix.startswith(
            "set $TVMFLOW_TOKEN_127_0_0_1 to a token, or add its host to ~/.netrc"
        )
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login ann password hunter2\n")
        monkeypatch.setenv("TVMFLOW_TOKEN_127_0_0_1", "hunter2")
        web.statuses = [403]
        _, fix = refusal(sources, at(web.url, DIGEST), DownloadError)
        assert fix.startswith("check that the credentials in $TVMFLOW_TOKEN_127_0_0_1 are valid")
        monkeypatch.delenv("TVMFLOW_TOKEN_127_0_0_1")
        web.statuses, web.location = [302], other.url
        assert sources.fetch(sources.resolve(at(web.url, DIGEST))).path
        assert web.credentials == ["", "Bearer hunter2", "Basic YW5uOmh1bnRlcjI="]
        assert other.credentials == [""]


def test_a_bucket_without_its_package(
    sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is the command that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    text, fix = refusal(sources, at("s3://models/net.onnx", DIGEST), DownloadError)
    assert "s3://models/net.onnx needs the package obstore" in text
    assert fix == "pip install 'tvmflow[remote]'"


# ---------------------------------------------------------------- registries


@needs_registry
def test_an_artifact_in_a_registry_pins_its_files(sources: SourceFiles, tmp_path: Path) -> None:
    """A tag is refused with the digest that it is now; what was looked up once is not requested again."""
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx/model.onnx").write_bytes(MODEL)
    with docker_registry(tmp_path / "registry") as upstream, front(upstream) as server:
        at_tag = f"oci://{server.host}/org/net:1"
        one = push_artifact(folder, parse_oci_reference(at_tag), sources._store).address
        (folder / "README.md").write_text("read me")
        two = push_artifact(folder, parse_oci_reference(at_tag), sources._store).address
        text, fix = refusal(sources, at(at_tag))
        assert text.endswith("names no digest, and a tag may be moved") and fix == f"write {two}"
        assert sources.pin(at_tag) == two and sources.pin(one) == one
        text, _ = refusal(sources, at(two))
        assert text.endswith(
            ": it has 2 files: write one of #README.md, #onnx/model.onnx behind the address"
        )
        text, _ = refusal(sources, at(f"{two}#model.onnx"))
        assert text.endswith("it has no file 'model.onnx', but #README.md, #onnx/model.onnx")
        text, _ = refusal(sources, at(f"{two}#onnx/model.onnx", "0" * 64))
        assert f"has the digest {DIGEST}, not 0000" in text
        text, _ = refusal(sources, at(one.replace(one[-8:], "00000000")), DownloadError)
        assert "there is no artifact with the digest sha256:" in text
        server.cut_downloads = [100_000]
        for address in (one, f"{two}#onnx/model.onnx"):
            file = sources.fetch(sources.resolve(at(address)))
            assert (file.sha256, Path(file.path).read_bytes()) == (DIGEST, MODEL)
        assert [one.range for one in server.sent("GET", "/blobs/")] == ["", "bytes=100000-"]
    again = SourceFiles(sources._store)
    assert again.resolve(at(one)).path == file.path
    with pytest.raises(RecipeError, match="write it as oci://HOST/NAME"):
        again.resolve(at("oci://registry.example/Net"))


LIES: dict[str, tuple[bytes, str, str]] = {
    "other content": (MODEL[:-1] + b"x", "", "its sha256 is"),
    "shorter": (MODEL[:1000], "", "its sha256 is"),
    "longer": (MODEL + MODEL, "", "its sha256 is"),
    "nothing": (b"", "", "its sha256 is"),
    "redirect to a file": (MODEL, "file:///etc", "file:"),
    "redirect to itself": (MODEL, "{hub}/org/net/resolve/{commit}", "redirect"),
    "redirect to no server": (MODEL, "http://hub.invalid", "hub.invalid"),
    "redirect to no address": (MODEL, "http://[bad", "not an address"),
}
"""Lie -> the content, where the Hub redirects to, and what the message says."""


@pytest.mark.parametrize("lie", LIES)
def test_a_hub_that_lies_of_a_file_leaves_nothing(
    lie: str, hub: Hub, sources: SourceFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own digest is what counts; an honest answer afterwards begins anew, and no token goes elsewhere."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    content, storage, said = LIES[lie]
    info, honest = hub.info(), hub.storage
    hub.info = partial(dict, info)  # type: ignore[method-assign]
    file = sources.resolve(at(hub.address("onnx/model.onnx")))
    hub.files["onnx/model.onnx"] = content
    hub.storage = storage.format(hub=hub.url, commit=COMMIT) or honest
    downloads = Path(sources._store.downloads)
    with pytest.raises(DownloadError) as caught:
        download(file.url, file.sha256, downloads, retries=0)
    assert said in caught.value.message
    assert TOKEN not in str(caught.value)
    assert caught.value.fix
    assert [
        path.name for path in downloads.rglob("*") if path.is_file() and path.stat().st_size
    ] == []
    hub.files["onnx/model.onnx"], hub.storage = MODEL, honest
    assert Path(sources.fetch(file).path).read_bytes() == MODEL
    assert all(not token for path, token in hub.requests if path == "/onnx/model.onnx")
