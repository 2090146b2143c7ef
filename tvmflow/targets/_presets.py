"""The targets that a recipe can name with one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tvmflow.values import Json


class Preset(NamedTuple):
    """A named target. `tvm` is the mapping that TVM takes; None for the machine that builds."""

    tvm: Mapping[str, Json] | None
    description: str


def _x86(level: str) -> Mapping[str, Json]:
    return {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": level}


PRESETS: Final[dict[str, Preset]] = {
    "host": Preset(None, "this machine: its CPU, features and cores are looked up"),
    "x86-64-v2": Preset(_x86("x86-64-v2"), "x86-64 with SSE4.2 (since about 2009)"),
    "x86-64-v3": Preset(_x86("x86-64-v3"), "x86-64 with AVX2 and FMA (since about 2015)"),
    "x86-64-v4": Preset(_x86("x86-64-v4"), "x86-64 with AVX-512 (servers since about 2017)"),
}
