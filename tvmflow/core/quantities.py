"""Quantities with a unit, as people write them: sizes and ages."""

import re
from collections.abc import Mapping
from typing import Final

from tvmflow.core.formatting import quoted

_SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_BYTES: Final = {
    **{"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
}


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `30d`, `12h`, `90min`, `2w`, or `0`.

    Raises:
        ValueError: for any other text; the message says what is expected.
    """
    return _parse(text, _SECONDS, "an age such as 30d, 12h or 90min")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `20GB`, `1.5GiB`, or `0`.

    Raises:
        ValueError: for any other text; the message says what is expected.
    """
    return int(_parse(text, _BYTES, "a size such as 20GB or 500MB"))


def _parse(text: str, units: Mapping[str, float], kind: str) -> float:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?) ?([A-Za-z]*)", text, re.ASCII)
    number, unit = match.groups() if match else ("", "")
    if match and unit in units:
        return float(number) * units[unit]
    # A number without a unit could be days or seconds, megabytes or bytes. Only 0 is the same in all units.
    if match and not unit and float(number) == 0:
        return 0.0
    raise ValueError(f"{quoted(text)} is not {kind}; units are {', '.join(units)}")
