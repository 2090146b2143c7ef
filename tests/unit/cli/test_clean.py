"""`tvmflow clean` asks before it removes anything."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.support.stored_results import stage_key
from tvmflow.cli import main
from tvmflow.store.local import LocalStore

KEY = stage_key("a")


class Terminal(io.StringIO):
    """A terminal on which somebody has typed an answer."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store with one result, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVMFLOW_STORE", raising=False)
    store = LocalStore("cache")
    store.create()
    with store.claim(KEY.digest) as claim:
        Path(claim.out, "x").write_bytes(b"content")
        store.publish(claim, KEY, {}, 0.5)
    return store


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("", 1)])
def test_a_terminal_is_asked(
    answer: str, code: int, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what and how much would be removed; no answer means no."""
    errors = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", errors)
    assert main.main(["clean"]) == code
    assert "cache: 1 result would be removed, with downloads, logs and notes: " in errors.getvalue()
    assert "Remove? [y/N]" in errors.getvalue()
    assert (store.find(KEY.digest) is None) == (code == 0)


def test_without_a_terminal_nothing_is_removed_unless_it_was_agreed(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the message names both options."""
    assert main.main(["clean"]) == 2
    error = capsys.readouterr().err
    assert "there is no terminal here" in error and "--yes" in error and "--dry-run" in error
    assert main.main(["clean", "--dry-run", "--json"]) == 0
    preview = json.loads(capsys.readouterr().out)
    assert preview["done"] is False and preview["results"] == 1
    assert store.find(KEY.digest) is not None
    assert main.main(["clean", "--yes"]) == 0
    assert "cache: 1 result removed, with downloads" in capsys.readouterr().out
    assert store.find(KEY.digest) is None
