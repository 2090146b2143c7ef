"""`tvmflow run-model`: run a delivered library on files or random inputs."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.run_model_options import RunModelOptions


def run_model(options: RunModelOptions) -> int:
    from tvmflow.cli.model_run import run

    return run(options)


COMMANDS: Final = {"run-model": run_model}
