"""`tvmflow schema`: the JSON Schemas of recipes and pipelines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tvmflow.cli.options import Options, flag, option
from tvmflow.core.errors import EXIT_OK


class SchemaOptions(Options):
    """Print the JSON Schema of recipes, or with --pipeline of pipelines, for editors.

    Examples:
        tvmflow schema --output recipe.schema.json
        # then, as the first line of a recipe, for editors with yaml-language-server
        # yaml-language-server: $schema=recipe.schema.json
    """

    pipeline: bool = flag("the schema of pipelines, not of recipes")
    output: Path | None = option("FILE", "write the schema to this file")


def schema(options: SchemaOptions) -> int:
    import json

    from tvmflow.cli.output import write_file
    from tvmflow.planning.pipelines import pipeline_schema
    from tvmflow.recipe import json_schema

    content = pipeline_schema() if options.pipeline else json_schema()
    text = json.dumps(content, indent=2) + "\n"
    if options.output:
        write_file(options.output, text)
    else:
        sys.stdout.write(text)
    return EXIT_OK


COMMANDS: Final = {"schema": schema}
