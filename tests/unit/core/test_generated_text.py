"""Text of others in each generated language: its own parser reads it again, and finds nothing else."""

from __future__ import annotations

import ast
import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.support.hostile_names import CARRIED, TEXTS
from tvmflow.core import generated_text
from tvmflow.core.formatting import printable
from tvmflow.core.generated_text import MAX_NAME, find_name_problem
from tvmflow.recipe.yaml_files import parse_yaml
from tvmflow.targets.host import read_host
from tvmflow.targets.linking.zig import find_program_errors

_MARKDOWN: Final = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_RECIPE_NAMES: Final = st.text("abz019._-", max_size=20).map(lambda end: f"a{end}")
_FEW: Final = settings(max_examples=40)
# Many texts for one call of a compiler.
_BATCHES: Final = st.lists(TEXTS, min_size=60, max_size=80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of a test."""
    return tmp_path_factory.mktemp("generated")


# ---------------------------------------------------------------- programs


@_FEW
@given(text=TEXTS)
def test_strings_of_python_are_read_again(text: str) -> None:
    written = generated_text.python_string(text)
    assert ast.literal_eval(written) == text and len(written.splitlines()) == 1


@_FEW
@given(text=TEXTS, note=TEXTS)
def test_names_of_yaml_are_read_again(text: str, note: str) -> None:
    """However long they are, on one line, beside a comment."""
    line = f"{generated_text.yaml_key(text)}: 1  # {generated_text.comment(note)}"
    document = parse_yaml(Path("text"), f"{line}\nlast: 2\n")
    assert document.problems == () and document.value == {text: 1, "last": 2}


@_FEW
@given(name=CARRIED)
def test_the_longest_names_are_names_of_yaml(name: str) -> None:
    """PyYAML takes a name of a field to be at most 1,024 characters long."""
    longest = (name * MAX_NAME)[:MAX_NAME]
    while find_name_problem(longest):
        longest = longest[:-1]
    written = generated_text.yaml_key(longest)
    document = parse_yaml(Path("text"), f"inputs:\n  {written}: {{shape: [1]}}\n")
    assert document.problems == () and document.value == {"inputs": {longest: {"shape": [1]}}}


@settings(max_examples=3)
@given(texts=_BATCHES)
def test_words_of_a_shell_are_read_again(texts: list[str]) -> None:
    texts = [text.replace("\0", "") for text in texts]
    words = " ".join(map(generated_text.shell_word, texts))
    assert len(words.splitlines()) <= 1
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == texts


def test_paths_that_are_no_text_are_words_of_a_shell() -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf '%s' {generated_text.shell_word(chr(0xDCFF) + 'a')}"],
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"\xffa"


def _with_comments(texts: Sequence[str]) -> str:
    """Return a program in which every comment is followed by a line that later ones need."""
    lines = ["enum { e0 = 0 };"]
    for number, text in enumerate(texts):
        written = generated_text.comment(text)
        lines += [f"/* {written} */ enum {{ b{number} = e{number} }};"]
        lines += ["/*", f" * {written}", " */"]
        lines += [f"// {written}", f"enum {{ e{number + 1} = b{number} + 1 }};"]
    check = f"e{len(texts)} == {len(texts)} ? 1 : -1"
    return "\n".join([*lines, f"int ended[{check}];", "int main(void) { return ended[0]; }"]) + "\n"


@settings(max_examples=3)
@given(texts=_BATCHES)
def test_comments_of_c_and_cpp_end_where_they_should(texts: list[str]) -> None:
    """Without a warning, trigraphs of C11 included."""
    program = _with_comments(texts)
    programs = {"comments.c": program, "comments.cpp": program}
    assert find_program_errors(programs, [], read_host().triple) == []


@settings(max_examples=2)
@given(texts=_BATCHES)
def test_comments_of_javascript_end_where_they_should(texts: list[str]) -> None:
    """Where Node is installed: in scripts, in which `-->` begins a comment, and in modules."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    lines = ["let e = 0;"]
    for text in texts:
        written = generated_text.comment(text)
        lines += [f"// {written}", "e += 1; /*", f" * {written}", " */ e += 1;"]
    program = "\n".join([*lines, "console.log(e);"])
    for kind in ("commonjs", "module"):
        command = [node, f"--input-type={kind}", "-"]
        done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (f"{2 * len(texts)}\n", "")


@settings(max_examples=2)
@given(texts=_BATCHES)
def test_comments_of_cmake_end_where_they_should(texts: list[str], folder: Path) -> None:
    """Where CMake is installed."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("CMake is not installed")
    lines = [f'# {generated_text.comment(text)}\nmath(EXPR e "${{e}} + 1")' for text in texts]
    script = folder / "comments.cmake"
    script.write_text("\n".join(["set(e 0)", *lines, "message(${e})"]), encoding="utf-8")
    done = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, f"{len(texts)}\n")


@settings(max_examples=2)
@given(texts=_BATCHES)
def test_strings_of_c_are_read_again(texts: list[str], folder: Path) -> None:
    """Byte for byte, with trigraphs."""
    lines = [
        f"const char s{i}[] = {generated_text.c_string(text)};" for i, text in enumerate(texts)
    ]
    (folder / "strings.c").write_text("\n".join(lines), encoding="ascii")
    library = folder / f"strings{len(list(folder.iterdir()))}.so"
    command = [sys.executable, "-m", "ziglang", "cc", "-std=c11", "-Wall", "-Wextra", "-Werror"]
    command += ["-shared", "-nostdlib", "strings.c", "-o", str(library)]
    subprocess.run(command, cwd=folder, check=True)
    loaded = ctypes.CDLL(str(library))
    for index, text in enumerate(texts):
        content = text.encode()
        value = (ctypes.c_char * (len(content) + 1)).in_dll(loaded, f"s{index}")
        assert value.raw == content + b"\0"


@settings(max_examples=2)
@given(texts=_BATCHES)
def test_strings_of_cpp_are_read_again(texts: list[str]) -> None:
    """Byte for byte, as the compiler sees them."""
    lines = [
        "template <int n> constexpr bool same(const char (&text)[n], const unsigned char (&bytes)[n]) {",
        "  for (int i = 0; i < n; ++i) if (static_cast<unsigned char>(text[i]) != bytes[i]) return false;",
        "  return true;",
        "}",
    ]
    for text in texts:
        values = ", ".join(map(str, (*text.encode(), 0)))
        lines.append(f"static_assert(same({generated_text.c_string(text)}, {{{values}}}));")
    programs = {"strings.cpp": "\n".join([*lines, "int main() { return 0; }"])}
    assert find_program_errors(programs, [], read_host().triple) == []


# ---------------------------------------------------------------- documents


class _Texts(HTMLParser):
    """The tags and the text of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@_FEW
@given(text=TEXTS)
def test_html_and_xml_show_the_text(text: str) -> None:
    """As content and as an attribute in either kind of quotes."""
    written = generated_text.html_text(text)
    document = f"<p title=\"{written}\" class='{written}'>{written}</p>"
    parser = _Texts()
    parser.feed(document)
    parser.close()
    shown = printable(text)
    assert parser.tags == [("p", [("title", shown), ("class", shown)])]
    assert parser.text == shown
    read = ElementTree.fromstring(document)
    assert (read.text or "", read.attrib) == (shown, {"title": shown, "class": shown})


def _inline(document: str, kind: str) -> str:
    """Return the text of the only inline token of a document, which has no other tokens than text and code."""
    tokens = _MARKDOWN.parse(document)
    (inline,) = (token for token in tokens if token.type == "inline" and token.content != "x")
    assert kind in {token.type for token in tokens}
    shown = ""
    for token in inline.children or []:
        is_code = token.type == "html_inline" and token.content in ("<code>", "</code>")
        assert is_code or token.type in ("text", "code_inline", "text_special"), token
        shown += "" if is_code else token.content
    return shown


@_FEW
@given(text=TEXTS)
def test_markdown_shows_the_text(text: str) -> None:
    """In a paragraph, a list, a heading and a table; but for characters of no width that break references."""
    written, shown = generated_text.markdown_text(text), printable(text)
    if not text:
        return
    written = written.replace("&#8203;", "")
    assert _inline(written, "paragraph_open") == shown
    assert _inline(f"- {written}", "bullet_list_open") == shown
    assert _inline(f"# {written}", "heading_open") == shown
    assert _inline(f"|x|\n|---|\n| {written} |", "table_open") == shown


@pytest.mark.parametrize(
    "text",
    """@user|a (@org/team)|#123|org/repo#1|GH-12|x!7|~bug|~"a b"|%3|$4|&5|https://github.com/o/r/issues/1|o/r/pull/2
    https://gitlab.com/o/r/-/merge_requests/3|/close|**@user**|`@user`|\\@user|&#64;user""".replace(
        "\n    ", "|"
    ).split("|"),
)
def test_markdown_tells_no_user_and_closes_nothing(text: str) -> None:
    """GitHub and GitLab read the text that is shown; GitLab's commands are lines as they are written."""
    written = generated_text.markdown_text(text)
    shown = _inline(written, "paragraph_open")
    assert shown.replace("\u200b", "") == text
    reference = r"@\w|[#!&%$]\d|~[\w\"]|GH-\d|/(issues|pull|merge_requests)/\d"
    assert not re.search(reference, shown) and not written.startswith("/")


@_FEW
@given(text=TEXTS)
def test_markdown_shows_code(text: str) -> None:
    """In a paragraph, a list and a table."""
    written, shown = generated_text.markdown_code(text), printable(text)
    assert _inline(f"x {written}", "paragraph_open") == f"x {shown}"
    assert _inline(f"- x {written}", "bullet_list_open") == f"x {shown}"
    assert _inline(f"|x|\n|---|\n| x {written} |", "table_open") == f"x {shown}"


@_FEW
@given(lines=st.lists(TEXTS.map(printable), min_size=1, max_size=5))
def test_blocks_of_markdown_end_where_they_should(lines: list[str]) -> None:
    """No line of code ends the block, whatever backquotes it has."""
    tokens = _MARKDOWN.parse(generated_text.markdown_block("sh", lines) + "\n\nafter")
    assert [token.type for token in tokens[:2]] == ["fence", "paragraph_open"]
    assert tokens[0].content == "\n".join(lines) + "\n"


@_FEW
@given(text=TEXTS)
def test_labels_of_mermaid_are_entities(text: str) -> None:
    """Mermaid replaces `#NUMBER;` by a character; nothing else in a label is read."""
    written = generated_text.mermaid_text(text)
    assert not set(written) & set("\"'`<>&\n\\")
    assert re.sub(r"#(\d+);", lambda match: chr(int(match[1])), written) == printable(text)


@_FEW
@given(lines=st.lists(TEXTS, min_size=1, max_size=3))
def test_strings_of_dot_are_read_again(lines: list[str]) -> None:
    """By the rules of Graphviz: a backslash escapes the next character, and entities are those of HTML."""
    written = generated_text.dot_string(*lines)
    assert re.fullmatch(r'"(?:[^"\\\n]|\\.)*"', written)
    escapes = {"n": "\n", '"': '"', "\\": "\\"}
    plain = re.sub(r"\\(.)", lambda match: escapes[match[1]], written[1:-1])
    assert plain.replace("&amp;", "&").split("\n") == [printable(line) for line in lines]


@_FEW
@given(text=TEXTS)
def test_commands_of_github_stay_on_their_line(text: str) -> None:
    written = generated_text.github_text(text, ":,")
    assert not set(written) & set("\r\n:,")
    assert re.sub(r"%(..)", lambda match: chr(int(match[1], 16)), written) == text


# ---------------------------------------------------------------- names


@_FEW
@given(name=_RECIPE_NAMES)
def test_names_of_recipes_are_safe_everywhere(name: str) -> None:
    """They are written as they are."""
    assert generated_text.comment(name) == generated_text.html_text(name) == name
    assert generated_text.mermaid_text(name) == generated_text.shell_word(name) == name
    for written in (generated_text.python_string(name), generated_text.dot_string(name)):
        assert written[1:-1] == name
    if "_" not in name:
        assert generated_text.c_string(name) == f'"{name}"'
    assert generated_text.markdown_code(name) == f"`{name}`"


@_FEW
@given(name=CARRIED)
def test_unusual_names_are_carried(name: str) -> None:
    assert find_name_problem(name) == ""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "has an empty name"),
        ("a\nb", "has the control character U+000A in its name"),
        ("a\0", "has the control character U+0000 in its name"),
        ("\x85", "has the control character U+0085 in its name"),
        ("\u2028", "has the control character U+2028 in its name"),
        ("\udcff", "has a name that is not Unicode"),
        ("x" * 501, "has a name of 501 characters, more than 500"),
        ("\u200f" * 200, "has a name that takes 1,202 characters in YAML, more than 1,024"),
        ('"' * 500, ""),
        ("/model/Conv_output_0:0 (x)", ""),
    ],
)
def test_names_that_no_language_holds_are_named(name: str, problem: str) -> None:
    """Control characters, halves of characters, and names that are longer than strings and fields may be."""
    assert find_name_problem(name) == problem
