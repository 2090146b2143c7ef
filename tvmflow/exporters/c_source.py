"""`c-source`: the kernels as C, for a compiler that TVM does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.exporters._archives import write_tar_gz
from tvmflow.exporters._base import Asked, Built, cpu_only, json_bytes

FORM: Final = "c-source"
SOURCES: Final = (Path(__file__).with_name("c_source.md"),)

# What TVM calls its files, and what they hold.
_NAMES: Final = {"lib0.c": "kernels.c", "devc.c": "model.c"}


def why_not(asked: Asked) -> str:
    """Only for a CPU, and without float16, for which C compilers have no common type."""
    return cpu_only(asked) or ("C has no float16 (kernels.precision: mixed)" if asked.mixed else "")


def files(asked: Asked) -> tuple[str, ...]:
    """`<name>-c.tar.gz`."""
    return (f"{asked.name}-c.tar.gz",)


def export(built: Built, folder: Path) -> None:
    """`kernels.c`, `model.c` (weights and the order of calls), the signature, and how to compile them."""
    made = built.forms[FORM]
    below = f"{built.name}-c"
    content: dict[str, Path | bytes] = {
        f"{below}/{_NAMES.get(name, name)}": path for name, path in made.items()
    }
    suffix = built.asked.platform.shared_suffix
    text = SOURCES[0].read_text().replace("@NAME@", built.name).replace("@SUFFIX@", suffix)
    content[f"{below}/README.md"] = text.encode()
    content[f"{below}/signature.json"] = json_bytes(built.signature)
    write_tar_gz(folder / files(built.asked)[0], content)
