"""Headless Chromium, where it is installed: a page of a folder is opened, and posts what it found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from tvmflow.exporters import web
from tvmflow.targets import browser, c_runtime

_PAGE: Final = """<!doctype html><title>test</title><script type="module">
const post = (value) => fetch("/done", { method: "POST", body: JSON.stringify(value) });
try {
  const found = await (async () => {
%s
  })();
  await post({ found });
} catch (error) {
  await post({ failed: String(error.stack ?? error) });
}
</script>"""


def read_modules() -> dict[str, str]:
    """Return the modules that every package with WebGPU has, by their names; the loader is that of no model."""
    modules = {name: web._FOLDER / name for name in ("images.js", "runtime.js", "webgpu.js")}
    loader = (c_runtime._FOLDER / "library.js").read_text()
    texts = {name: path.read_text() for name, path in modules.items()}
    return {**texts, "wasm.js": re.sub(r"%\(\w+\)s", "", loader)}


def run_script(folder: Path, script: str) -> Any:
    """Return what a script returns, as the body of an async function in a page of the folder."""
    program = browser.find_chromium()
    if program is None:
        pytest.skip("Chromium is not installed")
    with browser._Server(folder, _PAGE % script, ()) as server:
        browser._run_chromium(program, server)
    assert "failed" not in server.answer, server.answer["failed"]
    return server.answer["found"]
