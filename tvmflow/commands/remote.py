"""Words about a remote that commands take, and `tvmflow cache push` and `pull`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.commands.words import about_store, open_store, say, say_json, seconds
from tvmflow.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, UsageError
from tvmflow.fastpath import MODE_VARIABLE
from tvmflow.report import printable, results_text, size_text
from tvmflow.stores.local import LocalStore

if TYPE_CHECKING:
    # every command line has these words, and few use them
    from tvmflow.decide import Survey
    from tvmflow.stores.remote.tier import Access, Tier
    from tvmflow.values import Plan

URL_VARIABLE: Final = "TVMFLOW_REMOTE"
_MODES: Final = {
    "read": (True, False),
    "write": (False, True),
    "both": (True, True),
    "off": (False, False),
}
_SHOWN: Final = 10
_SHORTEST_S: Final = 0.01


# ---------------------------------------------------------------- words


def about_remote(sub: argparse.ArgumentParser) -> None:
    """Add what commands that use a remote take."""
    sub.add_argument(
        "--remote",
        metavar="URL",
        help="where results are shared: https://…, s3://…, gs://…, az://… or a folder ($TVMFLOW_REMOTE)",
    )
    sub.add_argument(
        "--require-signatures",
        metavar="FILE|DIR",
        type=Path,
        help="believe only results that one of these keys signed ($TVMFLOW_TRUSTED_KEYS)",
    )
    sub.add_argument(
        "--remote-timeout",
        metavar="SECONDS",
        type=_some_seconds,
        default=10.0,
        help="how long to wait for an answer of the remote (10)",
    )


def about_remote_of_run(sub: argparse.ArgumentParser) -> None:
    """Add what `run` takes."""
    about_remote(sub)
    sub.add_argument(
        "--remote-mode",
        metavar="MODE",
        choices=_MODES,
        help="read (the default), write, both, or off ($TVMFLOW_REMOTE_MODE)",
    )
    sub.add_argument(
        "--remote-wait",
        metavar="SECONDS",
        type=seconds,
        default=30.0,
        help="how long a run that is done waits for what it still sends (30)",
    )


def _some_seconds(word: str) -> float:
    found = seconds(word)
    if found < _SHORTEST_S:
        raise ValueError
    return found


def tier_of_run(
    args: argparse.Namespace,
    store: LocalStore,
    tell: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> Tier | None:
    """The remote that a run has; None without one, and offline. Raises UsageError, EnvironmentProblem."""
    mode = _mode(args.remote_mode)
    url = _url(args)
    if not url or mode == "off":
        return None
    from tvmflow.stores.remote.tier import Access

    reads, writes = _MODES[mode]
    access = Access(reads=reads, writes=writes, wait_s=args.remote_wait)
    return _tier(args, url, store, access, tell, cancelled)


def url_of_cluster(args: argparse.Namespace) -> str:
    """The remote by which a cluster gets its files. Raises UsageError without one."""
    url = _url(args)
    if not url or _mode(args.remote_mode) == "off":
        raise UsageError(
            "--executor dask sends files by way of a remote, and this run has none",
            fix=f"give --remote URL, or set ${URL_VARIABLE}; the mode must not be off",
        )
    return url


def tier_of_cluster(
    args: argparse.Namespace,
    store: LocalStore,
    tell: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> tuple[str, Tier]:
    """The remote by which a cluster gets its files, and its address without credentials. Raises UsageError without one.

    Contents are written to it whatever the mode is; results are only where the mode says so.
    """
    from tvmflow.stores.remote.http import without_credentials
    from tvmflow.stores.remote.tier import Access

    url = url_of_cluster(args)
    shown = without_credentials(url) if "://" in url else str(Path(url).expanduser().absolute())
    return shown, _tier(args, url, store, Access(writes=True), tell, cancelled)


def _mode(word: str | None) -> str:
    mode = word or os.environ.get(MODE_VARIABLE) or "read"
    if mode not in _MODES:
        raise UsageError(
            f"${MODE_VARIABLE}: there is no mode '{mode}'", fix=f"there are {', '.join(_MODES)}"
        )
    return mode


def _url(args: argparse.Namespace) -> str:
    return str(os.environ.get(URL_VARIABLE, "") if args.remote is None else args.remote)


def _tier(
    args: argparse.Namespace,
    url: str,
    store: LocalStore,
    access: Access,
    tell: Callable[[str], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> Tier:
    from tvmflow import signing
    from tvmflow.stores.remote import open_remote
    from tvmflow.stores.remote.tier import Tier

    required = args.require_signatures
    trusted = signing.trusted_keys() if required is None else signing.load_public(required)
    signer = signing.own_key() if access.writes else None
    remote = open_remote(url, timeout_s=args.remote_timeout)
    place, root = Path(remote.place), Path(store.root)
    if root == place or root in place.parents:
        raise UsageError(
            f"--remote {remote.place} is in this store itself", fix="give another folder"
        )
    access = access._replace(signer=signer, trusted=trusted, patience_s=args.remote_timeout)
    return Tier(remote, store, access, tell, cancelled)


def origin_of(store: LocalStore, key: str) -> str:
    """Where a result came from and who signed it; empty for one that was made here, or is not there."""
    record = store.record(key)
    if record is None or "origin" not in record:
        return ""
    from tvmflow.stores.origin import origin_text

    return origin_text(record["origin"])


# ---------------------------------------------------------------- one function a sub-command


def push(args: argparse.Namespace) -> int:
    """Send results to the remote: those of recipes, all, or what earlier runs could not send."""
    store = open_store(args)
    with store.running():
        tier = _command_tier(args, store, writes=True)
        absent: list[str] = []
        if args.all:
            keys = store.keys()
        elif args.recipes:
            plan, survey = _surveyed(args, store)
            keys = [each.key for each in survey.artifacts.values()]
            absent = [spec.id for spec in plan.stages if spec.id not in survey.artifacts]
        else:
            keys = [each for each in tier.waiting() if "-" not in each]
        sent, known, failed = _send(tier, list(dict.fromkeys(keys)))
        # without other words: all that waits, and trials may
        trials, problems = _ledgers(tier, push=True) if args.ledger or tier.waiting() else (0, [])
        tier.finish()
    if args.json:
        say_json(
            {
                "remote": tier.remote.place,
                "sent": sent,
                "known": known,
                "failed": failed,
                "absent": absent,
                "trials": trials,
                "problems": problems,
            }
        )
    else:
        say(
            f"{results_text(len(sent))} sent to {tier.remote.place} ({size_text(sum(sent.values()))}), "
            f"{len(known)} were there",
            *([f"{trials} trials are shared"] if trials else []),
            *_shown([f"not sent: {key[:12]}: {why}" for key, why in failed.items()]),
            *_shown([f"not sent: {each}: it is not in the store; run it first" for each in absent]),
            *_shown(problems),
        )
    return _exit_code(tier, bool(failed or problems))


def pull(args: argparse.Namespace) -> int:
    """Fetch what recipes need, as far as the remote has it. Nothing is run."""
    from tvmflow.stores.remote.ahead import fetch_ahead

    store = open_store(args)
    fetched: dict[str, str] = {}
    with store.running():
        tier = _command_tier(args, store, writes=False)
        plan, survey = _surveyed(args, store)
        here = [spec.id for spec in plan.stages if spec.id in survey.artifacts]
        fetch_ahead(plan, survey, tier, lambda spec, found: fetched.update({spec.id: found.origin}))
        for spec in plan.stages:
            if spec.id in fetched:
                store.remember(spec.recipe, spec.label, survey.artifacts[spec.id].key)
        trials, problems = _ledgers(tier, push=False) if args.ledger else (0, [])
        tier.finish()
    traffic = tier.traffic()
    missing = [spec.id for spec in plan.stages if spec.id not in survey.artifacts]
    if args.json:
        say_json(
            {
                "remote": tier.remote.place,
                "fetched": fetched,
                "bytes": traffic.fetched_bytes,
                "here": here,
                "missing": missing,
                "trials": trials,
                "problems": list(traffic.problems),
            }
        )
    else:
        say(
            f"{results_text(len(fetched))} fetched from {tier.remote.place} "
            f"({size_text(traffic.fetched_bytes)}), {len(here)} were here",
            *([f"{trials} new trials"] if args.ledger else []),
            *_shown([f"not there: {each}" for each in missing]),
        )
    return _exit_code(tier, bool(problems or traffic.problems))


def _exit_code(tier: Tier, trouble: bool) -> int:
    if tier.reading.open or tier.writing.open:
        return EXIT_ENVIRONMENT
    return EXIT_FAILED if trouble else EXIT_OK


def _command_tier(args: argparse.Namespace, store: LocalStore, *, writes: bool) -> Tier:
    from tvmflow.stores.remote.tier import Access

    url = _url(args)
    if not url:
        raise UsageError("no remote is named", fix=f"give --remote URL, or set ${URL_VARIABLE}")
    if _mode(None) == "off":
        raise UsageError(
            f"${MODE_VARIABLE} is off: remotes are not to be used", fix="unset it for this command"
        )

    def tell(text: str) -> None:
        sys.stderr.write(f"tvmflow: remote: {printable(text)}\n")

    return _tier(args, url, store, Access(reads=not writes, writes=writes), tell)


def _surveyed(args: argparse.Namespace, store: LocalStore) -> tuple[Plan, Survey]:
    from tvmflow.decide import surveyed
    from tvmflow.prepare import Asked, prepare

    words = (tuple(args.target), args.until, tuple(args.variant))
    plan = prepare(Asked(tuple(args.recipes), args.pipeline, *words), store).plan
    survey = surveyed(plan, store)
    return plan, survey


def _send(tier: Tier, keys: list[str]) -> tuple[dict[str, int], list[str], dict[str, str]]:
    """Bytes by key of what was sent, the keys that the remote had, and what went wrong with others."""
    sent: dict[str, int] = {}
    known: list[str] = []
    failed: dict[str, str] = {}
    for key, outcome in tier.send_each(keys):
        if isinstance(outcome, Exception):
            failed[key] = str(outcome)
        elif outcome:
            sent[key] = outcome
        else:
            known.append(key)
    return sent, known, failed


def _ledgers(tier: Tier, *, push: bool) -> tuple[int, list[str]]:
    """Share, or take, the trials of this machine and of all that the ledger knows; how many, and what went wrong."""
    from tvmflow.stores.remote import ledger
    from tvmflow.stores.remote._base import RemoteProblem

    trials = 0
    problems: list[str] = []
    for here in ledger.all_here(tier):
        try:
            if push:
                trials += ledger.push(tier, here)
                tier.sent_ledger(here)
            else:
                pulled = ledger.pull(tier, here)
                trials += pulled.new
                problems += pulled.problems
        except RemoteProblem as problem:
            problems.append(f"trials of {here.device.get('class', 'a device')}: {problem}")
    return trials, problems


def _shown(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])


# ---------------------------------------------------------------- the command line


def add_parsers(subs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `push` and `pull` to the sub-commands of `cache`."""

    def sub(function: Callable[[argparse.Namespace], int], recipes: str) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").strip()
        added = subs.add_parser(function.__name__, help=text, description=text, allow_abbrev=False)
        added.set_defaults(command=function)
        added.add_argument("recipes", nargs=recipes, metavar="RECIPE", help="a recipe file")
        for word, metavar in (("target", "T"), ("variant", "V")):
            added.add_argument(
                f"--{word}",
                action="append",
                default=[],
                metavar=metavar,
                help=f"only this {word} (may be repeated)",
            )
        added.add_argument("--until", metavar="STAGE", help="only up to this stage")
        added.add_argument(
            "--pipeline", metavar="NAME", help="another pipeline than the recipe names"
        )
        about_store(added)
        about_remote(added)
        added.add_argument("--json", action="store_true", help="the same as one line of JSON")
        return added

    added = sub(push, "*")
    added.add_argument("--all", action="store_true", help="every result in the store")
    added.add_argument("--ledger", action="store_true", help="also all measured trials")
    added = sub(pull, "+")
    added.add_argument(
        "--ledger", action="store_true", help="also the trials of machines like this one"
    )
