"""Licenses by name: which names are SPDX expressions."""

from __future__ import annotations


def license_expression(name: str) -> str:
    """Return a name as an SPDX expression in its canonical form; an empty string where it is none."""
    # Loading the list of licenses takes longer than reading a recipe that names none.
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(name))
    except InvalidLicenseExpression:
        return ""
