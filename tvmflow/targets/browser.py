"""Runs a web package in headless Chromium on this machine.

A local server sends the package, a page and the inputs, and receives the outputs. No GPU is needed, because
SwiftShader runs WebGPU on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.core.formatting import excerpt
from tvmflow.core.generated_text import javascript_value

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CHROMIUM_VARIABLE: Final = "TVMFLOW_CHROMIUM"
"""The environment variable with Chromium's path, for a Chromium that is not on PATH."""

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS: Final = (
    *("--headless", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"),
)
# Without a GPU, a kernel takes seconds, and a call runs all kernels.
_PATIENCE_S: Final = 1800.0
_PAGE: Final = "tvmflow-verify.html"
_TEMPLATE: Final = """<!doctype html><title>verify</title><script type="module">
const post = (path, body) => fetch(path, { method: "POST", body });
try {
  const [backend, count] = %s;
  const { load } = await import("./" + %s);
  const { ARRAYS } = await import("./runtime.js");
  const model = await load({ backend });
  for (let batch = 0; batch < count; batch++) {
    const bytes = await (await fetch(`/inputs/${batch}`)).arrayBuffer();
    let begin = 0;
    const values = model.inputs.map(({ name, dtype, shape }) => {
      const end = begin + shape.reduce((product, size) => product * size, ARRAYS[dtype].BYTES_PER_ELEMENT);
      const array = new ARRAYS[dtype](bytes.slice(begin, end));
      begin = end;
      return [name, array];
    });
    const outputs = await model.run(Object.fromEntries(values));
    for (const [place, { name }] of model.outputs.entries()) await post(`/outputs/${batch}/${place}`, outputs[name]);
  }
  await post("/done", JSON.stringify({ version: navigator.userAgent.match(/Chrome\\/[\\d.]+/)?.[0] }));
} catch (error) {
  await post("/done", JSON.stringify({ failed: String(error?.message ?? error) }));
}
</script>"""


def find_chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    named = os.environ.get(CHROMIUM_VARIABLE)
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class BrowserRun(NamedTuple):
    """The bytes of each output by batch and index, and the browser that computed them."""

    outputs: Mapping[tuple[int, int], bytes]
    browser: str


def run_package(
    package: Path, module: str, backend: str, batches: Sequence[Sequence[Array]]
) -> BrowserRun:
    """Run a model's package on batches of inputs; StageError if the package or Chromium fails."""
    program = find_chromium()
    if program is None:
        raise EnvironmentProblem(
            "verify.run_on: chromium needs Chromium, which is not installed",
            fix=f"install Debian's package chromium, or set ${CHROMIUM_VARIABLE} to its path",
        )
    page = _TEMPLATE % (javascript_value([backend, len(batches)]), javascript_value(module))
    with _Server(package, page, batches) as server:
        _run_chromium(program, server)
    if "failed" in server.answer:
        raise StageError(
            f"the package does not run in Chromium by {backend}: {excerpt(str(server.answer['failed']))}",
            fix="report it as a bug of tvmflow, or name the preset wasm32-wasi if it needs a GPU",
        )
    browser = str(server.answer.get("version", "")).replace("Chrome/", "Chromium ")
    return BrowserRun(server.outputs, excerpt(browser))


def _run_chromium(program: str, server: _Server) -> None:
    """Open the page, and wait until it posts the outputs."""
    # Chromium's sandbox does not work for root.
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *_FLAGS, *sandbox, f"--user-data-dir={profile}"]
        log = Path(profile, "log")
        with log.open("wb") as output:
            process = subprocess.Popen([*command, server.address], stdout=output, stderr=output)
        try:
            while not server.is_done.wait(0.1):
                silent_s = time.monotonic() - server.last_request
                if process.poll() is not None or silent_s > _PATIENCE_S:
                    lines = log.read_text(errors="replace").splitlines()[-1:]
                    what = "gives no answer" if process.poll() is None else "ended"
                    raise StageError(
                        f"Chromium {what} while it ran the package: {excerpt(' '.join(lines))}",
                        fix="run it once more with fewer `verify.samples`",
                    )
        finally:
            process.kill()
            process.wait()


class _Server(ThreadingHTTPServer):
    """A server on the loopback interface, as a context manager."""

    daemon_threads = True

    def __init__(self, package: Path, page: str, batches: Sequence[Sequence[Array]]) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(package)))
        self.page = page.encode()
        self.batches = batches
        self.outputs: dict[tuple[int, int], bytes] = {}
        self.answer: Mapping[str, Any] = {}
        self.is_done = threading.Event()
        self.last_request = time.monotonic()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{_PAGE}"

    def __enter__(self) -> _Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.last_request = time.monotonic()
        if self.path == f"/{_PAGE}":
            self._send(self.server.page, "text/html; charset=utf-8")
        elif self.path.startswith("/inputs/"):
            batch = self.server.batches[int(self.path.rpartition("/")[2])]
            self._send(b"".join(array.tobytes() for array in batch), "application/octet-stream")
        else:
            super().do_GET()

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.server.last_request = time.monotonic()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/done":
            self.server.answer = dict(json.loads(content))
        else:
            _, _, batch, place = self.path.split("/")
            self.server.outputs[int(batch), int(place)] = content
        self.send_response(204)
        self.end_headers()
        if self.path == "/done":
            self.server.is_done.set()

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log of requests."""
