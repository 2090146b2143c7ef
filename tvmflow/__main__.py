"""The `tvmflow` command: what is up to date is answered at once, all else by `cli`."""

import os
import sys

from tvmflow.core import termination


def main() -> int:
    """Run the command line of this process and return its exit code."""
    termination.watch_signals()
    argv = sys.argv[1:]
    # The exit code of a command that ends because nobody reads its output: a run is not finished then.
    code = 1 if argv[:1] in (["run"], ["lock"]) else 0
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed it, as in `tvmflow plan … | head`.
        _discard_output()
    except OSError as error:
        sys.stderr.write(
            f"tvmflow: the output cannot be written: {error.strerror}\n"
            "  fix: free some space where it is redirected to, and run again; finished stages are kept\n"
        )
        _discard_output()
        code = 4
    finally:
        if termination.signal_number():
            termination.end()
    return code


def _discard_output() -> None:
    """Keep Python from writing the rest of the output at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if argv == ["--version"]:
        from tvmflow.core.version import VERSION

        sys.stdout.write(f"tvmflow {VERSION}\n")
        return 0
    if argv in (["--help"], ["-h"]):
        from tvmflow.cli.commands import make_parser

        make_parser(argv).print_help()
        return 0
    # `-v` asks for the decisions of a full evaluation.
    is_verbose = any(word.strip("v") == "-" for word in argv) or "TVMFLOW_LOG" in os.environ
    if argv[:1] in (["run"], ["plan"]) and not is_verbose:
        from tvmflow.engine.answers import find_answer

        text = find_answer(argv)
        if text is not None:
            sys.stdout.write(text)
            return 0
    # Importing argparse, YAML and pydantic takes longer than all of an up-to-date run.
    from tvmflow.cli import main as cli

    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
