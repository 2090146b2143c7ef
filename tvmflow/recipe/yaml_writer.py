"""Writes plain values as YAML."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import yaml

from tvmflow.core.types import Json

# YAML 1.1 reads 1e-3 as a string, because it has no dot. We read it as a number.
FLOAT_WITHOUT_DOT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def write_yaml(value: Json) -> str:
    """Return YAML that is easily compared and merged: one field a line, in the order of the mapping.

    Lists of scalars, and empty mappings, are written on one line.
    """
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize
    )
    return text


def inline_yaml(value: Json | tuple[Json, ...]) -> str:
    """Return a plain value as one line of YAML, as messages and docs show it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {inline_yaml(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(inline_yaml(part) for part in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper without anchors, and with short lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        flow = not any(isinstance(item, dict | list) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        return super().represent_mapping(tag, mapping, flow_style=not mapping)

    def represent_string(self, text: str) -> Any:
        # Quote what our reader takes for a number and PyYAML does not.
        style = "'" if FLOAT_WITHOUT_DOT.fullmatch(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_string)
