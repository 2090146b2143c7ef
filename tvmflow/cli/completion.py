"""`tvmflow completion`: the completion of command lines in a shell, made from the table of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tvmflow.cli import commands as table
from tvmflow.cli.arguments import EXECUTOR_NAMES
from tvmflow.cli.options import Options, argument
from tvmflow.core.errors import EXIT_OK, UsageError


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


_BASH: Final = """\
# tvmflow's completion for bash, and for zsh with bashcompinit
_tvmflow() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    local name="${{COMP_WORDS[1]}}"
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "{commands}" -- "$word") )
        return
    fi
    case "$name" in
        {groups}) (( COMP_CWORD > 2 )) && name="$name ${{COMP_WORDS[2]}}" ;;
    esac
    case "$before" in
{values}
    esac
    if [[ -z $words ]]; then
        case "$name" in
{options}
        esac
        [[ $word == -* || $words != -* ]] || words=""
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$word") )
    [[ $word == -* ]] || COMPREPLY+=( $(compgen -f -- "$word") )
    [[ $name == explain && $COMP_CWORD -eq 3 ]] && COMPREPLY=( $(compgen -W "{stages}" -- "$word") )
    return 0
}}
complete -o filenames -F _tvmflow tvmflow
"""
_ZSH_START: Final = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def completion(options: CompletionOptions) -> int:
    scripts: dict[str, Callable[[], str]] = {
        "bash": _bash_script,
        "fish": lambda: "\n".join([*_list_fish_lines(), ""]),
        "zsh": lambda: _ZSH_START + _bash_script(),
    }
    if options.shell not in scripts:
        raise UsageError(
            f"there is no completion for '{options.shell}'", fix=f"choose {', '.join(scripts)}"
        )
    sys.stdout.write(scripts[options.shell]())
    return EXIT_OK


def _list_values() -> dict[str, Sequence[str]]:
    from tvmflow.stages import STAGES
    from tvmflow.targets.presets import NAMES

    return {
        "--executor": EXECUTOR_NAMES,
        "--force": tuple(STAGES),
        "--pipeline": ("compile", "tune"),
        "--target": NAMES,
        "--until": tuple(STAGES),
    }


def _list_options() -> dict[str, list[str]]:
    """Return the options of each command; of a command with subcommands, their names."""
    from tvmflow.cli.parser import CommandParser

    words: dict[str, list[str]] = {}
    for name in table.COMMANDS:
        commands = table.load_commands(name)
        if commands[0].name != name:
            words[name] = [command.name.split()[1] for command in commands]
        for command in commands:
            words[command.name] = sorted(CommandParser(command)._option_string_actions)
    return {**words, "help": [*table.COMMANDS]}


def _bash_script() -> str:
    from tvmflow.stages import STAGES

    words = _list_options()
    cases = [f'            "{name}") words="{" ".join(names)}" ;;' for name, names in words.items()]
    values = [
        f'        {name}) words="{" ".join(values)}" ;;' for name, values in _list_values().items()
    ]
    return _BASH.format(
        commands=" ".join([*table.COMMANDS, "help"]),
        groups="|".join(dict.fromkeys(name.split()[0] for name in words if " " in name)),
        values="\n".join(values),
        options="\n".join(cases),
        stages=" ".join(STAGES),
    )


def _list_fish_lines() -> Iterator[str]:
    first = "complete -c tvmflow -n __fish_use_subcommand -f"
    for name, summary in table.COMMANDS.items():
        yield f"{first} -a {name} -d '{summary}'"
    known = _list_values()
    for name, words in _list_options().items():
        seen = "".join(f"; and __fish_seen_subcommand_from {word}" for word in name.split())
        line = f"complete -c tvmflow -n '{seen.removeprefix('; and ')}'"
        for word in words:
            if word.startswith("--"):
                values = f" -x -a '{' '.join(known[word])}'" if word in known else ""
                yield f"{line} -l {word[2:]}{values}"
            elif not word.startswith("-"):
                yield f"{line} -f -a {word}"


COMMANDS: Final = {"completion": completion}
