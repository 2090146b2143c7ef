"""Mistyped command lines: each message names what was probably meant."""

from __future__ import annotations

import pytest

from tvmflow.cli import main


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rnu net.yaml", "no command `rnu`; did you mean `run`?"),
        ("net.yaml", "no command `net.yaml`; did you mean `run net.yaml`?"),
        ("gc", "no command `gc`; did you mean `cache gc`?"),
        ("unpin", "no command `unpin`; did you mean `cache unpin`?"),
        ("qqqq", "no command `qqqq`\n"),
        ("-v run net.yaml", "the option -v has no command before it"),
        ("help rnu", "no command `rnu`; did you mean `run`?"),
        ("cache gcc", "no command `cache gcc`; did you mean `cache gc`?"),
        ("cache --json", "`tvmflow cache stat --json …`"),
        ("run --taget host net.yaml", "run: no option --taget; did you mean --target?"),
        ("run net.yaml --taget=host", "run: no option --taget; did you mean --target?"),
        ("run net.yaml --job 2", "run: no option --job; did you mean --jobs?"),
        ("run net.yaml -j 2", "run: no option -j; did you mean --jobs?"),
        ("plan net.yaml --jobs 2", "plan: no option --jobs; `build`, `run`, `lock` have it"),
        ("targets net.yaml", "targets: unexpected argument 'net.yaml'"),
        ("cache gc --max-agee 3d", "cache gc: no option --max-agee; did you mean --max-age?"),
        ("run net.yaml --json=3", "run: --json takes no value, and has '3'"),
        ("run-model", "the following arguments are required: BUNDLE\n"),
        ("run", "fix: `tvmflow run [OPTIONS] RECIPE …`"),
    ],
)
def test_the_probable_meaning_is_named(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and a remedy is named."""
    assert main.main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "\n  fix: " in error
