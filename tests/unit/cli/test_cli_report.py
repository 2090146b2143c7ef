"""`tvmflow report`: which run or release it takes, and where the page is written."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from tvmflow.cli import main
from tvmflow.core.types import RecipeOrigin
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.run_records import list_ids, record_run
from tvmflow.store.local import LocalStore

LATENCY = dict.fromkeys(("mean", "median", "min", "max", "std"), 1e-3)
FACTS = {
    "passed": True,
    "against": "reference",
    "outputs": {},
    "latency": {"library": LATENCY},
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVMFLOW_STORE", str(tmp_path / "cache"))
    made = LocalStore(str(tmp_path / "cache"))
    made.create()
    return made


def record(store: LocalStore, name: str) -> str:
    """Record a run of a recipe, and return its id."""
    path = Path(f"{name}.yaml").absolute()
    path.write_text("recipe: 1\n")
    stage = StageReport(f"{name}:verify/host", "ran", "never ran", 2.0, dict(FACTS))
    with record_run(store, ["run", path.name]) as recording:
        origins = (RecipeOrigin(name, str(path), str(path)),)
        recording.report = RunReport((stage,), (), (), 2.0, origins=origins)
        recording.exit_code = 0
        recording.release = {
            "gates": [
                {"label": f"{name}/host", "gate": "max_bytes", "limit": 1.0}
                | {"value": 2.0, "is_failed": True}
            ]
        }
    return list_ids(store)[-1]


def test_the_last_run_is_the_default(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its page is in this folder, and has the gates of its release."""
    record(store, "net")
    last = record(store, "other")
    assert main.main(["report"]) == 0
    assert capsys.readouterr().out == f"report-{last}.html\n"
    html = (tmp_path / f"report-{last}.html").read_text()
    assert "<h1>other</h1>" in html and "✗ failed" in html


def test_a_run_or_a_recipe_can_be_named(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = record(store, "net")
    record(store, "other")
    for what in (first, "net.yaml", str(tmp_path / "net.yaml")):
        assert main.main(["report", what, "-o", "page.html", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["subject"] == first
        assert result["bytes"] == (tmp_path / "page.html").stat().st_size
    assert main.main(["report", "net.yaml", "-o", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("absent.yaml", "there is no record of a run of absent.yaml"),
        ("nothing", "there is no run 'nothing'"),
        (".", "is not the folder of a release: it has no release.lock.yaml"),
    ],
)
def test_what_has_no_page_is_an_error(
    what: str, message: str, store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    record(store, "net")
    assert main.main(["report", what]) == 2
    assert message in capsys.readouterr().err


def test_a_page_is_compared_with_what_is_named(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--against`, with the last run before it that measured the same."""
    delivery = tmp_path / "dist" / "net" / "host"
    delivery.mkdir(parents=True)
    (delivery / "measurements.json").write_text(json.dumps(FACTS))
    first, other, last = record(store, "net"), record(store, "other"), record(store, "net")
    for against, name in (
        ([], f"run {first}"),
        (["--against", "last"], f"run {first}"),
        (["--against", "latest~2"], f"run {first}"),
        (["--against", "dist"], "delivery dist"),
    ):
        assert main.main(["report", last, *against, "-o", "page.html", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["against"] == name
        assert f"Compared with {name}" in (tmp_path / "page.html").read_text()
    assert main.main(["report", other, "-o", "page.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"] is None
    assert "Compared with" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("last", "--against last: nothing before run {run} has one of its builds"),
        ("nothing", "there is no file or folder nothing, and no run of this name in "),
        ("net.yaml", "net.yaml:1:1: model: is missing"),
        ("{run}", "the page is about run {run}: it cannot be compared with itself"),
        ("latest", "run {latest} and run {run} have no build in common: other/host; net/host"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    against: str, message: str, store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no page is written."""
    names = {"run": record(store, "net"), "latest": record(store, "other")}
    words = ["report", names["run"], "--against", against.format(**names), "-o", "page.html"]
    assert main.main(words) == 2
    assert message.format(**names) in capsys.readouterr().err
    assert not Path("page.html").exists()


@pytest.mark.parametrize("has_browser", [True, False])
def test_the_page_is_opened(
    has_browser: bool,
    store: LocalStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []

    def open_page(url: str) -> bool:
        opened.append(url)
        return has_browser

    monkeypatch.setattr(webbrowser, "open", open_page)
    record(store, "net")
    assert main.main(["report", "--open", "-o", "a b.html"]) == 0
    assert opened == [(tmp_path / "a b.html").as_uri()]
    assert ("no browser was found: open a b.html" in capsys.readouterr().out) is not has_browser


def test_the_file_of_a_page_has_two_spellings(store: LocalStore) -> None:
    """Those of other commands that write a file, and the short one."""
    record(store, "net")
    for number, option in enumerate(("-o", "--output")):
        assert main.main(["report", option, f"{number}.html"]) == 0
        assert Path(f"{number}.html").is_file()
