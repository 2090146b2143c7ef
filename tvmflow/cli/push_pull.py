"""`tvmflow cache push` and `tvmflow cache pull`: results shared through a remote cache."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tvmflow.cli.arguments import (
    RecipeOptions,
)
from tvmflow.cli.definitions.cache import PullOptions, PushOptions
from tvmflow.cli.download_progress import DownloadLine
from tvmflow.cli.output import print_outcome
from tvmflow.cli.records import start_trace_check
from tvmflow.cli.remote_cache import open_command_client
from tvmflow.core.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK
from tvmflow.core.formatting import count_text, printable, size_text
from tvmflow.core.types import Plan, StageSpec
from tvmflow.engine.prefetch import prefetch
from tvmflow.planning.decisions import PlanState, evaluate_plan
from tvmflow.planning.prepare import prepare_run
from tvmflow.store.local import LocalStore
from tvmflow.store.remote._base import RemoteCacheError
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.remote.result_reader import Fetched
from tvmflow.tuning import remote_ledger

_SHOWN_LINES: Final = 10
_SHORT_KEY: Final = 12


@dataclass
class _Pushed:
    """The outcome of an upload, by key: bytes of new results, known results, reasons of failures."""

    uploaded: dict[str, int] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def push(options: PushOptions) -> int:
    """Upload results to the remote cache: of recipes, all, or what earlier runs could not upload."""
    store = options.store.open()
    with store.running():
        client = open_command_client(options.remote, store, _warn, writes=True)
        keys, absent = _list_keys(options, store, client)
        pushed = _upload(client, keys)
        trials, problems = 0, list[str]()
        # Without recipes, everything that waits is uploaded, and trials may be among it.
        if options.ledger or client.uploader.waiting():
            trials, problems = _push_trials(client)
        client.finish()
    address = client.connection.address
    value = {
        "remote": address,
        **dataclasses.asdict(pushed),
        "absent": absent,
        "trials": trials,
        "problems": problems,
    }
    uploaded = count_text(len(pushed.uploaded), "result")
    size = size_text(sum(pushed.uploaded.values()))
    failures = [f"{key[:_SHORT_KEY]}: {reason}" for key, reason in pushed.failed.items()]
    lines = [
        f"{uploaded} uploaded to {address} ({size}), {len(pushed.known)} already there",
        *([f"{count_text(trials, 'trial')} shared"] if trials else []),
        *_shorten([f"not uploaded: {failure}" for failure in failures]),
        *_shorten([f"not uploaded: {name}: not in the store; run it first" for name in absent]),
        *_shorten(problems),
    ]
    code = _exit_code(client, failed=bool(pushed.failed or problems))
    return print_outcome(value, lines, code, options)


def pull(options: PullOptions) -> int:
    """Fetch what recipes need from the remote cache, without running anything.

    Raises:
        StoreError: after all else was fetched, when the disk is full or not writable.
    """
    store = options.store.open()
    origins: dict[str, str] = {}
    with store.running():
        client = open_command_client(options.remote, store, _warn, writes=False)
        plan, plan_state = _evaluate(options.recipes, store)
        present = [spec.id for spec in plan.stages if spec.id in plan_state.artifacts]

        def note_origin(spec: StageSpec, fetched: Fetched) -> None:
            origins[spec.id] = fetched.origin

        prefetch(plan, plan_state, client, note_origin)
        for spec in plan.stages:
            if spec.id in origins:
                store.remember(spec.recipe, spec.label, plan_state.artifacts[spec.id].key)
        trials, problems = _pull_trials(client, options.check) if options.ledger else (0, [])
        client.finish()
    traffic = client.traffic()
    missing = [spec.id for spec in plan.stages if spec.id not in plan_state.artifacts]
    value = {
        "remote": client.connection.address,
        "fetched": origins,
        "bytes": traffic.fetched_bytes,
        "here": present,
        "missing": missing,
        "trials": trials,
        "problems": [*traffic.problems, *problems],
    }
    lines = [
        f"{count_text(len(origins), 'result')} fetched from {client.connection.address} "
        f"({size_text(traffic.fetched_bytes)}), {len(present)} already here",
        *([count_text(trials, "new trial")] if options.ledger else []),
        *_shorten([f"not in the remote cache: {name}" for name in missing]),
        *_shorten(problems),
    ]
    code = _exit_code(client, failed=bool(problems or traffic.problems))
    print_outcome(value, lines, code, options)
    if client.reader.disk_problem:
        raise client.reader.disk_problem
    return code


def _warn(text: str) -> None:
    sys.stderr.write(f"tvmflow: remote cache: {printable(text)}\n")


def _list_keys(
    options: PushOptions, store: LocalStore, client: RemoteCacheClient
) -> tuple[list[str], list[str]]:
    """Return the keys to upload, and the ids of stages without a result."""
    if options.all:
        return store.keys(), []
    if options.recipes.recipes:
        plan, plan_state = _evaluate(options.recipes, store)
        keys = [artifact.key for artifact in plan_state.artifacts.values()]
        return keys, [spec.id for spec in plan.stages if spec.id not in plan_state.artifacts]
    return client.uploader.waiting_results(), []


def _evaluate(recipes: RecipeOptions, store: LocalStore) -> tuple[Plan, PlanState]:
    plan = prepare_run(recipes.request(), store, DownloadLine()).plan
    return plan, evaluate_plan(plan, store)


def _upload(client: RemoteCacheClient, keys: Sequence[str]) -> _Pushed:
    pushed = _Pushed()
    for key, outcome in client.uploader.upload_all(list(dict.fromkeys(keys))):
        if isinstance(outcome, Exception):
            pushed.failed[key] = str(outcome)
        elif outcome:
            pushed.uploaded[key] = outcome
        else:
            pushed.known.append(key)
    return pushed


def _push_trials(client: RemoteCacheClient) -> tuple[int, list[str]]:
    """Upload all trials of the ledger and return their number, and what went wrong."""
    trials, problems = 0, []
    for source in remote_ledger.list_machine_classes(client.connection.store):
        try:
            trials += remote_ledger.push_trials(client.connection, source)
            remote_ledger.mark_pushed(client, source)
        except RemoteCacheError as problem:
            problems.append(f"trials of {source.device.get('class', 'a device')}: {problem}")
    return trials, problems


def _pull_trials(client: RemoteCacheClient, check: bool) -> tuple[int, list[str]]:
    """Fetch the trials of machines like this one and return the number of new ones, and what went wrong."""
    trials, problems = 0, []
    with start_trace_check(client.connection.store, check) as checker:
        for source in remote_ledger.list_machine_classes(client.connection.store):
            try:
                pulled = remote_ledger.pull_trials(client.connection, source, checker)
            except RemoteCacheError as problem:
                problems.append(f"trials of {source.device.get('class', 'a device')}: {problem}")
            else:
                trials += pulled.new
                problems += pulled.problems
    return trials, problems


def _exit_code(client: RemoteCacheClient, *, failed: bool) -> int:
    if client.connection.reads.open or client.connection.writes.open:
        return EXIT_ENVIRONMENT
    return EXIT_FAILED if failed else EXIT_OK


def _shorten(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN_LINES
    return lines[:_SHOWN_LINES] + ([f"and {more} more"] if more > 0 else [])
