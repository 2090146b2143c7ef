"""`tvmflow cache …`: what a store holds, and what goes between it and a remote."""

from __future__ import annotations

import argparse

from tvmflow import remote_cli


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cache` and its sub-commands to the command line."""
    text = "Look after the store, and share what is in it."
    parser = commands.add_parser("cache", help=text, description=text, allow_abbrev=False)
    subs = parser.add_subparsers(metavar="WHAT", required=True)
    remote_cli.add_parsers(subs)
