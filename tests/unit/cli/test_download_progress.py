"""What is shown while planning downloads a file."""

from __future__ import annotations

import sys

import pytest

from tvmflow.engine.progress import DownloadLine
from tvmflow.store.downloads import DownloadProgress

URL = "hf://org/net/m.onnx@main"
STEPS = [
    DownloadProgress(URL, 1_000_000, 3_000_000),
    DownloadProgress(URL, 3_000_000, 3_000_000),
    DownloadProgress(URL, 3_000_000, 3_000_000),
]


def test_a_log_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Its end, with the size."""
    line = DownloadLine()
    for step in STEPS:
        line(step)
    assert capsys.readouterr().err == f"tvmflow: downloaded {URL} (3.0 MB)\n"


def test_a_terminal_has_a_line_that_is_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced by what follows."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = DownloadLine()
    for step in STEPS[:2]:
        line(step)
    shown = f"\r\x1b[Kdownloading 1.0 of 3.0 MB  {URL}\r\x1b[K"
    assert capsys.readouterr().err == shown
