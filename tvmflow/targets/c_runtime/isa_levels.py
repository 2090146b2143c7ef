"""Multi-ISA libraries: weights shared by all levels, and the C code of the dispatch.

Each ISA level is an inner C library with its own symbol names; `levels.c` dispatches calls to one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.files import symlink_or_copy
from tvmflow.core.formatting import names_text
from tvmflow.core.generated_text import c_string, identifier
from tvmflow.core.types import Json
from tvmflow.targets.features import LEVELS, flags_of
from tvmflow.targets.linking import ALIGNMENT, find_data, padded, write_data
from tvmflow.targets.platforms import parse_triple

PLACES: Final = "constants.json"
"""The file that lists size and digest of each constant of a level, in the order of the object file."""

# Systems whose programs can read environment variables with `getenv`.
_WITH_ENVIRONMENT: Final = ("linux", "android", "macos")


class IsaLevelCode(NamedTuple):
    """An ISA level in a C library: its name, and the CPU features that its kernels need."""

    name: str
    features: tuple[str, ...]

    def file(self, name: str) -> str:
        """Return the name of one level's file among the files of all levels."""
        return f"{self.name}.{name}"


# ---------------------------------------------------------------- weights


def constant_place(index: int) -> str:
    """Return the name of the macro with the offset of a level's constant."""
    return f"TF_CONSTANT{index}"


def join_constants(
    files: Mapping[str, Mapping[str, Path]], program: str, constants: str, folder: Path
) -> dict[str, Path]:
    """Write the constants of all levels without duplicates, and their offsets in each level's program.

    Returns all files of the library; the names of a level's files begin with the level's name.
    """
    pieces: dict[str, tuple[Path, int, int]] = {}
    digests: dict[str, list[str]] = {}
    for level, compiled in files.items():
        begin, _ = find_data(compiled[constants])
        digests[level] = []
        for size, digest in json.loads(compiled[PLACES].read_text()):
            # The number of a constant's trailing zeros may differ between levels: the longest version is kept.
            if digest not in pieces or pieces[digest][2] < size:
                pieces[digest] = (compiled[constants], begin, size)
            begin += padded(size)
            digests[level].append(digest)
    sizes = [padded(size) for _, _, size in pieces.values()]
    places = dict(zip(pieces, accumulate(sizes, initial=0), strict=False))
    symbol = f"tf_{digest_of([list(pieces), sizes])[:16]}_weights"
    joined: dict[str, Path] = {}
    for level, compiled in files.items():
        code = IsaLevelCode(level, ())
        for name, path in compiled.items():
            if name not in (program, constants, PLACES):
                # Linkers record the names of objects, so the links have fixed names.
                joined[code.file(name)] = folder / code.file(name)
                symlink_or_copy(path.resolve(), joined[code.file(name)])
        lines = [f"#define TF_WEIGHTS {symbol}"]
        for index, digest in enumerate(digests[level]):
            lines.append(f"#define {constant_place(index)} {places[digest]}u")
        joined[code.file(program)] = folder / code.file(program)
        text = compiled[program].read_text()
        joined[code.file(program)].write_text("\n".join((*lines, text)))
    some = next(path for name, path in sorted(joined.items()) if name.endswith(".o"))
    joined[constants] = folder / constants
    write_data(folder / constants, some, symbol, _read(pieces.values()))
    return joined


def _read(pieces: Iterable[tuple[Path, int, int]]) -> Iterator[bytes]:
    """Yield the content of all constants, each padded to the alignment."""
    for path, begin, size in pieces:
        with path.open("rb") as stream:
            stream.seek(begin)
            yield stream.read(size)
        yield bytes(padded(size) - size)
    yield bytes(ALIGNMENT)


# ---------------------------------------------------------------- C code

STATUSES: Final = """\

/* What `create` returns for a level. */
enum {
  %(NAME)s_WRONG_LEVEL = 19 /* %(NAME)s_LEVEL in the environment names a level that the library or the CPU lacks */
};
"""
DECLARATIONS: Final = """\
/* The level of CPUs whose code a context runs, of those that the library has: %(levels)s. For NULL, the one that a new
 * context would have, which is also the one of %(name)s_kernel_count. It is the last one that the CPU has, unless
 * %(NAME)s_LEVEL in the environment names another one. */
%(NAME)s_API const char *%(name)s_level(const %(name)s_context *context);

"""


def variable(prefix: str) -> str:
    """Return the environment variable that selects a library's ISA level."""
    return f"{prefix.upper()}_LEVEL"


def write_features(features: Iterable[str], triple: str) -> list[str]:
    """Return C lines with the CPU features that kernels need, in all and per ISA level."""
    lines = [f"#define TF_FEATURES {''.join(f'{c_string(name)}, ' for name in features)}"]
    platform = parse_triple(triple)
    known = [name for name, level in LEVELS.items() if level.arch == platform.arch]
    if known and platform.system in _WITH_ENVIRONMENT:
        flags = {name: f" {' '.join(sorted(flags_of(name)))} " for name in known}
        entries = [f"{{{c_string(name)}, {c_string(words)}}}" for name, words in flags.items()]
        lines.append(f"#define TF_CPU_LEVELS {', '.join(entries)}")
    return lines


def write_code(
    prefix: str, levels: Sequence[IsaLevelCode], dimensions: int, has_states: bool, triple: str
) -> str:
    """Return the C code that dispatches to a library's ISA levels."""
    names = names_text([level.name for level in levels])
    message = (
        f"{variable(prefix)} in the environment names no level that this library and this CPU have; "
        f"the library has {names}"
    )
    entries = [
        f"X({index}, {prefix}_{identifier(level.name)}, {c_string(level.name)})"
        for index, level in enumerate(levels)
    ]
    known: set[str] = set()
    tables = []
    for index, level in enumerate(levels):
        added = [feature for feature in level.features if feature not in known]
        known.update(added)
        listed = "".join(f"{c_string(feature)}, " for feature in added)
        tables.append(f"static const char *const tf_features{index}[] = {{{listed}NULL}};")
    lines = [
        "#define _GNU_SOURCE",
        f"#define TF(name) {prefix}_##name",
        f"#define TF_STATUS(name) {prefix.upper()}_##name",
        *([f"#define TF_DIMENSIONS {dimensions}"] if dimensions else []),
        *(["#define TF_HAS_STATES"] if has_states else []),
        *write_features(levels[0].features, triple),
        f"#define TF_LEVELS(X) {' '.join(entries)}",
        f"#define TF_FEATURES_OF_LEVELS {' '.join(tables)}",
        f"#define TF_LEVEL_VARIABLE {c_string(variable(prefix))}",
        f"#define TF_LEVEL_MESSAGE {c_string(message)}",
        '#include "library.h"',
        '#include "levels.c"',
    ]
    return "\n".join(lines) + "\n"


def describe(levels: Sequence[IsaLevelCode]) -> Json:
    """Return the levels as JSON for a manifest."""
    return [{"name": level.name, "features": list(level.features)} for level in levels]


def read(manifest: Mapping[str, Json]) -> tuple[IsaLevelCode, ...]:
    """Return the levels in a manifest; empty for a library without levels."""
    return tuple(
        IsaLevelCode(entry["name"], tuple(entry["features"]))
        for entry in manifest.get("levels", ())
    )
