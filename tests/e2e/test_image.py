"""The container image: what its Dockerfile copies is enough to install tvmflow, and what it keeps is enough to run it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recipes import ROOT


def read_stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage of the Dockerfile, with the arguments at their defaults."""
    stages: list[list[tuple[str, str]]] = []
    arguments: dict[str, str] = {}
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word or word == "#":
            continue
        for name, value in arguments.items():
            rest = rest.replace(f"${{{name}}}", value)
        if word == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif word == "FROM":
            stages.append([])
        else:
            stages[-1].append((word, rest))
    return stages


@pytest.mark.slow
@pytest.mark.nightly
def test_the_steps_of_the_image_give_a_tvmflow_that_runs(tmp_path: Path) -> None:
    """Each step runs in folders of its own in the place of `/src` and `/opt`: no Docker is needed."""
    build, final = read_stages()
    source, opt = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    steps = [rest for word, rest in build if word == "RUN"]
    for rest in (rest for word, rest in build if word == "COPY"):
        *names, destination = rest.split()
        folder = source / destination
        for name in names:
            if (ROOT / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder, ignore=ignore)
            else:
                folder.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, folder)
    for step in steps:
        command = step.replace("/opt/", f"{opt}/").replace(
            "python -m", f"{shlex.quote(sys.executable)} -m", 1
        )
        done = subprocess.run(
            command, shell=True, cwd=source, capture_output=True, text=True, check=False
        )
        if re.search("No matching distribution|Connection|Temporary failure", done.stderr):
            pytest.skip("no package index is reachable")
        assert done.returncode == 0, done.stderr

    # only what the last stage copies stays
    assert [rest for word, rest in final if word == "COPY"] == [
        "--from=build /opt/tvmflow /opt/tvmflow"
    ]
    shutil.rmtree(source)
    project = tmp_path / "project"
    shutil.copytree(ROOT / "recipes" / "models", project / "models")
    recipe = (ROOT / "recipes/digits.yaml").read_text()
    (project / "net.yaml").write_text(recipe.replace("trials: 64", "trials: 0"))
    [entry] = [json.loads(rest) for word, rest in final if word == "ENTRYPOINT"]
    environment = {"PATH": str(opt / "tvmflow/bin"), "HOME": str(tmp_path)}
    environment["XDG_RUNTIME_DIR"] = os.environ.get("XDG_RUNTIME_DIR", "")
    for words, expected in ((["help"], "tvmflow run"), (["run", "net.yaml"], "verified")):
        done = subprocess.run(
            [shutil.which(entry[0], path=environment["PATH"]) or "", *words],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, expected in done.stdout) == (0, True), done.stdout + done.stderr
    assert (project / "dist/digits/host/digits.tvmflow").is_file()
