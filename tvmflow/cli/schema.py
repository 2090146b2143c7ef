"""`tvmflow schema`: the JSON Schema of recipes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Final

from tvmflow.core.errors import EXIT_OK
from tvmflow.recipe import json_schema


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """`tvmflow schema` has no options."""


def schema(options: SchemaOptions) -> int:
    """Print the JSON Schema of recipes, for editors."""
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
    return EXIT_OK


COMMANDS: Final = {"schema": schema}
