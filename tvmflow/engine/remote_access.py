"""Access to a remote cache, from settings or environment: address, mode, client, prefetching."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.core import signing
from tvmflow.core.errors import UsageError
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Json, Plan, StageSpec
from tvmflow.store.local import LocalStore
from tvmflow.store.remote import open_remote_cache
from tvmflow.store.remote.client import Fetched, RemoteCacheClient
from tvmflow.store.remote.connection import Access, RemoteConnection
from tvmflow.store.remote.http import without_credentials

if TYPE_CHECKING:
    # A push plans nothing, and need not import this.
    from tvmflow.planning.decisions import PlanState

_log = logging.getLogger(__name__)

URL_VARIABLE: Final = "TVMFLOW_REMOTE"
MODE_VARIABLE: Final = "TVMFLOW_REMOTE_MODE"
_READS_AND_WRITES: Final[Mapping[str, tuple[bool, bool]]] = {
    "read": (True, False),
    "write": (False, True),
    "both": (True, True),
}
_OFF: Final = "off"
_MODES: Final = (*_READS_AND_WRITES, _OFF)
# How many stages are prefetched at a time.
_PARALLEL_STAGES: Final = 8


class RemoteSettings(NamedTuple):
    """How to use a remote cache. None means: take the environment's setting.

    The mode is `read`, `write`, `both` or `off`. `wait_s` limits the wait for uploads at the end of a run; None for a
    share of the run's time. `require_signatures` is a file or folder of keys, one of which must have signed a result.
    """

    url: str | None = None
    mode: str | None = None
    timeout_s: float = 10.0
    wait_s: float | None = None
    require_signatures: Path | None = None
    reads_only: bool = False


def open_run_client(
    settings: RemoteSettings,
    store: LocalStore,
    warn: Callable[[str], None],
    is_cancelled: Callable[[], bool],
) -> RemoteCacheClient | None:
    """Return the client for a run; None without a remote cache, or with mode `off`.

    Raises:
        UsageError: for a mode, an address or a key that is not valid.
        EnvironmentProblem: when a package that this kind of address needs is not installed.
    """
    mode = _find_mode(settings.mode)
    url = find_url(settings)
    if not url or mode == _OFF:
        return None
    reads, writes = _READS_AND_WRITES[mode]
    writes &= not settings.reads_only
    access = Access(reads=reads, writes=writes, wait_s=settings.wait_s)
    connection = _open_connection(settings, url, store, access, warn, is_cancelled)
    return RemoteCacheClient(connection, _can_be_shown)


def cluster_remote_url(settings: RemoteSettings) -> str:
    """Return the URL of the remote cache through which a cluster exchanges files."""
    url = find_url(settings)
    if not url or _find_mode(settings.mode) == _OFF:
        raise UsageError(
            "--executor dask sends files through a remote cache, and this run has none",
            fix=f"give --remote URL, or set ${URL_VARIABLE}; the mode must not be off",
        )
    return url


def open_cluster_client(
    settings: RemoteSettings,
    store: LocalStore,
    warn: Callable[[str], None],
    is_cancelled: Callable[[], bool],
) -> tuple[str, RemoteConnection]:
    """Return the URL without credentials, and a connection for a cluster's files.

    In every mode, blobs are written to it.
    """
    url = cluster_remote_url(settings)
    shown = without_credentials(url) if "://" in url else str(Path(url).expanduser().absolute())
    access = Access(writes=True)
    return shown, _open_connection(settings, url, store, access, warn, is_cancelled)


def open_command_client(
    settings: RemoteSettings, store: LocalStore, warn: Callable[[str], None], *, writes: bool
) -> RemoteCacheClient:
    """Return the client of a command that only reads (`cache pull`) or only writes (`cache push`)."""
    url = find_url(settings)
    if not url:
        raise UsageError(
            "no remote cache is named", fix=f"give --remote URL, or set ${URL_VARIABLE}"
        )
    if _find_mode(None) == _OFF:
        fix = "unset it for this command"
        raise UsageError(f"${MODE_VARIABLE} is off: remote caches must not be used", fix=fix)
    access = Access(reads=not writes, writes=writes)
    connection = _open_connection(settings, url, store, access, warn, lambda: False)
    return RemoteCacheClient(connection, _can_be_shown)


def must_upload(settings: RemoteSettings, store: LocalStore) -> bool:
    """Return whether a run may write to a remote cache, and has results waiting for upload."""
    return _find_mode(settings.mode) in ("write", "both") and any(
        store.notes.list("spool", remote) for remote in store.notes.list("spool")
    )


def find_url(settings: RemoteSettings) -> str:
    """Return the URL that `--remote` or the environment names; empty if there is none."""
    return os.environ.get(URL_VARIABLE, "") if settings.url is None else settings.url


def _find_mode(option: str | None) -> str:
    mode = option or os.environ.get(MODE_VARIABLE) or "read"
    if mode not in _MODES:
        name = "remote_mode" if option else f"${MODE_VARIABLE}"
        raise UsageError(
            f"{name}: '{mode}' is not a mode", fix=f"set it to one of {', '.join(_MODES)}"
        )
    return mode


def _can_be_shown(stage: str, facts: Mapping[str, Json]) -> bool:
    # A run that only uploads does not need the stages' modules.
    from tvmflow.engine.report import can_be_shown

    return can_be_shown(stage, facts)


def _open_connection(
    settings: RemoteSettings,
    url: str,
    store: LocalStore,
    access: Access,
    warn: Callable[[str], None],
    is_cancelled: Callable[[], bool],
) -> RemoteConnection:
    required = settings.require_signatures
    trusted = (
        signing.load_trusted_keys() if required is None else signing.load_public_keys(required)
    )
    signer = signing.load_signing_key() if access.writes else None
    cache = open_remote_cache(url, timeout_s=settings.timeout_s)
    folder, root = Path(cache.address), Path(store.root)
    if root == folder or root in folder.parents:
        raise UsageError(
            f"--remote {cache.address} is inside the store {shortest_path(store.root)}",
            fix="give another folder",
        )
    access = access._replace(signer=signer, trusted=trusted, patience_s=settings.timeout_s)
    return RemoteConnection(cache, store, access, warn, is_cancelled)


def estimate_work(stages: Sequence[StageSpec], store: LocalStore) -> float | None:
    """Return how many seconds the stages took in total when they last ran here; None if one is unknown."""
    seconds = 0.0
    for spec in stages:
        key = store.last_key(spec.recipe, spec.label)
        record = store.record(key) if key else None
        if record is None:
            return None
        seconds += record.seconds
    return seconds


def prefetch(
    plan: Plan,
    state: PlanState,
    remote_client: RemoteCacheClient,
    on_fetched: Callable[[StageSpec, Fetched], None],
) -> None:
    """Fetch results level by level, because fetched results determine the keys of later stages.

    Fetched results are added to the state, and `on_fetched` is called for each of their stages. No key is claimed: if
    two runs fetch the same result, both get the same bytes.
    """
    requested: set[str] = set()
    with ThreadPoolExecutor(_PARALLEL_STAGES, "remote-fetches") as pool:
        while True:
            missing = [
                spec
                for spec in plan.stages
                if state.decisions[spec.id].kind == "run" and spec.id not in state.forced
            ]
            keys = {state.keys[spec.id].digest: state.keys[spec.id] for spec in missing}
            new = [key for digest, key in keys.items() if digest not in requested]
            requested.update(keys)
            results = pool.map(remote_client.reader.fetch, new)
            fetched = {
                key.digest: result for key, result in zip(new, results, strict=True) if result
            }
            _log.debug("fetched %d of %d missing results", len(fetched), len(new))
            for spec in missing:
                digest = state.keys[spec.id].digest
                if digest in fetched:
                    on_fetched(spec, fetched[digest])
            if not fetched:
                return
            state.decide_all(plan)
