"""Options and help: `tvmflow completion`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.options import Options, argument


class CompletionOptions(Options):
    """Print the completion of command lines for a shell.

    Completed are commands, options, targets, stages and files.

    Examples:
        # in ~/.bashrc
        eval "$(tvmflow completion bash)"
        # in ~/.zshrc
        eval "$(tvmflow completion zsh)"
        # once, for fish
        tvmflow completion fish > ~/.config/fish/completions/tvmflow.fish
    """

    shell: str = argument("SHELL", "bash, zsh or fish")


COMMANDS: Final = {"completion": CompletionOptions}
