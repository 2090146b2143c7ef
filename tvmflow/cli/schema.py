"""`tvmflow schema`: the JSON Schemas of recipes and pipelines."""

from __future__ import annotations

import json
import sys
from typing import Final

from tvmflow.cli.definitions.schema import SchemaOptions
from tvmflow.cli.output import write_file
from tvmflow.core.errors import EXIT_OK
from tvmflow.planning.pipelines import pipeline_schema
from tvmflow.recipe import json_schema


def schema(options: SchemaOptions) -> int:
    """Print the JSON Schema of recipes, or with --pipeline of pipelines, for editors."""
    content = pipeline_schema() if options.pipeline else json_schema()
    text = json.dumps(content, indent=2) + "\n"
    if options.output:
        write_file(options.output, text)
    else:
        sys.stdout.write(text)
    return EXIT_OK


COMMANDS: Final = {"schema": schema}
