"""Logins at OCI registries: challenges, token servers, and the credentials that `docker login` keeps.

Credentials belong to the registry that a user addressed. They go to it, and to its token server: the same
scheme, host and port, or one that `$TVMFLOW_AUTH_SERVERS` names for this registry. No server chooses
for what a token is requested, and a token is sent to no other registry than the one it was requested for.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult

from tvmflow.core.documents import Unreadable, get_field, read_file, read_json
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.store.addresses import InvalidAddress, check_address, token_variable, without_secrets
from tvmflow.store.http_client import (
    Credential,
    HttpClient,
    basic,
    bearer,
    find_in_netrc,
    may_send_to,
    origin_of,
)

DOCKER_HUB: Final = ("docker.io", "index.docker.io")
AUTH_SERVERS_VARIABLE: Final = "TVMFLOW_AUTH_SERVERS"

# The public registries whose token server has a host of its own.
_AUTH_SERVERS: Final = {
    "docker.io": "auth.docker.io",
    "index.docker.io": "auth.docker.io",
    "registry-1.docker.io": "auth.docker.io",
    "registry.gitlab.com": "gitlab.com",
}
_HELPER_TIMEOUT_S: Final = 30.0
_MAX_HEADER: Final = 8192
_MAX_TOKEN_ANSWER: Final = 1 << 16
_SEPARATOR: Final = re.compile(r"[ \t,]*")
_WORD: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_IS: Final = re.compile(r"[ \t]*=[ \t]*")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")
# Credentials of a scheme without parameters, such as `Negotiate YII=`.
_TOKEN68: Final = re.compile(r" +[A-Za-z0-9._~+/-]+=*(?=[ \t]*(?:,|$))")


class LoginError(Exception):
    """A login that fails, or that is not tried.

    Attributes:
        reason: Why, for people.
        fix: What to do next.
        status: The status of the token server's answer; 0 for none.
    """

    def __init__(self, reason: str, fix: str = "", status: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix
        self.status = status


class Challenge(NamedTuple):
    """A challenge of a server: the authentication scheme in lowercase, and its parameters."""

    scheme: str
    values: Mapping[str, str]


def parse_challenges(headers: Sequence[str]) -> list[Challenge]:
    """Return the challenges in all `WWW-Authenticate` headers of an answer, up to what is none.

    The time is proportional to the length, which is limited.

    Raises:
        LoginError: when the headers are too long.

    >>> parse_challenges(['Basic realm="a, b", Bearer realm=c , service="d"'])
    [Challenge(scheme='basic', values={'realm': 'a, b'}), Challenge(scheme='bearer', values={'realm': 'c', 'service': 'd'})]
    """
    if (length := sum(map(len, headers))) > _MAX_HEADER:
        text = f"its header WWW-Authenticate has {length:,} characters, more than {_MAX_HEADER:,}"
        raise LoginError(text, "check the address of the registry")
    return [challenge for text in headers for challenge in _parse_header(text)]


def _parse_header(text: str) -> Iterator[Challenge]:
    values: dict[str, str] = {}
    at = _end(_SEPARATOR, text, 0)
    while word := _WORD.match(text, at):
        at = word.end()
        if mark := _IS.match(text, at):
            value = _QUOTED.match(text, mark.end()) or _WORD.match(text, mark.end())
            if value is None:
                return
            plain = _ESCAPE.sub(r"\1", value[1]) if value.re is _QUOTED else value[0]
            values.setdefault(word[0].lower(), plain)
            at = value.end()
        else:
            values = {}
            yield Challenge(word[0].lower(), values)
            at = _end(_TOKEN68, text, at)
        at = _end(_SEPARATOR, text, at)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


# ---------------------------------------------------------------- tokens


def log_in(
    host: str, url: str, headers: Sequence[str], scopes: Sequence[str], client: HttpClient
) -> Credential | None:
    """Return what a registry wants: a token of its server, or user and password; None for neither.

    Args:
        host: The registry, as the user addressed it.
        url: A URL of the registry.
        headers: All `WWW-Authenticate` headers of its answer.
        scopes: What the token is for, such as `repository:a/b:pull`.
        client: What sends the request for the token.

    Raises:
        LoginError: when the headers cannot be followed, or the token server gives no token.
        OSError: when there is no answer. `BROKEN_ANSWER` has what else may be raised.
    """
    own = find_credential(host, url)
    challenges = parse_challenges(headers)
    wants_token = next((one.values for one in challenges if one.scheme == "bearer"), {})
    wants_password = any(one.scheme == "basic" for one in challenges)
    if own and challenges and own.header.startswith("Bearer "):
        return own
    realm = wants_token.get("realm")
    if realm is None:
        return own if wants_password else None
    try:
        server = _check_realm(host, url, realm, own)
    except LoginError:
        if own and wants_password:
            return own
        raise
    return _fetch_token(server, wants_token.get("service"), scopes, own, client)


def _check_realm(host: str, url: str, realm: str, own: Credential | None) -> SplitResult:
    """Return the URL of a token server that a registry names, which may be asked with these credentials.

    Raises:
        LoginError: when it may not.
    """
    shown = excerpt(without_secrets(realm))
    try:
        target = urllib.parse.urljoin(url, realm)
        check_address(target)
        parts = urllib.parse.urlsplit(target)
    except ValueError as error:
        reason = f": {error}" if isinstance(error, InvalidAddress) else ""
        text = f"it names {shown} as its token server, which is not a valid address{reason}"
        raise LoginError(text, "check the address of the registry") from None
    server = parts.netloc.lower()
    if origin_of(target) == origin_of(url):
        return parts
    text = f"it names {shown} as its token server, which is another host than {host}"
    fix = (
        f"if it is the token server of this registry, set ${AUTH_SERVERS_VARIABLE}={host}={server}"
    )
    if not may_send_to(target):
        if own or not _is_listed(host, server):
            raise LoginError(f"{text}, and not encrypted", "use another registry")
    elif _is_listed(host, server):
        return parts
    elif own:
        raise LoginError(f"{text}: the credentials in {own.origin} are not sent there", fix)
    elif parts.scheme != "https" or not _is_domain_name(parts.hostname or ""):
        raise LoginError(f"{text}, and not public", fix)
    return parts


def _is_listed(host: str, server: str) -> bool:
    """Return whether a host is known as the token server of a registry.

    Raises:
        EnvironmentProblem: when the variable that lists them is wrong.
    """
    if _AUTH_SERVERS.get(host.lower()) == server:
        return True
    for entry in os.environ.get(AUTH_SERVERS_VARIABLE, "").replace(",", " ").split():
        registry, is_, named = entry.partition("=")
        if not (registry and is_ and named) or "/" in entry:
            text = f"{quoted(entry)} in ${AUTH_SERVERS_VARIABLE} is not REGISTRY=HOST"
            raise EnvironmentProblem(text, fix="write it as registry.example.org=auth.example.org")
        if (registry.lower(), named.lower()) == (host.lower(), server):
            return True
    return False


def _is_domain_name(host: str) -> bool:
    """Return whether a host is found by DNS: an address, also one in a form such as 127.1, is not."""
    last = host.rstrip(".").rpartition(".")[2]
    return bool(re.fullmatch(r"[a-z][a-z0-9-]*", last)) and last != "localhost" and "." in host


def _fetch_token(
    server: SplitResult,
    service: str | None,
    scopes: Sequence[str],
    own: Credential | None,
    client: HttpClient,
) -> Credential | None:
    """Return a token from a token server; None if it gives no anonymous one."""
    query = [
        (name, value)
        for name, value in urllib.parse.parse_qsl(server.query, keep_blank_values=True)
        if name.lower() not in ("scope", "service")
    ]
    query += [("service", service)] if service else []
    query += [("scope", scope) for scope in scopes]
    url = server._replace(query=urllib.parse.urlencode(query), fragment="").geturl()
    secret = {"Authorization": own.header} if own else {}
    # no redirect is followed: it could lead to a host that was not checked
    with client.request("GET", url, secret) as answer:
        content = answer.read_all(_MAX_TOKEN_ANSWER) if answer.is_success else b"{}"
    with contextlib.suppress(Unreadable, EnvironmentProblem):
        value = read_json(content)
        if token := get_field(value, "token", of=str) or get_field(value, "access_token", of=str):
            return bearer(token, own.origin if own else f"the token of {server.netloc}")
    if own is None:
        return None
    text = f"the token server {server.netloc} gives no token for the credentials in {own.origin}"
    raise LoginError(text, "log in again with `docker login`", answer.status)


# ---------------------------------------------------------------- credentials


def hostname(host: str) -> str:
    """Return the host of `HOST:PORT`."""
    return urllib.parse.urlsplit(f"//{host}").hostname or ""


def find_credential(host: str, url: str) -> Credential | None:
    """Return the credential of the environment, of docker's configuration or of ~/.netrc for a registry.

    Raises:
        EnvironmentProblem: when it cannot be sent.
        LoginError: when it cannot be read.
    """
    if not may_send_to(url):
        return None
    variable = token_variable(hostname(host))
    if text := os.environ.get(variable, "").strip():
        user, colon, password = text.partition(":")
        origin = f"${variable}"
        return Credential(basic(user, password), origin) if colon else bearer(text, origin)
    folder = Path(os.environ.get("DOCKER_CONFIG", "~/.docker")).expanduser()
    for path in (folder / "config.json", Path(os.environ.get("REGISTRY_AUTH_FILE", os.devnull))):
        if path.is_file() and (found := _find_in_config(host, path)):
            return Credential(basic(*found), str(path))
    user, password = find_in_netrc(hostname(host), with_default=False)
    return Credential(basic(user, password), "~/.netrc") if user else None


def _find_in_config(host: str, path: Path) -> tuple[str, str] | None:
    """Return user and password of a registry in a file as `docker login` writes it."""
    name = DOCKER_HUB[-1] if host in DOCKER_HUB else host.lower()
    try:
        config = read_json(read_file(path))
    except Unreadable as error:
        raise LoginError(f"{path} has no credentials: {error}", "log in again") from None
    for entry, value in get_field(config, "auths", of=dict).items():
        # docker's own is https://index.docker.io/v1/
        if name in (entry, entry.partition("://")[2].partition("/")[0]):
            with contextlib.suppress(ValueError):
                text = base64.b64decode(get_field(value, "auth", of=str), validate=True).decode()
                user, colon, password = text.partition(":")
                if colon:
                    return user, password
    helper = get_field(config, "credHelpers", name, of=str) or get_field(
        config, "credsStore", of=str
    )
    return _ask_helper(f"docker-credential-{helper}", name) if helper else None


def _ask_helper(program: str, host: str) -> tuple[str, str] | None:
    """Return user and password from a program that keeps them for docker."""
    server = f"https://{host}/v1/" if host in DOCKER_HUB else host
    try:
        done = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=_HELPER_TIMEOUT_S
        )
        value = read_json(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired, Unreadable) as error:
        text = f"{excerpt(program)}, which docker's configuration names, does not work"
        raise LoginError(f"{text}: {type(error).__name__}", "install it, or log in again") from None
    user, secret = get_field(value, "Username", of=str), get_field(value, "Secret", of=str)
    # `<token>` comes with a token for a protocol of its own
    return (user, secret) if user and user != "<token>" else None
