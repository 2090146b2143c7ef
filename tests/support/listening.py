"""The common part of the small web servers of tests: a free port, a thread, and answers with a length."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RequestHandler(BaseHTTPRequestHandler):
    """A handler that prints nothing."""

    protocol_version = "HTTP/1.1"

    def head(self, status: int, length: int = 0, headers: Mapping[str, str] | None = None) -> None:
        """Send the head of an answer whose body has so many bytes."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        # clients close connections in the middle
        return


@contextlib.contextmanager
def listening(handler: type[RequestHandler]) -> Iterator[str]:
    """Give the URL, without a path, of a server on a free port."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
