"""Names as a stranger's model may have them: what ends comments, strings, blocks and lines of generated languages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from hypothesis import strategies as st

MARKER: Final = "INJECTED"
"""A word that is code wherever a name gets out of its string or comment."""

_FRAGMENTS: Final = (
    *(
        "*/",
        "/*",
        "//",
        "??/",
        "??'",
        "??",
        "\\",
        '"',
        "'",
        "`",
        "```",
        "~~~",
        "-->",
        "<!--",
        "]]>",
    ),
    *(
        "#",
        "# ",
        "%",
        "%s",
        "$",
        "${X}",
        "$(touch X)",
        "@TITLE@",
        "{",
        "}",
        "{{",
        "|",
        "||",
        "&",
        ";",
        ":",
    ),
    *(
        "&#10;",
        "&lt;",
        "#quot;",
        "</script>",
        "</pre>",
        "<b>",
        "<img src=x>",
        "[a](b)",
        "![",
        "*a*",
        "_a_",
    ),
    *(
        " ",
        "  ",
        "    ",
        "- ",
        "1. ",
        "+ ",
        "= ",
        "---",
        "===",
        "::",
        "? ",
        "!",
        "~",
        "null",
        "SIZE",
        "%0A",
    ),
    *(
        "\u200f",
        "\u202e",
        "\u2066",
        "\ufeff",
        "\u00a0",
        "\u3000",
        "\ufffd",
        "\uffff",
        "é",
        "名前",
        "😀",
        "\U000e0041",
    ),
    *(
        f"; int {MARKER};",
        f" {MARKER}",
        "/model/Conv_output_0",
        "a",
        "x.1",
        "n",
        'R"(',
        ')"',
        "\\u000a",
        "\\x0a",
    ),
)
_CONTROL: Final = (
    "\n",
    "\r",
    "\r\n",
    "\0",
    "\t",
    "\x0b",
    "\x0c",
    "\x1b[2J",
    "\x7f",
    "\x85",
    "\u2028",
    "\u2029",
)

_ANY: Final = st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])
_PIECES: Final = st.one_of(st.sampled_from(_FRAGMENTS), _ANY)

CARRIED: Final = (
    st.lists(_PIECES, min_size=1, max_size=12).map("".join).map(lambda name: name[:500])
)
"""Names that generated code holds."""

TEXTS: Final = st.lists(st.one_of(_PIECES, st.sampled_from(_CONTROL)), max_size=12).map("".join)
"""Texts of paths, messages and servers: control characters are among them."""


def draw_names(seed: int, count: int) -> list[str]:
    """Return names that generated code holds, no two alike."""
    return _draw(seed, count, _FRAGMENTS)


def draw_texts(seed: int, count: int) -> list[str]:
    """Return texts with control characters, no two alike."""
    return _draw(seed, count, (*_FRAGMENTS, *_CONTROL))


def _draw(seed: int, count: int, fragments: Sequence[str]) -> list[str]:
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        pieces = rng.choices(fragments, k=rng.randint(1, 8))
        texts["".join(pieces)] = None
    return list(texts)
