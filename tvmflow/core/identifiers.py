"""Identifiers of programs, from the names that people choose."""

from __future__ import annotations

from typing import Final

# `unistd.h` has the macros F_OK, R_OK, W_OK and X_OK, as a library's header would
_PREFIXES_OF_POSIX: Final = frozenset("FRWX")


def identifier(name: str) -> str:
    """Return a name as an identifier of C and Python.

    >>> identifier("res-net.2"), identifier("3d"), identifier("w")
    ('res_net_2', 'm3d', 'mw')
    """
    plain = "".join(char if char.isalnum() else "_" for char in name)
    return f"m{plain}" if plain[0].isdigit() or plain.upper() in _PREFIXES_OF_POSIX else plain
