"""A server with the part of the interface of S3 by which objects are read, for one bucket."""

from __future__ import annotations

import contextlib
import hashlib
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.listening import RequestHandler, listening


@dataclass
class S3:
    """The objects by their paths, `/BUCKET/KEY`, and the requests."""

    objects: dict[str, bytes] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, instead of the object."""
    break_after: list[int] = field(default_factory=list)
    """How many bytes of the next objects are sent before the connection is dropped."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    url: str = ""


@contextlib.contextmanager
def serving_s3() -> Iterator[S3]:
    """Give a server without objects on a free port."""
    s3 = S3()

    class Handler(RequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path, byte_range = urllib.parse.unquote(self.path), self.headers.get("Range", "")
            s3.requests.append(f"{self.command} {path} {byte_range}".rstrip())
            content = s3.objects.get(path)
            if s3.statuses or content is None:
                self.head(s3.statuses.pop(0) if s3.statuses else 404)
                return
            start = int(byte_range.removeprefix("bytes=").rstrip("-") or 0)
            headers = {
                "ETag": f'"{hashlib.md5(content).hexdigest()}"',
                "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
            }
            if byte_range:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.head(206 if byte_range else 200, len(content) - start, headers)
            if with_body:
                end = s3.break_after.pop(0) if s3.break_after else len(content)
                self.wfile.write(content[start:end])
                self.close_connection = end < len(content)

    with listening(Handler) as s3.url:
        yield s3
