"""The separate weights file of a C library, and the header lines about it.

A library accepts only the weights file that was built with it: both contain the same head. The file begins with a
page for the head; then the constants follow as in a library, so that they can be used where the file is mapped.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.targets.linking import find_data

BEGIN: Final = 4096
"""The offset of the constants in the file."""

_VERSION: Final = 1
# Magic, version, offset of the constants, their size in bytes, and their SHA-256.
_HEAD: Final = struct.Struct("<16sIIQ32s")
_MAGIC: Final = b"tvmflow weights\n"
_PIECE: Final = 1 << 20

_STATUSES: Final = """\

/* What `create` returns besides. */
enum {
  %(NAME)s_NO_WEIGHTS = 12,         /* the options have no weights */
  %(NAME)s_WRONG_WEIGHTS = 13,      /* the weights were not built with this library */
  %(NAME)s_SHORT_WEIGHTS = 14,      /* the file of the weights is not complete */
  %(NAME)s_UNREADABLE_WEIGHTS = 15, /* the file of the weights cannot be opened or mapped, or is no regular file */
  %(NAME)s_MISPLACED_WEIGHTS = 16   /* there are weights in two places, or they are not aligned */
};
"""
_FILE_OPTION: Final = """\
  /* The file %(title)s.weights, in UTF-8 on Windows. It is mapped and not read: all contexts and processes share its
   * memory. While there are contexts, replace it by a rename only: in a file that is truncated in place, the next call of
   * run ends the program with SIGBUS. Where others may write to the file, read it, and give its content below. */
  const char *weights_file;
"""
_MEMORY_OPTIONS: Final = """\
  /* %(alternative)she content of the file %(title)s.weights in memory that does not change while there are contexts, and that
   * begins at a multiple of 64 bytes. */
  const void *weights;
  size_t weights_bytes;
"""
_OPTIONS: Final = " *   %(name)s_options options = {.abi = %(NAME)s_ABI, %(members)s};\n"
_CREATE: Final = " *   int status = %(name)s_create(%(options)s, &context);"


def write_weights(constants: Path, output: Path) -> bytes:
    """Write the weights file from the object file with a library's weights; return its head."""
    begin, size = find_data(constants)
    digest = hashlib.sha256()
    with constants.open("rb") as source, output.open("wb") as target:
        source.seek(begin)
        target.seek(BEGIN)
        for offset in range(0, size, _PIECE):
            piece = source.read(min(_PIECE, size - offset))
            digest.update(piece)
            target.write(piece)
        head = _HEAD.pack(_MAGIC, _VERSION, BEGIN, size, digest.digest())
        target.seek(0)
        target.write(head)
    return head


def write_code(head: bytes, maps_files: bool) -> list[str]:
    """Return the first C lines of a library without weights."""
    _, _, begin, size, _ = _HEAD.unpack(head)
    return [
        f"#define TF_WEIGHTS_HEAD {', '.join(map(str, head))}",
        f"#define TF_WEIGHTS_BEGIN {begin}u",
        f"#define TF_WEIGHTS_BYTES {size}ull",
        *(["#define TF_MAPS_FILES"] if maps_files else []),
    ]


def header_values(values: Mapping[str, str], head: bytes, maps_files: bool) -> dict[str, str]:
    """Return the header template's values that depend on where the weights are.

    `values` are the names in the header. If `head` is empty, the library contains the weights. `maps_files` says
    whether the system can memory-map files.
    """
    if not head:
        create = _CREATE % {**values, "options": "NULL"}
        empty = dict.fromkeys(("weights_statuses", "required", "weights_options"), "")
        return {**empty, "create": create, "abi": "1", "optional": " `options` may be NULL."}
    members = ".weights = content, .weights_bytes = bytes"
    if maps_files:
        members = f'.weights_file = "{values["title"]}.weights"'
    create = _OPTIONS % {**values, "members": members} + _CREATE % {**values, "options": "&options"}
    memory = _MEMORY_OPTIONS % {**values, "alternative": "Or t" if maps_files else "T"}
    return {
        "create": create,
        # The options differ from those of a library with weights, so its ABI version differs.
        "abi": "0x10001",
        "weights_statuses": _STATUSES % values,
        "required": " and the weights",
        "weights_options": (_FILE_OPTION % values if maps_files else "") + memory,
        "optional": "",
    }
