"""Headless Chromium, where it is installed: a page of a folder is opened, and posts what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tvmflow.targets import browser

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


def run_script(folder: Path, script: str) -> Any:
    """Return what a script returns, as the body of an async function in a page of the folder."""
    program = browser.find_chromium()
    if program is None:
        pytest.skip("Chromium is not installed")
    with browser._Server(folder, _PAGE % script, ()) as server:
        browser._run_chromium(program, server)
    assert "failed" not in server.answer, server.answer["failed"]
    return server.answer["found"]
