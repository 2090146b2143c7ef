"""Requests to web servers: redirects that are safe to follow, and credentials that stay with their host."""

from __future__ import annotations

import string
import urllib.parse
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import (
    FileHandler,
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from tvmflow.core.errors import DownloadError
from tvmflow.core.formatting import count_text
from tvmflow.core.version import VERSION
from tvmflow.store.addresses import (
    InvalidAddress,
    check_address,
    scheme_of,
    token_variable,
    without_secrets,
)
from tvmflow.store.credentials import Credential, may_send_to

RETRYABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which another attempt may succeed."""

ACCESS_DENIED: Final = (401, 403)

BROKEN_ANSWER: Final = (OSError, HTTPException, ValueError)
"""What requests and reading their answers raise: of what is no HTTP, `http.client` raises a ValueError at times."""

_CREDENTIAL: Final = "Authorization"
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 10
_MAX_DIGITS: Final = 19


def open_url(
    url: str, headers: Mapping[str, str], credential: Credential | None, timeout_s: float
) -> Any:
    """Return the response to a GET request; the credential is sent to the host of the URL alone.

    Raises:
        urllib.error.HTTPError: when the status is no success.
        DownloadError: when the server redirects to where it must not.
        OSError: when there is no answer.
    """
    for _ in range(1 + _MAX_REDIRECTS):
        request = Request(url, headers={"User-Agent": f"tvmflow/{VERSION}", **headers})
        request.add_header("Accept-Encoding", "identity")
        if credential:
            request.add_header(_CREDENTIAL, credential.header)
        try:
            return _OPENER.open(request, timeout=timeout_s)
        except HTTPError as answer:
            location = answer.headers.get("Location")
            if answer.code not in _REDIRECTS or location is None:
                raise
            # its body is not read: it may have no end
            answer.close()
        target = redirect_target(url, location)
        if _origin(target) != _origin(url):
            credential = None
        url = target
    raise _refused_redirect(url, f"redirects more than {count_text(_MAX_REDIRECTS, 'time')}")


def redirect_target(url: str, location: str) -> str:
    """Return the URL that a server redirects to.

    Args:
        url: The URL that was requested.
        location: The header `Location` of the answer, which may be anything.

    Raises:
        DownloadError: when it is not a URL, or must not be followed.
    """
    try:
        quoted_location = urllib.parse.quote(
            location, encoding="iso-8859-1", safe=string.punctuation
        )
        target = urllib.parse.urljoin(url, quoted_location)
        before, after = scheme_of(url), scheme_of(target)
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise _refused_redirect(
                url, f"redirects to {without_secrets(target)}, which is not allowed"
            )
        check_address(target)
    except InvalidAddress as error:
        raise _refused_redirect(
            url, f"redirects to {without_secrets(target)}, which is not an address: {error}"
        ) from None
    except ValueError:
        raise _refused_redirect(url, "redirects to something that is not an address") from None
    return target


def header_count(text: str) -> int | None:
    """Return the number in a header such as `Content-Length`; None where it is no number of bytes."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def denial_fix(url: str, credential: Credential | None) -> str:
    """Return what to do when a server denies access to a URL."""
    if credential:
        return f"check that the credentials in {credential.origin} are valid and may read the file"
    if not may_send_to(url):
        return "use an https URL: credentials are not sent over http"
    variable = token_variable(urllib.parse.urlsplit(url).hostname or "")
    netrc = "add its host to ~/.netrc"
    return f"set ${variable} to a token, or {netrc}" if variable else netrc


def _refused_redirect(url: str, reason: str) -> DownloadError:
    return DownloadError(
        f"{without_secrets(url)} {reason}",
        fix="use a URL that is served over http or https, and is not redirected from https to http",
    )


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _make_opener() -> OpenerDirector:
    """Return what sends requests, without urllib's redirects: it reads their bodies, and follows them to invalid addresses."""
    opener = OpenerDirector()
    for handler in (
        ProxyHandler,
        HTTPHandler,
        HTTPSHandler,
        FileHandler,
        UnknownHandler,
        HTTPDefaultErrorHandler,
        HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


_OPENER: Final = _make_opener()
