"""Two machines and one remote cache, with the real command and the real stages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cache_server import cache_server
from tests.support.project import Project
from tvmflow.core.files import hash_file

MOTO_VARIABLE = "TVMFLOW_TEST_MOTO"


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hash_file(str(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tvmflow(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TVMFLOW_")}
    return subprocess.run(
        [sys.executable, "-m", "tvmflow", *words],
        cwd=folder,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_remote_cache_on_the_command_line(tmp_path: Path) -> None:
    """run, explain, push and pull of one small stage; mistakes; and no secret in any output."""
    project = Project(tmp_path)
    with cache_server() as cache:
        secret = cache.url.replace("//", "//ann:hunter2@")
        words = ("run", "tiny.yaml", "--until", "import", "--remote", secret)
        # `import` alone: what is shared is the engine's matter, not the stages'
        made = project.tvmflow(*words, "--remote-mode", "both", "--store", "one")
        assert made.code == 0, made.err
        assert f"1 result uploaded to {cache.url}" in made.out
        fetched = project.tvmflow(*words, "--store", "two", "--json")
        assert fetched.outcome("import") == "fetched"
        assert fetched.events[-1]["remote"]["fetched"] == 1
        explained = project.tvmflow("explain", "tiny.yaml", "import", "--store", "two")
        assert f"fetched: {cache.url}, not signed" in explained.out
        # the host target was resolved once for this store, and stays in its notes
        shutil.rmtree(tmp_path / "two/actions")
        shutil.rmtree(tmp_path / "two/cas")
        pulled = project.tvmflow("cache", "pull", "tiny.yaml", "--remote", secret, "--store", "two")
        assert pulled.code == 0, pulled.err
        assert f"1 result fetched from {cache.url}" in pulled.out
        assert "not in the remote cache: tiny:lower/host" in pulled.out
        cache.ac.clear()
        project.environment["TVMFLOW_REMOTE"] = secret
        pushed = project.tvmflow("cache", "push", "--all", "--store", "two", "--json")
        assert pushed.code == 0 and len(cache.ac) == 1, pushed.err
        project.environment["TVMFLOW_REMOTE_MODE"] = "off"
        offline = project.tvmflow("cache", "push", "--all", "--store", "two")
        assert offline.code == 2 and "must not be used" in offline.err
        project.environment["TVMFLOW_REMOTE_MODE"] = "reed"
        wrong = project.tvmflow("run", "tiny.yaml", "--until", "build", "--store", "two")
        assert wrong.code == 2 and "'reed' is not a mode" in wrong.err
    ran = [made, fetched, explained, pulled, pushed, offline, wrong]
    assert all("hunter2" not in result.out + result.err for result in ran)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path


@pytest.mark.slow
def test_a_second_machine_builds_a_model_without_running_anything(
    project: Project, tmp_path: Path
) -> None:
    """With an empty store, every stage is fetched, and the same library is delivered."""
    recipe = str(project.folder / "tiny.yaml")
    with cache_server() as cache:
        started = time.monotonic()
        first = tvmflow(
            tmp_path / "one", "run", recipe, "--remote", cache.url, "--remote-mode", "both"
        )
        assert first.returncode == 0, first.stdout + first.stderr
        first_took = time.monotonic() - started
        started = time.monotonic()
        second = tvmflow(tmp_path / "two", "run", recipe, TVMFLOW_REMOTE=cache.url)
        second_took = time.monotonic() - started
    assert second.returncode == 0, second.stdout + second.stderr
    assert " ran" not in second.stdout and "8 fetched (" in second.stdout
    assert digests(tmp_path / "two/dist") == digests(tmp_path / "one/dist") != {}
    assert second_took < first_took


@pytest.fixture
def s3() -> Iterator[str]:
    """Give the URL of moto's S3 server on a free port, with a bucket `cache`."""
    server = os.environ.get(MOTO_VARIABLE)
    if not server or not shutil.which(server):
        pytest.skip(f"${MOTO_VARIABLE} names no moto_server: pip install 'moto[server]' in its own environment")  # fmt: skip
    pytest.importorskip("obstore")
    port = 5000 + os.getpid() % 20000
    process = subprocess.Popen([server, "-p", str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(
                    urllib.request.Request(f"{url}/cache", method="PUT"), timeout=5
                ).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_results_are_shared_through_s3(s3: str, tmp_path: Path) -> None:
    """As with the other remote caches; a missing bucket and wrong credentials are reported once."""
    Project(tmp_path)
    recipe = str(tmp_path / "tiny.yaml")
    where = {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "hunter2",
        "AWS_SECRET_ACCESS_KEY": "hunter3",
    }
    words = ("run", recipe, "--pipeline", "compile", "--remote", "s3://cache/team")
    first = tvmflow(tmp_path / "one", *words, "--remote-mode", "both", **where)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "4 results uploaded to s3://cache/team" in first.stdout
    second = tvmflow(tmp_path / "two", *words, **where)
    assert second.returncode == 0 and "4 fetched (" in second.stdout, second.stdout + second.stderr
    assert digests(tmp_path / "two/dist") == digests(tmp_path / "one/dist") != {}
    missing = tvmflow(
        tmp_path / "three", "cache", "pull", recipe, "--remote", "s3://nowhere", **where
    )
    assert missing.returncode == 4 and "the bucket does not exist" in missing.stderr
    dead = tvmflow(
        tmp_path / "three", "cache", "pull", recipe, "--remote", "s3://cache",
        **{**where, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert dead.returncode == 4 and "it cannot be connected to" in dead.stderr
    for result in (first, second, missing, dead):
        assert "hunter" not in result.stdout + result.stderr
