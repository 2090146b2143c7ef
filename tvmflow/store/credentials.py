"""Credentials for requests: tokens of the environment, the token of the Hugging Face Hub, and ~/.netrc.

None of them is printed, stored, part of a key, or sent to another host than it is for.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import netrc
import os
import urllib.parse
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.store.addresses import token_variable

_HUB_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class Credential(NamedTuple):
    """The value of an `Authorization` header, and where it comes from, for messages."""

    header: str
    origin: str


def find_credential(url: str) -> Credential | None:
    """Return the credential of the environment, or else of ~/.netrc, for the host of a URL.

    Raises:
        EnvironmentProblem: when the variable cannot be sent.
    """
    if not may_send_to(url):
        return None
    host = urllib.parse.urlsplit(url).hostname or ""
    variable = token_variable(host)
    if token := os.environ.get(variable, ""):
        return bearer(token, f"${variable}")
    # Its entry `default` is for any host, also for one that a recipe of somebody else names.
    user, password = find_in_netrc(host, with_default=False)
    return Credential(basic(user, password), "~/.netrc") if user else None


def find_hub_credential(endpoint: str) -> Credential | None:
    """Return the token of the Hub where its own tools look for it.

    Raises:
        EnvironmentProblem: when it cannot be sent.
    """
    if not may_send_to(endpoint):
        return None
    for variable in _HUB_VARIABLES:
        if token := os.environ.get(variable, "").strip():
            return bearer(token, f"${variable}")
    path = _hub_token_path()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if token := path.read_text().strip():
            return bearer(token, str(path))
    return None


def _hub_token_path() -> Path:
    """Return the path to which `hf auth login` writes the token."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    return Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH", f"{home}/token"))).expanduser()


def may_send_to(url: str) -> bool:
    """Return whether credentials may be sent to a URL: it is encrypted, or stays on this machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    return parts.hostname == "localhost"


def bearer(token: str, origin: str) -> Credential:
    """Return a token as a credential.

    Raises:
        EnvironmentProblem: when no header can contain it.
    """
    if not token.isascii() or not token.isprintable():
        text = f"{origin} contains characters that cannot be sent"
        raise EnvironmentProblem(text, fix="set it to the token alone, without a line break")
    return Credential(f"Bearer {token}", origin)


def basic(user: str, password: str) -> str:
    """Return the value of an `Authorization` header with user and password."""
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
    return f"Basic {credentials}"


def find_in_netrc(host: str, *, with_default: bool) -> tuple[str, str]:
    """Return user and password for a host in $NETRC or ~/.netrc; empty strings for none."""
    # a file that is missing, not readable or not valid has no credentials
    with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
        entries = netrc.netrc(os.environ.get("NETRC"))
        entry = entries.authenticators(host) if with_default else entries.hosts.get(host)
        if entry:
            return entry[0], entry[2] or ""
    return "", ""
