"""Credentials for requests: which is sent where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.store.http_client import find_credential, find_hub_credential, may_send_to


def test_credentials_are_sent_over_https_or_to_this_machine() -> None:
    """Never where others may read them."""
    allowed = ["https://example.org/m", "http://127.0.0.1:8000/m", "http://localhost/m"]
    assert all(map(may_send_to, allowed))
    denied = ["http://example.org/m", "file:///m", "http://localhost.example.org/m"]
    assert not any(map(may_send_to, denied))


def test_the_default_entry_of_netrc_is_for_no_host_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe of somebody else may name any host."""
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(
        "machine example.org login ann password hunter2\ndefault login me password hunter3\n"
    )
    known = find_credential("https://example.org/m")
    assert known is not None and known.origin == "~/.netrc"
    assert find_credential("https://example.com/m") is None
    assert find_credential("http://example.org/m") is None


def test_a_token_that_no_header_can_contain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable, not its value."""
    monkeypatch.setenv("HF_TOKEN", "hunter\n2")
    with pytest.raises(EnvironmentProblem, match=r"\$HF_TOKEN contains characters") as caught:
        find_hub_credential("https://huggingface.co")
    assert "hunter" not in str(caught.value)
