"""Requests to web servers: redirects that are safe to follow, and credentials that stay with their host."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import IO, Any, Final
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tvmflow.core.errors import DownloadError
from tvmflow.core.version import VERSION
from tvmflow.store.addresses import token_variable, without_secrets
from tvmflow.store.credentials import Credential, may_send_to

RETRYABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which another attempt may succeed."""

ACCESS_DENIED: Final = (401, 403)
_CREDENTIAL: Final = "Authorization"


def open_url(
    url: str, headers: Mapping[str, str], credential: Credential | None, timeout_s: float
) -> Any:
    """Return the response to a GET request; the credential is sent to the host of the URL alone.

    Raises:
        urllib.error.HTTPError: when the status is no success.
        DownloadError: when the server redirects to where it must not.
        OSError: when there is no answer.
    """
    request = Request(url, headers={"User-Agent": f"tvmflow/{VERSION}", **headers})
    request.add_header("Accept-Encoding", "identity")
    if credential:
        request.add_unredirected_header(_CREDENTIAL, credential.header)
    return _OPENER.open(request, timeout=timeout_s)


def denial_fix(url: str, credential: Credential | None) -> str:
    """Return what to do when a server denies access to a URL."""
    if credential:
        return f"check that the credentials in {credential.origin} are valid and may read the file"
    if not may_send_to(url):
        return "use an https URL: credentials are not sent over http"
    variable = token_variable(urllib.parse.urlsplit(url).hostname or "")
    netrc = "add its host to ~/.netrc"
    return f"set ${variable} to a token, or {netrc}" if variable else netrc


class _Redirects(HTTPRedirectHandler):
    """Follows redirects, except from https to http and to other schemes."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        """Return the request of a redirect, as `urllib` expects it.

        Raises:
            DownloadError: when the redirect is not allowed.
        """
        before, after = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise DownloadError(
                f"{without_secrets(req.full_url)} redirects to {without_secrets(newurl)}, which is not allowed",
                fix="use a URL that is served over http or https, and is not redirected from https to http",
            )
        followed = super().redirect_request(req, fp, code, msg, headers, newurl)
        header = req.unredirected_hdrs.get(_CREDENTIAL)
        if followed and header and _origin(req.full_url) == _origin(newurl):
            followed.add_unredirected_header(_CREDENTIAL, header)
        return followed


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc.lower()


_OPENER: Final = build_opener(_Redirects)
