"""`tvmflow worker` and `tvmflow scheduler`, and the words with which a run is given to a cluster."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

from tvmflow.commands import remote
from tvmflow.commands.words import about_store, count, open_store, say, seconds
from tvmflow.errors import EXIT_OK, UsageError
from tvmflow.executors import EXECUTORS, Asked
from tvmflow.stores.local import LocalStore

if TYPE_CHECKING:
    from tvmflow.progress import Printer
    from tvmflow.runner import Executor

VARIABLE: Final = "TVMFLOW_SCHEDULER"
PORT: Final = 8786


# ---------------------------------------------------------------- one function a command


def worker(args: argparse.Namespace) -> int:
    """Run stages that others send by way of a scheduler. Whoever reaches that can run any code here."""
    from tvmflow.executors import cluster_server

    store = open_store(args)
    url = str(args.remote or os.environ.get(remote.URL_VARIABLE, ""))
    place = cluster_server.Place(_scheduler(args), args.host, args.name, args.slots)
    cluster_server.serve_worker(place, store.root, url, say)
    return EXIT_OK


def scheduler(args: argparse.Namespace) -> int:
    """Bring runs and workers together. Whoever reaches its port can run any code on the workers."""
    from tvmflow.executors import cluster_server

    cluster_server.serve_scheduler(args.host, args.port, tls=args.tls, say=say)
    return EXIT_OK


def check_words(args: argparse.Namespace) -> None:
    """Raises UsageError for words of a run that do not go together, before anything is done."""
    if args.executor == "dask":
        _scheduler(args)
        remote.url_of_cluster(args)
    elif args.scheduler:
        raise UsageError("--scheduler is of --executor dask", fix="add --executor dask")


def executor_of_run(args: argparse.Namespace, store: LocalStore, printer: Printer) -> Executor:
    """What runs the stages of a run, whose words were checked."""
    asked = Asked(
        store=store,
        scheduler=_scheduler(args) if args.executor == "dask" else "",
        remote=lambda cancelled: remote.tier_of_cluster(args, store, printer.remote, cancelled),
        remote_timeout_s=args.remote_timeout,
        wait_s=args.wait_for_workers,
        tell=printer.cluster,
    )
    return EXECUTORS[args.executor](asked)


def _scheduler(args: argparse.Namespace) -> str:
    address = str(args.scheduler or os.environ.get(VARIABLE, ""))
    if not address:
        raise UsageError(
            "no scheduler is named", fix=f"give --scheduler tcp://HOST:PORT, or set ${VARIABLE}"
        )
    scheme, colon, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    if (colon and scheme not in ("tcp", "tls")) or not host or not port.isdecimal():
        raise UsageError(
            f"--scheduler {address}: that is no address of a scheduler",
            fix="give it as tcp://HOST:PORT, or tls://HOST:PORT",
        )
    return address if colon else f"tcp://{address}"


# ---------------------------------------------------------------- words


def about_executor(sub: argparse.ArgumentParser) -> None:
    """Where the stages of a run run."""
    sub.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="processes",
        metavar="NAME",
        help="processes: here (the default); dask: on a cluster, by way of --remote",
    )
    sub.add_argument("--scheduler", metavar="ADDRESS", help=_SCHEDULER_HELP)
    sub.add_argument(
        "--wait-for-workers",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long a stage that no worker can run waits for one that can (0)",
    )


_SCHEDULER_HELP: Final = (
    f"where dask's scheduler is: tcp://HOST:PORT or tls://HOST:PORT (${VARIABLE})"
)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `worker` and `scheduler` to the command line."""
    text = (worker.__doc__ or "").strip()
    sub = commands.add_parser("worker", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=worker)
    sub.add_argument("--scheduler", metavar="ADDRESS", help=_SCHEDULER_HELP)
    sub.add_argument(
        "--remote",
        metavar="URL",
        help="the remote as this machine reaches it (as the run calls it, or $TVMFLOW_REMOTE)",
    )
    sub.add_argument("--name", metavar="NAME", help="what it is called (HOST-PID)")
    sub.add_argument(
        "--slots",
        type=count,
        default=1,
        metavar="N",
        help="stages at a time (1; measurements stay exclusive)",
    )
    sub.add_argument(
        "--host",
        metavar="ADDRESS",
        help="the address of this machine at which others reach it (found by itself)",
    )
    about_store(sub, "files")

    text = (scheduler.__doc__ or "").strip()
    sub = commands.add_parser("scheduler", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=scheduler)
    sub.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address of this machine that is served at (127.0.0.1: only this machine reaches it)",
    )
    sub.add_argument(
        "--port", type=_port, default=PORT, metavar="N", help=f"its port ({PORT}; 0: any)"
    )
    sub.add_argument(
        "--tls", action="store_true", help="with the certificates that dask's configuration names"
    )


def _port(word: str) -> int:
    port = int(word)
    if not 0 <= port < 65536:
        raise ValueError
    return port
