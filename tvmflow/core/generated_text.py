"""Escaping of untrusted names and paths in generated C, Python, YAML, Markdown, HTML and others.

Names from users, models, paths and servers get into generated files only through these functions: one for each language
or context. JSON is written by `json`. Names of recipes, variants, targets and parts consist of letters, digits, `.`,
`_` and `-`, which are safe in strings and comments of each language; `identifier` makes identifiers of them. Text for
people (comments, Markdown, HTML) is made `printable`; text for programs keeps its value.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from tvmflow.core.formatting import printable
from tvmflow.core.types import Json

# The second character of comment marks, the end of the trigraph ??/, and a line continuation.
_COMMENT_MARKS: Final = re.compile(r"(?<=\*)/|(?<=/)\*|(?<=\?\?)/|\\\Z")
# YAML 1.1 does not read some plain words, such as `no`, as strings.
_PLAIN_IN_YAML: Final = re.compile(
    r"(?!(?:yes|no|on|off|true|false|null)$)[a-z_][\w.-]*", re.I | re.ASCII
)
_HTML: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
_MARKDOWN: Final = str.maketrans(
    {
        **{char: f"\\{char}" for char in "\\`*_{}[]|#~$"},
        **{char: f"&{name};" for char, name in (("&", "amp"), ("<", "lt"), (">", "gt"))},
    }
)
# References to users, issues and labels, with which GitHub and GitLab notify people. They are recognized in the
# rendered text, so only a zero-width character prevents them.
_REFERENCE: Final = re.compile(
    r"""@(?=\w)|~(?=[\w"])|[#!&%$](?=\d)|\bGH-(?=\d)|/(?:issues|pull|discussions|commit|(?:-/)?merge_requests)/(?=\w)""",
)
_NO_WIDTH: Final = "\u200b"
# The beginning of a line that is a list, a heading, a rule, or a quick action of GitLab.
_MARKDOWN_BEGIN: Final = re.compile(r"\d*(?:([.)])(?=\s|$)|([-+])(?=[\s-]|$)|(=)|(/)(?=\w))")
_MERMAID: Final = str.maketrans({char: f"#{ord(char)};" for char in "#&<>\"'`\\"})
_DOT: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "&": "&amp;"})

MAX_NAME: Final = 500
"""Maximum characters of a name in generated code: C compilers must accept strings of only 4,095 bytes."""

_MAX_YAML_KEY: Final = 1024
"""Maximum characters of a YAML key, with quotes and escapes."""

# Control characters, line separators and surrogates: languages differ in which of them end a line or a string.
_UNSUPPORTED: Final = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def find_name_problem(name: str) -> str:
    r"""Return why a name from a model cannot be in generated code, as a verb phrase; empty if it can.

    >>> find_name_problem("a\0"), find_name_problem("/model/Conv_output_0")
    ('has the control character U+0000 in its name', '')
    """
    if not name:
        return "has an empty name"
    if len(name) > MAX_NAME:
        return f"has a name of {len(name):,} characters, more than {MAX_NAME}"
    if (length := len(yaml_key(name))) > _MAX_YAML_KEY:
        return f"has a name that takes {length:,} characters in YAML, more than {_MAX_YAML_KEY:,}"
    if match := _UNSUPPORTED.search(name):
        if "\ud800" <= match[0] <= "\udfff":
            return "has a name that is not Unicode"
        return f"has the control character U+{ord(match[0]):04X} in its name"
    return ""


# ---------------------------------------------------------------- programs


def c_string(text: str) -> str:
    r"""Return a text as a C or C++ string literal in UTF-8.

    Most characters that are not letters or digits are octal escapes, so that the literal is also safe in Markdown code.

    >>> print(c_string('a"b\\c'), c_string("ä??/"))
    "a\042b\134c" "\303\244\077\077\057"
    """
    return f'"{"".join(map(_escape_octal, text.encode().decode("latin-1")))}"'


def _escape_octal(char: str) -> str:
    is_plain = char.isascii() and (char.isalnum() or char in " _-.:,()")
    return char if is_plain else f"\\{ord(char):03o}"


def java_string(text: str) -> str:
    r"""Return a text as a Java string literal.

    Java replaces `\u` escapes before it parses literals, so ASCII characters must not be written as `\u` escapes.

    >>> print(java_string('a"b\\u0022'), java_string("ä😀"))
    "a\042b\134u0022" "\u00e4\ud83d\ude00"
    """
    return f'"{"".join(map(_escape_in_java, text))}"'


def _escape_in_java(char: str) -> str:
    if char.isascii():
        return _escape_octal(char)
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def comment(text: str) -> str:
    r"""Return a text for a comment in generated code, on one line. A space must precede it.

    >>> print(comment("a*/b"), comment("/*"), comment("a\nb"), comment("??/"), comment("a\\"))
    a*\x2fb /\x2a a\nb ??\x2f a\x5c
    """
    return _COMMENT_MARKS.sub(lambda match: f"\\x{ord(match[0]):02x}", printable(text))


def javascript_value(value: Json) -> str:
    r"""Return a value as a JavaScript or TypeScript expression, in ASCII and on one line.

    Its keys must be trusted; untrusted names need `javascript_key`.

    >>> print(javascript_value({"a": "</b>\u2028"}))
    {"a": "\u003c/b>\u2028"}
    """
    return json.dumps(value).replace("<", "\\u003c")


def javascript_key(name: str) -> str:
    """Return a name as a key of a JavaScript or TypeScript object.

    >>> print(javascript_key("data"), javascript_key("__proto__"))
    "data" ["__proto__"]
    """
    # Without brackets, `__proto__` would set the prototype of the object.
    return f"[{javascript_value(name)}]" if name == "__proto__" else javascript_value(name)


def python_string(text: str) -> str:
    """Return a text as a Python string literal, on one line."""
    return repr(text)


def yaml_key(text: str) -> str:
    r"""Return a text as a YAML key, on one line.

    >>> print(yaml_key("data"), yaml_key("no"), yaml_key('a: "b"'), yaml_key("ä\n"))
    data "no" "a: \"b\"" "ä\u000a"
    """
    if _PLAIN_IN_YAML.fullmatch(text):
        return text
    return f'"{"".join(map(_escape_in_yaml, text))}"'


def _escape_in_yaml(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if char <= "\uffff" else f"\\U{ord(char):08x}"


def shell_word(text: str) -> str:
    r"""Return a text as one word of a shell command, on one line.

    >>> print(shell_word("a.yaml"), shell_word("it's $1"), shell_word("a\nb"))
    a.yaml 'it'"'"'s $1' $'a\x0ab'
    """
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escape_in_shell, text))}'"


def _escape_in_shell(char: str) -> str:
    if char.isprintable() and char not in "'\\":
        return char
    # Python represents undecodable bytes of a path by surrogates.
    errors = "surrogateescape" if "\udc80" <= char <= "\udcff" else "replace"
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors=errors))


# ---------------------------------------------------------------- documents


def html_text(text: str) -> str:
    """Return a text for the content or an attribute of an element of HTML, SVG or XML."""
    return printable(text).translate(_HTML)


def markdown_text(text: str) -> str:
    r"""Escape a text for a line, list, heading or cell in Markdown, without links to users or issues.

    >>> print(markdown_text("a_b|c"), markdown_text("1. <b>"), markdown_text("@me"))
    a\_b\|c 1\. &lt;b&gt; @&#8203;me
    """
    unlinked = _REFERENCE.sub(rf"\g<0>{_NO_WIDTH}", printable(text))
    escaped = unlinked.translate(_MARKDOWN).replace(_NO_WIDTH, "&#8203;")
    stripped = escaped.strip(" ")
    begin = len(escaped) - len(escaped.lstrip(" "))
    end = len(escaped) - len(stripped) - begin
    if match := _MARKDOWN_BEGIN.match(stripped):
        at = match.start(match.lastindex or 0)
        stripped = f"{stripped[:at]}\\{stripped[at:]}"
    return f"{'&#32;' * begin}{stripped}{'&#32;' * end}"


def markdown_code(text: str) -> str:
    """Return a text as inline code for Markdown; it may be put into a table cell.

    >>> print(markdown_code("a/b"), markdown_code("a`|b"))
    `a/b` <code>a&#96;&#124;b</code>
    """
    shown = printable(text)
    if shown and not re.search(r"[`|]|^ | $", shown):
        return f"`{shown}`"
    escaped = (
        char if char.isalnum() or not char.isascii() else f"&#{ord(char)};" for char in shown
    )
    return f"<code>{''.join(escaped)}</code>"


def markdown_block(language: str, lines: Sequence[str]) -> str:
    """Return lines as a fenced Markdown code block; the fence is longer than any in the lines."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])


def mermaid_text(text: str) -> str:
    """Return a text for a label in Mermaid, between double quotes."""
    return printable(text).translate(_MERMAID)


def dot_string(*lines: str) -> str:
    """Return lines as a DOT string (Graphviz)."""
    return '"' + "\n".join(map(printable, lines)).translate(_DOT) + '"'


def github_text(text: str, special: str = "") -> str:
    """Escape a text for a workflow command of GitHub Actions, including the characters in `special`."""
    for char in f"%\r\n{special}":
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def class_name(name: str) -> str:
    """Return a recipe's name as the name of a Java or Swift class or module, which is never a keyword.

    >>> class_name("res-net.2"), class_name("3d"), class_name("class")
    ('ResNet2Model', 'M3dModel', 'ClassModel')
    """
    words = re.split("[._-]+", name)
    plain = "".join(word.capitalize() for word in words)
    return f"{'M' if plain[0].isdigit() else ''}{plain}Model"


# Libraries of these names would define the macros F_OK, R_OK, W_OK and X_OK of `unistd.h`.
_PREFIXES_OF_POSIX: Final = frozenset("FRWX")


def identifier(name: str) -> str:
    """Return a name as an identifier of C and Python.

    >>> identifier("res-net.2"), identifier("3d"), identifier("w")
    ('res_net_2', 'm3d', 'mw')
    """
    plain = "".join(char if char.isalnum() else "_" for char in name)
    return f"m{plain}" if plain[0].isdigit() or plain.upper() in _PREFIXES_OF_POSIX else plain


_VOID: Final = frozenset({"br", "input", "link", "meta"})
_SHAPES: Final = frozenset({"line", "path", "rect"})


class Markup(str):
    """HTML that is written unescaped."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
"""The content of an element; None is omitted."""

Attribute: TypeAlias = str | int | float | bool | None


def element(tag: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element with its content and its attributes.

    In attribute names, `_` becomes `-`, and a final `_` is dropped (`class_`). None and False omit the attribute; True
    writes only its name.
    """
    start = f"<{tag}{''.join(_format_attribute(*item) for item in attributes.items())}>"
    if tag in _VOID:
        return Markup(start)
    if tag in _SHAPES and not children:
        return Markup(f"{start[:-1]}/>")
    return Markup(f"{start}{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Concatenate the markup of several values."""
    return Markup("".join(map(_format_child, children)))


def lines(text: str) -> Markup:
    """Return text escaped line by line."""
    return Markup("\n".join(html_text(line.expandtabs(4)) for line in text.splitlines()))


def _format_child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int):
        return html_text(str(child))
    return "".join(map(_format_child, child))


def _format_attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.7g}" if isinstance(value, float) else str(value)
    return f' {name}="{html_text(text)}"'
