"""Headless Chromium, where it is installed: a page of a folder is opened, and posts what it found."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

CHROMIUM: Final = shutil.which("chromium") or shutil.which("google-chrome")
# SwiftShader is an adapter of WebGPU on the CPU.
_FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"),
    *("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"),
)
_PAGE: Final = """<!doctype html><title>test</title><script type="module">
const post = (value) => fetch("/posted", { method: "POST", body: JSON.stringify(value) });
addEventListener("unhandledrejection", (event) => post({ failed: String(event.reason?.stack ?? event.reason) }));
try {
  const found = await (async () => {
%s
  })();
  await post({ found });
} catch (error) {
  await post({ failed: String(error.stack ?? error) });
}
</script>"""


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        self.server.posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.is_done.set()

    def do_GET(self) -> None:
        self.server.addresses.append(self.path)
        super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.posted: Any = None
        self.is_done = threading.Event()
        self.addresses: list[str] = []


def run_script(folder: Path, script: str, *flags: str, timeout: float = 300) -> Any:
    """Return what a script returns, as the body of an async function in a page of the folder."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    (folder / "test.html").write_text(_PAGE % script, encoding="utf-8")
    server = _Server(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = f"http://127.0.0.1:{server.server_port}/test.html"
        command = [
            CHROMIUM,
            *_FLAGS,
            *flags,
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
        ]
        browser = subprocess.Popen(
            [*command, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            assert server.is_done.wait(timeout), f"no answer in {timeout} s"
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
            server.server_close()
    assert "failed" not in server.posted, server.posted["failed"]
    return server.posted["found"]
