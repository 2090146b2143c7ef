"""Pages of runs and releases in a real browser: nothing but the file is loaded, and everybody can read them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import Project

pytestmark = pytest.mark.slow

AXE_VARIABLE = "TVMFLOW_TEST_AXE"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium on this machine")

RELEASE = """\
pipeline: 1
name: all
stages: [import, extract_tasks, tune, pick_best, build, export, verify]
recipes: [tiny.yaml]
release: {version: "1.0", folder: releases, gates: {max_bytes: 50000000}}
"""

# What axe-core finds is written where `--dump-dom` shows it.
AXE_CALL = """
<script>
axe.run().then((results) => {
  const violations = results.violations.map((rule) => [rule.id, rule.nodes.map((node) => node.html)]);
  document.body.innerHTML = "<pre id=violations></pre>";
  document.getElementById("violations").textContent = JSON.stringify(violations);
});
</script>
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a tuned run and of its release."""
    project = Project(tmp_path_factory.mktemp("report"))
    project.write_recipe(trials=4, targets=("host", "x86-64-v2"))
    (project.folder / "all.yaml").write_text(RELEASE)
    release = project.folder / "releases/all-1.0"
    path, again = project.folder / "run.html", project.folder / "again.html"
    since = project.folder / "since.html"
    try:
        for words in (
            ("run", "all.yaml"),
            ("report", "tiny.yaml", "-o", str(path)),
            ("report", str(release), "-o", str(again)),
            ("report", "tiny.yaml", "--against", str(release), "-o", str(since)),
        ):
            done = project.tvmflow(*words)
            assert done.code == 0, done.err
        names = ("report", "measurements")
        made = {"run": path, "again": again, "since": since}
        return {**made, **{name: release / f"{name}.html" for name in names}}
    finally:
        project.close()


def browse(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in a browser without a window, which logs everything that goes wrong."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=8000"]
    return subprocess.run(
        [*command, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )


@pytest.mark.nightly
def test_the_pages_have_what_there_is_to_see(pages: dict[str, Path]) -> None:
    """Also of the search; and none is large."""
    run, release = (pages[name].read_text() for name in ("run", "measurements"))
    for html in (run, release):
        assert 'id="tuning-title"' in html and 'id="kernels-title"' in html
        assert "tiny/host" in html and "x86-64-v2" in html and "✓ verified" in html
    assert "✓ passed" in release and "This is the first release." in release
    assert all(path.stat().st_size < 300_000 for path in pages.values())


def test_a_run_is_compared_with_the_release_that_it_made(pages: dict[str, Path]) -> None:
    """The release has the libraries and the measurements of the run: nothing has changed."""
    html = pages["since"].read_text()
    assert "Compared with all-1.0." in html
    assert "Latency unchanged since all-1.0." in html
    assert 'id="changes"' not in html


@needs_chromium
@pytest.mark.parametrize("name", ["run", "again", "since", "report", "measurements"])
def test_a_browser_has_nothing_to_complain_about(
    name: str, pages: dict[str, Path], tmp_path: Path
) -> None:
    """No message on the console, and no request but the file itself."""
    log = tmp_path / "net.json"
    dom = browse(pages[name], "--dump-dom", f"--log-net-log={log}")
    assert "CONSOLE" not in dom.stderr
    # sorting has been added by the page's script
    assert '<button type="button">' in dom.stdout
    assert list_requests(log) - {pages[name].as_uri(), "data:,"} == set()


def list_requests(log: Path) -> set[str]:
    """Return the addresses that pages asked for, without those of the browser itself."""
    content: Any = json.loads(log.read_text())
    kinds = content["constants"]["logEventTypes"]
    starts = [kinds[name] for name in ("URL_REQUEST_START_JOB", "CORS_REQUEST") if name in kinds]
    requests = (entry.get("params", {}) for entry in content["events"] if entry["type"] in starts)
    return {
        params["url"]
        for params in requests
        if params.get("initiator", "").startswith(("file:", "null"))
    }


@needs_chromium
@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("name", ["run", "report", "measurements"])
def test_axe_finds_no_violation(
    name: str, is_dark: bool, pages: dict[str, Path], tmp_path: Path
) -> None:
    """Contrast, names, order and keyboard, in light and dark."""
    axe = Path(os.environ.get(AXE_VARIABLE, "node_modules/axe-core/axe.min.js"))
    if not axe.is_file():
        pytest.skip(f"${AXE_VARIABLE} does not name axe.min.js of the npm package axe-core")
    html = pages[name].read_text()
    # The page's policy would not let axe run.
    html = html.replace('http-equiv="Content-Security-Policy"', 'name="policy"')
    theme = 'id="theme-dark" value="dark"'
    html = html.replace(theme, f"{theme} checked") if is_dark else html
    script = f"<script>{axe.read_text()}</script>{AXE_CALL}"
    page = tmp_path / "page.html"
    page.write_text(html.replace("</body>", f"{script}</body>"))
    dom = browse(page, "--dump-dom").stdout
    violations = dom.partition('<pre id="violations">')[2].partition("</pre>")[0]
    assert violations == "[]"
