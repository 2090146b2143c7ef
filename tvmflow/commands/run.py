"""`tvmflow run`, and the words that it shares with other commands that plan or run recipes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import NamedTuple

from tvmflow import plancache, signing
from tvmflow.commands import cluster, remote
from tvmflow.commands.words import about_store, count, open_store
from tvmflow.errors import EXIT_OK, UsageError
from tvmflow.plancache import Planned
from tvmflow.prepare import Asked, Prepared, prepare
from tvmflow.progress import Printer
from tvmflow.report import RunReport, render
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore
from tvmflow.values import Plan


class Done(NamedTuple):
    """A run that came to its end, whatever that was."""

    prepared: Prepared
    report: RunReport
    lock: str | None


def run(args: argparse.Namespace) -> int:
    """Bring recipes up to date and deliver their libraries."""
    if args.check_reproducible:
        from tvmflow.commands import reproduce

        code: int = reproduce.check(args)
        return code
    store = open_store(args)
    with contextlib.ExitStack() as held:
        done = perform(args, asked(args), store, held, remember=True)
        sys.stdout.write(render(done.report, as_json=args.json))
        pipeline = done.prepared.pipeline
        if pipeline and pipeline.release and done.report.exit_code == EXIT_OK:
            from tvmflow.commands.release import release

            return release(args, done, pipeline, pipeline.release, store)
    return done.report.exit_code


def perform(
    args: argparse.Namespace,
    wanted: Asked,
    store: LocalStore,
    held: contextlib.ExitStack,
    *,
    remember: bool = False,
) -> Done:
    """Run what is asked for, with the words of `run` in `args`, and show it as it goes.

    No collection takes what was made until `held` is closed: somebody may want to pin it.
    With `remember`, the same command line is answered from memory while everything is up to date.
    """
    cluster.check_words(args)
    # one that cannot be used is better known before the work than after it
    signing.own_key()
    prepared = prepare(wanted, store)
    alone = prepared.pipeline
    if remember and not (alone and (alone.release or alone.retune)):
        planned = Planned(prepared.plan, prepared.reads, args.dist, args.json)
        plancache.save(store, args.argv, planned, FileDigests(store))
    held.enter_context(store.running())
    with Running(args, prepared, store) as running:
        if alone and alone.retune and not wanted.lock:
            from tvmflow.commands.retune import retune

            prepared = prepared._replace(plan=retune(args, running, prepared, alone.retune))
        return Done(prepared, running.run(prepared.plan), wanted.lock)


class Running:
    """What runs plans one after the other, in processes that stay, and shows them as they go."""

    def __init__(self, args: argparse.Namespace, prepared: Prepared, store: LocalStore) -> None:
        from tvmflow import runner

        self._runner = runner
        self._args = args
        self._store = store
        self._printer = Printer(
            sys.stdout, as_json=args.json, many=many(prepared), stages=len(prepared.plan.stages)
        )
        self._executor = cluster.executor_of_run(args, store, self._printer)
        self._options = runner.RunOptions(args.jobs, args.keep_going, args.dist, args.stage_timeout)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()
        self._printer.end()

    @property
    def interrupted(self) -> bool:
        """Whether the user wants it to end."""
        return self._executor.cancelled

    def run(self, plan: Plan) -> RunReport:
        """Bring a plan up to date."""
        tier = remote.tier_of_run(
            self._args, self._store, self._printer.remote, lambda: self._executor.cancelled
        )
        work = (self._store, self._executor, self._printer.event, self._options, tier)
        with self._runner.interruptible(self._executor, self._printer.interrupted):
            return self._runner.run(plan, *work)


def many(prepared: Prepared) -> bool:
    """Whether stages need their recipe's name, or variant's, to be told apart."""
    return len({spec.recipe for spec in prepared.plan.stages}) > 1


# ---------------------------------------------------------------- words


def asked(args: argparse.Namespace) -> Asked:
    """What the words of `about_recipes` and `about_lock` ask for."""
    words = (tuple(args.target), args.until, tuple(args.variant))
    return Asked(tuple(args.recipes), args.pipeline, *words, lock=_lock(args))


def _lock(args: argparse.Namespace) -> str | None:
    """The lock that a run keeps to, if it keeps to one."""
    from tvmflow.locks import lock_path

    if not getattr(args, "locked", False):
        if getattr(args, "lock", None):
            raise UsageError("--lock names the lock of --locked", fix="add --locked")
        return None
    return args.lock or str(lock_path(args.recipes))


def about_recipes(sub: argparse.ArgumentParser) -> None:
    """Which recipes, and what of them."""
    sub.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="a recipe, or a pipeline that names some"
    )
    sub.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="T",
        help="only this target (may be repeated)",
    )
    sub.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="V",
        help="only this variant (may be repeated)",
    )
    sub.add_argument("--until", metavar="STAGE", help="stop after this stage")
    sub.add_argument(
        "--pipeline",
        metavar="NAME",
        help="another pipeline than the recipe names: compile, tune, or a file",
    )
    sub.add_argument(
        "--json", action="store_true", help="events and results as JSON, one object a line"
    )


def about_lock(sub: argparse.ArgumentParser) -> None:
    """Whether a lock is kept to."""
    sub.add_argument(
        "--locked",
        action="store_true",
        help="search nothing, and give what the lock names: those bytes, or an error",
    )
    sub.add_argument(
        "--lock", metavar="FILE", help="the lock (beside the recipe, with the ending .lock.yaml)"
    )


def about_runs(sub: argparse.ArgumentParser) -> None:
    """How to run."""
    sub.add_argument(
        "--jobs",
        type=count,
        metavar="N",
        help="stages at a time: 1, or as many as a cluster takes (measurements stay exclusive)",
    )
    sub.add_argument(
        "--keep-going",
        action="store_true",
        help="after a failure, go on with what does not depend on it",
    )
    sub.add_argument(
        "--dist", default="dist", metavar="DIR", help="where finished files go (./dist)"
    )
    sub.add_argument(
        "--stage-timeout", type=float, metavar="SECONDS", help="stop any stage that takes longer"
    )
    remote.about_remote_of_run(sub)
    cluster.about_executor(sub)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    text = (run.__doc__ or "").strip()
    sub = commands.add_parser("run", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=run)
    about_store(sub)
    about_recipes(sub)
    about_runs(sub)
    about_lock(sub)
    sub.add_argument(
        "--check-reproducible",
        action="store_true",
        help="then build everything twice more, each time by itself, and name the first difference",
    )
