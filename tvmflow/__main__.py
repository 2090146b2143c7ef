"""The `tvmflow` command: an up-to-date run is answered at once, all else by `cli`."""

import os
import sys


def main() -> int:
    """Run the command line of this process; its exit code."""
    try:
        code = _main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read our output has gone, as in `tvmflow plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _main(argv: list[str]) -> int:
    if argv[:1] == ["run"]:
        from tvmflow import fastpath

        code = fastpath.answer(argv)
        if code is not None:
            return code
    # argparse, YAML and pydantic take longer to import than an up-to-date run takes in all
    from tvmflow import cli

    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
