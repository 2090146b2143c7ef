"""Models from the web: fetched once, checked, and stopped without loss."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator

import pytest

from tests.support.project import Project
from tests.support.web import Web, serving


@pytest.fixture
def web(project: Project) -> Iterator[Web]:
    """A server of the project's model, which the recipe now takes from there."""
    path = project.folder / "tiny.onnx"
    body = path.read_bytes()
    path.unlink()
    with serving(body) as server:
        use(project, server, hashlib.sha256(body).hexdigest())
        yield server


def use(project: Project, web: Web, sha256: str) -> None:
    project.write_recipe()
    project.edit_recipe("onnx: tiny.onnx", f"onnx: {web.url}\n  sha256: {sha256}")


def test_a_model_from_the_web_is_fetched_once(project: Project, web: Web) -> None:
    """Planning fetches nothing; the first run fetches; later ones, another stage's too, take what is there."""
    assert project.tvmflow("plan", "tiny.yaml").code == 0
    assert web.requests == []
    first = project.run("--pipeline", "compile")
    assert first.code == 0, first.out + first.err
    assert [event["event"] for event in first.events].count("download") >= 1
    assert len(web.requests) == 1
    project.edit_recipe("samples: 2", "samples: 3")
    assert project.run("--pipeline", "compile").ran == ["verify/host"]
    assert len(web.requests) == 1


def test_a_wrong_digest_says_which_came(project: Project, web: Web) -> None:
    """What came is not what was asked for: exit code 4, both digests, and nothing is run on it."""
    digest = hashlib.sha256(web.body).hexdigest()
    use(project, web, "f" * 64)
    failed = project.tvmflow("run", "tiny.yaml")
    assert failed.code == 4
    assert digest in failed.out and "f" * 64 in failed.out
    assert "import                       BLOCKED" in failed.out


def test_an_interrupted_download_goes_on_where_it_was(project: Project, web: Web) -> None:
    """Ctrl-C while the model comes: exit code 130 at once; the next run asks for the rest alone."""
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
    rest, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert json.loads(rest.splitlines()[-1])["stages"][0]["outcome"] == "cancelled"
    web.slow_s = 0
    project.run("--until", "import")
    assert web.requests[-1].startswith("bytes=")
