"""Completion: bash completes what the table of commands has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tvmflow.cli import commands, main
from tvmflow.targets.presets import NAMES


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main.main(["completion", "bash"]) == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out)
    (tmp_path / "net.yaml").touch()
    return path


def complete(script: Path, *words: str) -> set[str]:
    """Return what bash proposes for the last of the words."""
    line = " ".join(f"'{word}'" for word in ("tvmflow", *words))
    code = f"source ./{script.name}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _tvmflow; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-uc", code], capture_output=True, text=True, check=True, cwd=script.parent
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_values_and_files(script: Path) -> None:
    assert complete(script, "") == {*commands.COMMANDS, "help"}
    assert complete(script, "ru") == {"run", "run-model", "runs"}
    assert complete(script, "help", "expl") == {"explain"}
    assert complete(script, "cache", "p") == {"pins", "push", "pull"}
    assert complete(script, "cache", "gc", "--max") == {"--max-age", "--max-size"}
    assert complete(script, "run", "net.yaml", "--job") == {"--jobs"}
    assert complete(script, "run", "net.yaml", "--target", "aarch64") == {
        name for name in NAMES if name.startswith("aarch64")
    }
    assert complete(script, "run", "net.yaml", "--until", "bu") == {"build"}
    assert complete(script, "explain", "net.yaml", "ver") == {"verify"}
    assert complete(script, "run", "ne") == {"net.yaml"}


def test_every_shell_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert (
        "__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from gc' -l max-age" in fish
    )
    assert main.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert main.main(["completion", "tcsh"]) == 2
    assert "choose bash, fish, zsh" in capsys.readouterr().err
