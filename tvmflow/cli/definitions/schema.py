"""Options and help: `tvmflow schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.cli.options import Options, flag, option


class SchemaOptions(Options):
    """Print the JSON Schema of recipes, or with --pipeline of pipelines, for editors.

    Examples:
        tvmflow schema --output recipe.schema.json
        # then, as the first line of a recipe, for editors with yaml-language-server
        # yaml-language-server: $schema=recipe.schema.json
    """

    pipeline: bool = flag("the schema of pipelines, not of recipes")
    output: Path | None = option("FILE", "write the schema to this file")


COMMANDS: Final = {"schema": SchemaOptions}
