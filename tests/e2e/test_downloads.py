"""Models with a URL: downloaded once, verified, and resumed after an interruption."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
from collections.abc import Iterator

import onnx
import pytest

from tests.support.hub import TOKEN, serving_hub
from tests.support.project import Project
from tests.support.web import Web, serving


@pytest.fixture
def web(project: Project) -> Iterator[Web]:
    """Give a server of the project's model, and let the recipe use it."""
    path = project.folder / "tiny.onnx"
    body = path.read_bytes()
    path.unlink()
    with serving(body) as server:
        use(project, server, hashlib.sha256(body).hexdigest())
        yield server


def use(project: Project, web: Web, sha256: str) -> None:
    project.write_recipe()
    project.edit_recipe("onnx: tiny.onnx", f"onnx: {web.url}\n  sha256: {sha256}")


@pytest.mark.slow
def test_a_model_with_a_url_is_downloaded_once(project: Project, web: Web) -> None:
    """Planning downloads nothing; the first run does; later ones use its file."""
    assert project.tvmflow("plan", "tiny.yaml").code == 0
    assert web.requests == []
    first = project.run("--pipeline", "compile")
    assert first.code == 0, first.out + first.err
    assert [event["event"] for event in first.events].count("download") >= 1
    assert len(web.requests) == 1
    project.edit_recipe("samples: 2", "samples: 3")
    assert project.run("--pipeline", "compile").ran == ["verify/host"]
    assert len(web.requests) == 1


def test_a_wrong_digest_is_reported_with_the_actual_one(project: Project, web: Web) -> None:
    """Exit code 4, both digests, and no stage runs on the file."""
    digest = hashlib.sha256(web.body).hexdigest()
    use(project, web, "f" * 64)
    failed = project.call("run", "tiny.yaml")
    assert failed.code == 4
    assert digest in failed.out and "f" * 64 in failed.out
    assert "import                       BLOCKED" in failed.out


@pytest.mark.slow
def test_an_interrupted_download_is_resumed(project: Project, web: Web) -> None:
    """Ctrl-C during the download: exit code 130 at once; the next run requests only the rest."""
    web.body += bytes(16 << 20)
    use(project, web, hashlib.sha256(web.body).hexdigest())
    web.slow_s = 0.05
    process = project.start("--until", "import")
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "download" and event["done"]:
            break
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert json.loads(rest.splitlines()[-1])["stages"][0]["outcome"] == "cancelled"
    web.slow_s = 0
    project.run("--until", "import")
    assert web.requests[-1].startswith("bytes=")


@pytest.mark.slow
def test_a_model_on_the_hub_is_looked_up_once(project: Project) -> None:
    """Weights in a second file, a token, a license: then all works without the Hub, and a copy has the same key."""
    path = project.folder / "tiny.onnx"
    model = onnx.load(path)
    data = {"save_as_external_data": True, "location": "tiny.data", "size_threshold": 0}
    onnx.save(model, path, **data)
    project.environment |= {"HF_TOKEN": TOKEN, "HF_HOME": str(project.folder / "hf")}
    with serving_hub() as hub:
        hub.private = True
        hub.files = {
            name: (project.folder / name).read_bytes() for name in ("tiny.onnx", "tiny.data")
        }
        project.environment["HF_ENDPOINT"] = hub.url
        project.edit_recipe("onnx: tiny.onnx", f"onnx: {hub.address('tiny.onnx')}")
        first = project.run("--pipeline", "compile")
        assert first.code == 0, first.out + first.err
        assert all(token == "" or "/org/net" in path for path, token in hub.requests)
        lock = project.tvmflow("lock", "tiny.yaml", "--pipeline", "compile")
        assert lock.code == 0, lock.err
    bom = json.loads((project.folder / "dist/tiny/host/tiny.cdx.json").read_text())
    assert bom["metadata"]["component"]["licenses"] == [{"expression": "Apache-2.0"}]
    again = project.run("--pipeline", "compile", "--locked")
    assert (again.code, again.ran) == (0, []), again.out + again.err
    project.edit_recipe("samples: 2", "samples: 3")
    assert project.run("--pipeline", "compile").ran == ["verify/host"]
    project.edit_recipe(hub.address("tiny.onnx"), "tiny.onnx")
    assert project.run("--pipeline", "compile").ran == []
    project.edit_recipe("onnx: tiny.onnx", f"onnx: {hub.address('tiny.onnx')}")
    shutil.rmtree(project.folder / "cache")
    offline = project.tvmflow("plan", "tiny.yaml")
    assert offline.code == 4 and offline.err.startswith("tvmflow: tiny.yaml:5:9: hf://org/net/")
    for file in (project.folder / "dist").rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()
    assert (
        TOKEN
        not in first.out
        + first.err
        + lock.out
        + offline.err
        + (project.folder / "tiny.lock.yaml").read_text()
    )


@pytest.mark.slow
def test_weights_in_a_file_that_the_recipe_does_not_name(project: Project) -> None:
    """The first run ends when the model has arrived, with the line to write; with it, the next one succeeds."""
    path = project.folder / "tiny.onnx"
    model = onnx.load(path)
    path.unlink()
    onnx.save(model, path, save_as_external_data=True, location="tiny.onnx_data", size_threshold=0)
    with serving(path.read_bytes()) as web:
        web.others = {"/tiny.onnx_data": path.with_name("tiny.onnx_data").read_bytes()}
        path.unlink()
        path.with_name("tiny.onnx_data").unlink()
        use(project, web, hashlib.sha256(web.body).hexdigest())
        failed = project.run("--pipeline", "compile")
        assert failed.code == 1
        stage = failed.stages["import"]
        assert stage["message"].endswith("which the recipe does not name: tiny.onnx_data")
        pin = re.search(r"write `(files: .*?)` below", stage["fix"])
        assert pin
        project.edit_recipe("\n  sha256:", f"\n  {pin[1]}\n  sha256:")
        assert project.run("--pipeline", "compile").code == 0
        assert len(web.requests) == 2
