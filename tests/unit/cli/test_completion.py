"""Completion: shells complete what the table of commands has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvmflow.cli import commands, main
from tvmflow.targets.presets import NAMES


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main.main(["completion", "bash"]) == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out)
    for name in ("net.yaml", "new net.yaml"):
        (tmp_path / name).touch()
    return path


def complete(script: Path, *words: str) -> set[str]:
    """Return what bash proposes for the last of the words, by the function that the script registers."""
    line = " ".join(f"'{word}'" for word in ("tvmflow", *words))
    code = (
        f"source ./{script.name}; [[ $(complete -p tvmflow) =~ -F\\ ([^ ]+) ]];"
        f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; ${{BASH_REMATCH[1]}}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        ["bash", "-uc", code], capture_output=True, text=True, check=True, cwd=script.parent
    )
    assert done.stderr == ""
    return set(done.stdout.splitlines())


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
    assert complete(script, "run", "ne") == {"net.yaml", "new net.yaml"}
    assert complete(script, "run", "net.yaml", "--keep-going", "net") == {"net.yaml"}
    assert complete(script, "run", "--store", "cache", "net") == {"net.yaml"}
    assert complete(script, "run", "--pipeline", "") >= {"compile", "tune", "net.yaml"}
    assert complete(script, "completion", "z") == {"zsh"}


def test_every_shell_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    """A ~/.zshrc may have one line for it, whether or not completion is enabled there."""
    assert main.main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert "-n '_shtab_tvmflow_using cache gc' -l max-age" in fish
    assert main.main(["completion", "zsh"]) == 0
    zsh = capsys.readouterr().out
    assert zsh.startswith("#compdef tvmflow\n")
    assert zsh.index("compinit") < zsh.index("compdef _shtab_tvmflow")
    assert main.main(["completion", "tcsh"]) == 2
    assert "choose bash, fish, zsh" in capsys.readouterr().err


def test_other_commands_do_not_import_what_writes_scripts() -> None:
    """Nor does the help of this one."""
    code = (
        "import sys; from tvmflow.cli import main; main.main(['completion', '--help']);"
        "print('shtab' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
