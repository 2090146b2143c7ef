"""Licenses as recipes name them: SPDX expressions."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from tvmflow.core.formatting import quoted
from tvmflow.core.licenses import license_expression
from tvmflow.core.schema import field_error


def _check_expression(value: str) -> str:
    expression = license_expression(value)
    if not expression:
        raise field_error(
            f"must be an SPDX license expression, such as Apache-2.0 or `MIT OR BSD-3-Clause`, not {quoted(value)}; "
            "write LicenseRef-NAME for a license that SPDX does not list"
        )
    return expression


SpdxExpression = Annotated[str, Field(max_length=500), AfterValidator(_check_expression)]
"""An SPDX license expression in its canonical form."""
