"""The `tvmflow` command: an up-to-date run is answered at once, all else by `cli`."""

import sys


def main() -> int:
    """Run the command line of this process; its exit code."""
    argv = sys.argv[1:]
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
