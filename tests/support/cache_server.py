"""A strict HTTP cache for tests, with the checks of bazel-remote; it can be slow, die, and return corrupt blobs.

Blobs must have the digest that they are stored under, and every upload a length. Actions must be
`ActionResult` messages, and are returned only while all blobs that they list exist. The messages
are read by protobuf itself, with a descriptor that is built here.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from tests.support.listening import RequestHandler, listening


def _action_result() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="reapi.proto", package="reapi", syntax="proto3")
    kinds = {"string": 9, "int64": 3, "bool": 8, "bytes": 12, "int32": 5}

    def message(name: str, *fields: tuple[int, str, str, bool]) -> None:
        made = file.message_type.add(name=name)
        for number, kind, called, repeated in fields:
            at = made.field.add(name=called, number=number, label=3 if repeated else 1)
            if kind in kinds:
                at.type = kinds[kind]
            else:
                at.type, at.type_name = 11, f".reapi.{kind}"

    message("Digest", (1, "string", "hash", False), (2, "int64", "size_bytes", False))
    message("Worker", (1, "string", "worker", False))
    message(
        "OutputFile",
        (1, "string", "path", False),
        (2, "Digest", "digest", False),
        (4, "bool", "is_executable", False),
    )
    message(
        "ActionResult",
        (2, "OutputFile", "output_files", True),
        (4, "int32", "exit_code", False),
        (5, "bytes", "stdout_raw", False),
        (9, "Worker", "execution_metadata", False),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("reapi.ActionResult"))


ActionResult: Any = _action_result()


@dataclass
class Cache:
    """The content of the server, the requests it got, and how it behaves."""

    url: str = ""
    ac: dict[str, bytes] = field(default_factory=dict)
    cas: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """`METHOD /path` of every request."""
    authorizations: list[str] = field(default_factory=list)
    token: str = ""
    """The Authorization that is required; none when empty."""
    slow_s: float = 0.0
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers to any request."""
    die_after: int = -1
    """How many requests are answered before every connection is dropped."""
    put_status: int = 0
    """The status of the answer to every upload; 0 for the usual one."""

    def list_requests(self, method: str, kind: str = "") -> list[str]:
        return [request for request in self.requests if request.startswith(f"{method} /{kind}")]

    def flip(self, digest: str) -> None:
        """Change one bit of a content."""
        content = bytearray(self.cas[digest])
        content[len(content) // 2] ^= 1
        self.cas[digest] = bytes(content)


@contextlib.contextmanager
def cache_server(prefix: str = "") -> Iterator[Cache]:
    """A server on a free port, for the length of the block."""
    cache = Cache()
    route = re.compile(re.escape(prefix) + r"/(ac|cas)/([0-9a-f]{64})")

    class Handler(RequestHandler):
        def _answer(self, status: int, body: bytes = b"") -> None:
            self.head(status, len(body))
            if self.command != "HEAD":
                self.wfile.write(body)

        def _handle(self) -> None:
            length = self.headers.get("Content-Length")
            body = self.rfile.read(int(length or 0))
            cache.requests.append(f"{self.command} {self.path.removeprefix(prefix)}")
            cache.authorizations.append(self.headers.get("Authorization", ""))
            time.sleep(cache.slow_s)
            if 0 <= cache.die_after < len(cache.requests):
                self.close_connection = True
                return
            matched = route.fullmatch(self.path)
            if cache.statuses:
                self._answer(cache.statuses.pop(0))
            elif cache.token and self.headers.get("Authorization") != cache.token:
                self._answer(401)
            elif not matched:
                self._answer(400)
            elif self.command == "PUT":
                self._answer(*self._put(matched[1], matched[2], length, body))
            else:
                self._answer(*self._get(matched[1], matched[2]))

        def _put(self, kind: str, name: str, length: str | None, body: bytes) -> tuple[int, bytes]:
            if cache.put_status:
                return cache.put_status, b""
            if length is None:
                return 411, b"no Content-Length"
            if kind == "cas":
                if hashlib.sha256(body).hexdigest() != name:
                    return 400, b"wrong digest"
                cache.cas[name] = body
                return 200, b""
            try:
                action = ActionResult.FromString(body)
            except DecodeError:
                return 400, b"not an ActionResult"
            # as bazel-remote does, so nobody may compare the bytes
            action.execution_metadata.worker = "127.0.0.1"
            cache.ac[name] = action.SerializeToString()
            return 200, b""

        def _get(self, kind: str, name: str) -> tuple[int, bytes]:
            content = (cache.ac if kind == "ac" else cache.cas).get(name)
            if content is None:
                return 404, b"not content"
            if kind == "ac":
                with contextlib.suppress(DecodeError):
                    files = ActionResult.FromString(content).output_files
                    if any(file.digest.hash not in cache.cas for file in files):
                        return 404, b"incomplete"
            return 200, content

        do_GET = do_HEAD = do_PUT = _handle

    with listening(Handler) as address:
        cache.url = address + prefix
        yield cache
