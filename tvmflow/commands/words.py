"""Words that several commands take, and how they answer."""

from __future__ import annotations

import argparse
import json
import sys

from tvmflow import fastpath
from tvmflow.report import printable
from tvmflow.stores.local import LocalStore
from tvmflow.values import Json


def count(word: str) -> int:
    """A whole number from 1. Raises ValueError."""
    number = int(word)
    if number < 1:
        raise ValueError
    return number


def seconds(word: str) -> float:
    """A length of time, at most a day. Raises ValueError."""
    number = float(word)
    if not 0 <= number <= 86400:
        raise ValueError
    return number


def about_store(sub: argparse.ArgumentParser, what: str = "results") -> None:
    """Where the store is, in which `what` are kept."""
    sub.add_argument(
        "--store", metavar="DIR", help=f"where {what} are kept ($TVMFLOW_STORE, or ./cache)"
    )


def store_of(args: argparse.Namespace) -> LocalStore:
    """The store that `--store` names, or the environment, or the default; whether it is there or not."""
    return LocalStore(fastpath.store_of([] if args.store is None else ["--store", args.store]))


def open_store(args: argparse.Namespace) -> LocalStore:
    """The same, made if it is none yet."""
    store = store_of(args)
    store.create()
    return store


def say(*lines: str) -> None:
    """Print lines, at once, as `printable` has them."""
    for line in lines:
        sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def say_json(value: Json) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")
