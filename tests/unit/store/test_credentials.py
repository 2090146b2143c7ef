"""Credentials for requests: which is sent where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.store.http_client import (
    HttpClient,
    find_credential,
    find_hub_credential,
    may_send_to,
    origin_of,
)
from tvmflow.store.oci import LoginError, log_in, parse_challenges


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


def test_an_origin_is_scheme_host_and_port() -> None:
    """Neither a common domain nor another port of a host makes two hosts one."""
    same = {"https://Shop.co.uk/a", "https://shop.co.uk:443/b", "https://shop.co.uk:/"}
    assert len({origin_of(url) for url in same}) == 1
    others = ["http://shop.co.uk", "https://shop.co.uk:444", "https://evil.co.uk"]
    others += ["https://a.shop.co.uk", "https://shop.co.uk.", "https://shop.co.uk.evil.org"]
    assert len({origin_of(url) for url in (*others, *same)}) == len(others) + 1


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('Bearer realm="a,\\"b",scope=c, Basic realm="d"', [("bearer", "realm"), ("basic", "realm")]),
        ("Negotiate, Basic", [("negotiate",), ("basic",)]),
        ('Negotiate YII=, Bearer realm = "a" ,', [("negotiate",), ("bearer", "realm")]),
        ('realm="a"', []),
        ('Bearer realm="a', [("bearer",)]),
        ("", []),
    ],
)  # fmt: skip
def test_challenges_are_read_up_to_what_is_none(
    header: str, expected: list[tuple[str, ...]]
) -> None:
    """Several in one header, with quotes, with credentials in place of parameters."""
    found = parse_challenges([header])
    assert [(one.scheme, *list(one.values)[:1]) for one in found] == expected


PUBLIC = "https://registry.example.org"


@pytest.mark.parametrize(
    ("host", "realm"),
    [
        ("registry.example.org", "https://evil.org/token"),
        ("registry.example.org", "https://example.org/token"),
        ("registry.example.org", "https://registry.example.org:8443/token"),
        ("registry.example.org", "https://registry.example.org./token"),
        ("registry.example.org", "https://registry.example.org@evil.org/token"),
        ("registry.example.org", "https://evil.org\\.registry.example.org/token"),
        ("registry.example.org", "https://registry.example.org%2eevil.org/token"),
        ("registry.example.org", "https://registry.example.\u043erg/token"),
        ("registry.example.org", "http://registry.example.org/token"),
        ("registry.example.org", "https://auth.docker.io/token"),
        ("registry.example.org", "https://registry.example.org:99999/token"),
        ("registry.example.org", "ftp://registry.example.org/token"),
    ],
)
def test_a_login_is_sent_to_no_other_host(
    host: str, realm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts are compared whole, and no request is made."""
    monkeypatch.setenv("TVMFLOW_TOKEN_REGISTRY_EXAMPLE_ORG", "ann:hunter2")
    monkeypatch.setattr(HttpClient, "request", None)
    challenge = f'Bearer realm="{realm}",service="x",scope="y"'
    with pytest.raises(LoginError, match="as its token server, which is") as caught:
        log_in(host, PUBLIC, [challenge], ("repository:a:pull",), HttpClient(1.0))
    assert "hunter2" not in caught.value.reason + caught.value.fix
    # the registry itself may have the password
    own = log_in(host, PUBLIC, [challenge, 'Basic realm="x"'], (), HttpClient(1.0))
    assert own is not None and own.origin == "$TVMFLOW_TOKEN_REGISTRY_EXAMPLE_ORG"


@pytest.mark.parametrize(
    "realm",
    [
        "http://auth.example.net/t", "https://10.0.0.1/t", "https://[::1]/t", "https://127.1/t",
        "https://0x7f000001/t", "https://intranet/t", "https://a.localhost/t", "http://169.254.169.254/t",
    ],
)  # fmt: skip
def test_a_private_server_is_not_asked_for_a_registry_elsewhere(
    realm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a login, too: the registry would get what the server gives this machine."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(HttpClient, "request", None)
    with pytest.raises(LoginError, match=r"which is a different host than .*, and not"):
        log_in("registry.example.org", PUBLIC, [f'Bearer realm="{realm}"'], (), HttpClient(1.0))
