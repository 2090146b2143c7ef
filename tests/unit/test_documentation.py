"""The pages of the documentation: links, blocks of code, the command reference, the navigation of the site."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # noqa: TID251 - of other tools, with values that recipes refuse

from tests.support.pages import PAGES, ROOT, Block, blocks, commands, matches, tvmflow_arguments
from tools.check_site import external_requests
from tools.command_reference import commands_page
from tools.message_index import messages_page
from tvmflow.cli.commands import COMMANDS, load_all_commands
from tvmflow.cli.main import parse
from tvmflow.cli.parser import CommandParser
from tvmflow.core.errors import UsageError
from tvmflow.planning.recipes import PipelineFile
from tvmflow.recipe import Recipe
from tvmflow.recipe.yaml_files import read_yaml

BLOCKS = [block for page in PAGES for block in blocks(page)]
KINDS = {
    "",  # a drawing
    "c", "cmake", "console", "cpp", "groovy", "html", "java", "js", "json", "make", "nginx", "python", "swift",
    "text", "toml", "yaml",
}  # fmt: skip
URL = "https://github.com/tvmflow/tvmflow/blob/main/"
GENERATED = {ROOT / "docs/commands.md", ROOT / "docs/messages.md"}
"""Pages that tools/site_hooks.py makes for the site."""


def of_kind(*kinds: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind in kinds]


def parametrize(*kinds: str) -> pytest.MarkDecorator:
    listed = of_kind(*kinds)
    return pytest.mark.parametrize("block", listed, ids=[block.place for block in listed])


def test_every_block_has_a_known_kind_and_a_known_marker() -> None:
    """A block that is not run says why; a console block without one is run."""
    assert {block.kind for block in BLOCKS} <= KINDS
    for block in BLOCKS:
        if block.marker == "not run":
            assert len(block.value) > 10, f"{block.place}: a reason"
        if block.kind == "text":
            assert block.marker == "not run", f"{block.place}: where is this output from?"


@parametrize("console")
def test_commands_are_valid(block: Block) -> None:
    """The shell can parse them, and each command of tvmflow has arguments that its parser knows."""
    script = "\n".join(command.line for command in commands(block)).replace("…", "")
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.place}: {done.stderr}"
    for words in tvmflow_arguments(block):
        arguments = [word.replace("…", "RECIPE") for word in words]
        try:
            parse(arguments)
        except UsageError as error:
            pytest.fail(f"{block.place}: tvmflow {' '.join(words)}: {error}")


@parametrize("yaml")
def test_yaml_is_valid(block: Block, tmp_path: Path) -> None:
    """It can be read, and has fields of recipes or of pipelines only; other tools' files are marked so."""
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    if block.marker == "not run" or block.value.endswith(".yml"):
        assert yaml.safe_load(block.text)
        return
    document = read_yaml(path)
    assert not document.problems, block.place
    fields = set(document.value)
    assert fields <= set(Recipe.model_fields) or fields <= set(PipelineFile.model_fields), fields


@parametrize("python", "json")
def test_python_and_json_are_valid(block: Block) -> None:
    """They can be parsed."""
    (ast.parse if block.kind == "python" else json.loads)(block.text)


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in plain}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Give file and anchor of each link to a file of the repository."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^) ]*)\)", re.sub(r"`[^`]*`", "", text)):
        base = (ROOT / page).parent
        if link.startswith(URL):
            link, base = link.removeprefix(URL), ROOT
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        yield (base / name if name else ROOT / page), anchor


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_resolve(page: Path) -> None:
    """Files and sections exist."""
    for path, anchor in links(page):
        if path in GENERATED:
            continue
        assert path.exists(), f"{page}: {path}"
        assert not anchor or anchor in anchors(path), f"{page}: {path.name}#{anchor}"


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [
        ("done  2.7 s\n", "done   310 ms\n", True),
        ("done  2.7 s\n", "failed  2.7 s\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nd\n", True),
        ("a\n…\nd\n", "a\nb\n", False),
        ("key 87e908860bdb\n", "key 000000000000\n", True),
        ("7 ran, 0 up to date\n", "6 ran, 1 up to date\n", False),
        ("best … of\n", "best tile of\n", True),
        ("0.308 (0.155 to 0.402, 12 pairs)\n", "0.436 (0.419 to 0.446, 8 pairs)\n", True),
        ("99% of 360 samples\n", "99% of 180 samples\n", False),
        (
            "tune  done\n",
            "tune: waiting for the device cpu, held by pid 7 (tvmflow run)\ntune  done\n",
            True,
        ),
    ],
)
def test_outputs_are_compared_without_times_and_digests(
    shown: str, output: str, same: bool
) -> None:
    """Counts and words must be the same."""
    assert matches(shown, output) is same


def test_the_command_table_names_every_command() -> None:
    """The table of commands in docs/cli.md."""
    table = (ROOT / "docs/cli.md").read_text().partition("\n## ")[0]
    named = set(re.findall(r"`([a-z-]+)[^`]*`", table))
    assert set(COMMANDS) <= named


def test_the_table_of_benchmarks_names_each_program() -> None:
    folder = ROOT / "benchmarks"
    table = re.findall(r"\| `([\w/]+\.py)\b", (folder / "README.md").read_text())
    programs = {str(path.relative_to(folder)) for path in folder.rglob("[!_]*.py")}
    assert sorted(table) == sorted(programs - {"arm/peers.py", "history.py"})


def test_the_command_reference_has_every_option() -> None:
    """The page of the site is made from the parsers."""
    page = commands_page()
    for command in load_all_commands():
        _, _, section = page.partition(f"### `tvmflow {command.name}`\n")
        section = section.partition("\n### ")[0]
        for option in CommandParser(command)._option_string_actions:
            assert option in ("-h", "--help", "-v", "--verbose", "-q", "--quiet") or (
                f"`{option}" in section or f", {option}" in section
            ), f"{command.name} {option}"


def test_the_site_lists_every_page() -> None:
    """A page that is not in the navigation would be seen by nobody."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for path in (ROOT / "docs").rglob("*.md"):
        assert f" {path.relative_to(ROOT / 'docs')}\n" in navigation, path


@pytest.mark.parametrize(
    ("html", "addresses"),
    [
        ('<a href="https://example.org">', []),
        ('<script src="https://example.org/x.js">', ["https://example.org/x.js"]),
        ('<link rel="stylesheet" href="//example.org/x.css">', ["//example.org/x.css"]),
        ('<img alt="a" src=https://example.org/x.png>', ["https://example.org/x.png"]),
        ("@font-face { src: url(https://example.org/f) }", ["https://example.org/f"]),
        ('<img src="images/x.svg">', []),
    ],
)
def test_what_pages_would_load_from_elsewhere(html: str, addresses: list[str]) -> None:
    """Links are not requests; scripts, styles, fonts and images are."""
    assert external_requests(html) == addresses


def test_the_page_of_messages_can_be_made() -> None:
    """It has what the source raises, with the fix of each."""
    page = messages_page()
    assert page.count("\n| ") > 300
    assert "| … is not a tvmflow store | choose one with --store DIR |" in page


def test_the_recording_shows_its_last_screen_where_it_does_not_move() -> None:
    """Its base state, before the animation begins too, is the last of the frames; spaces stay."""
    text = (ROOT / "docs/images/demo.svg").read_text()
    root = ElementTree.fromstring(text)
    frames = [
        g for g in root.iter("{http://www.w3.org/2000/svg}g") if "frame" in g.get("class", "")
    ]
    assert [frame.get("class") for frame in frames[-2:]] == ["frame", "frame last"]
    assert root.get("{http://www.w3.org/XML/1998/namespace}space") == "preserve"
    base, moving = text.split("@media (prefers-reduced-motion: no-preference) {")
    assert ".frame { visibility: hidden; }\n    .last { visibility: visible; }" in base
    assert re.search(r"\.frame \{ animation: 1s step-end [1-9]\.[0-9]s infinite; }", moving)
