"""Identifiers of programs, from the names that people choose."""

from __future__ import annotations


def identifier(name: str) -> str:
    """Return a name as an identifier of C and Python.

    >>> identifier("res-net.2"), identifier("3d")
    ('res_net_2', 'm3d')
    """
    plain = "".join(char if char.isalnum() else "_" for char in name)
    return f"m{plain}" if plain[0].isdigit() else plain
