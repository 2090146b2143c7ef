"""Share measured trials through a remote cache: a `tune` stage begins with the trials of others.

The local ledger is authoritative: if packs in the remote cache get lost, the next `tune` stage uploads its trials again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import packages, signing
from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.errors import Interrupted, StoreError, UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import size_text
from tvmflow.core.types import Json
from tvmflow.store.http_client import Corrupt, TransferError, Unreachable
from tvmflow.store.local import LocalStore
from tvmflow.store.remote import signed_actions
from tvmflow.store.remote.client import RemoteCacheClient
from tvmflow.store.remote.connection import BlobRef, CircuitBreaker, RemoteConnection
from tvmflow.store.remote.signed_actions import InvalidAction
from tvmflow.tuning.ledger import MachineClass, this_machine_class
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.packs import ImportResult, export_pack, import_pack
from tvmflow.tuning.replay import TraceCheck

_log = logging.getLogger(__name__)

_SPOOL_PREFIX: Final = "ledger"
_PACK_NAME: Final = "trials.jsonl.gz"
# More packs than this are merged into one.
_MAX_PACKS: Final = 16


class PullResult(NamedTuple):
    """The result of pulling trials into a ledger.

    Attributes:
        packs: How many packs the ledger now contains completely, including earlier ones.
    """

    new: int
    packs: int
    problems: tuple[str, ...]


# ---------------------------------------------------------------- machine classes


def measured_machine_class(settings: Mapping[str, Json]) -> MachineClass | None:
    """Return the machine class that a `tune` stage measures on; None if it measures nothing."""
    if "device" not in settings:
        return None
    return MachineClass(packages.identity("apache-tvm"), settings["device"])


def list_machine_classes(store: LocalStore) -> list[MachineClass]:
    """Return this machine's class, and all classes with trials in the local ledger."""
    descriptions = [folder.description for folder in list_target_folders(Path(store.ledger))]
    known = [description.machine_class for description in descriptions if description]
    classes = [this_machine_class(), *known]
    return list({index_key(machine_class): machine_class for machine_class in classes}.values())


# ---------------------------------------------------------------- around tuning


class LedgerSync:
    """Pulls trials before a run measures on a machine class, and pushes its own afterwards."""

    def __init__(self, client: RemoteCacheClient) -> None:
        """Register a handler; call this before the client starts, since earlier runs may have left trials."""
        self._client = client
        self._pulled: set[str] = set()
        self._lock = threading.Lock()
        client.uploader.add_handler(_SPOOL_PREFIX, self._push)

    def pull(self, settings: Mapping[str, Json]) -> None:
        """Pull the trials of others on the machine class of a `tune` stage, once per run."""
        connection = self._client.connection
        machine_class = measured_machine_class(settings)
        if machine_class is None or not connection.access.reads or connection.reads.open:
            return
        key = index_key(machine_class)
        with self._lock:
            first = key not in self._pulled
            self._pulled.add(key)
        if first:
            # the circuit breaker reports a remote cache that does not answer
            with contextlib.suppress(TransferError, StoreError, Interrupted):
                pull_trials(connection, machine_class)

    def offer(self, settings: Mapping[str, Json]) -> None:
        """Queue the trials of a `tune` stage's machine class, to be pushed in the background."""
        machine_class = measured_machine_class(settings)
        if machine_class is not None:
            text = json.dumps(machine_class._asdict())
            self._client.uploader.offer(_spool_item(machine_class), text)

    def _push(self, text: str) -> None:
        try:
            value = json.loads(text)
            machine_class = MachineClass(value["tvm"], value["device"])
        except (ValueError, KeyError, TypeError) as damage:
            # the next `tune` stage queues these trials again
            _log.debug("a damaged item of the spool is dropped: %s", damage)
            return
        push_trials(self._client.connection, machine_class)


def mark_pushed(client: RemoteCacheClient, machine_class: MachineClass) -> None:
    """Remove a machine class from the queue of trials to push."""
    client.uploader.spool.remove(_spool_item(machine_class))


def _spool_item(machine_class: MachineClass) -> str:
    return f"{_SPOOL_PREFIX}-{index_key(machine_class)}"


# ---------------------------------------------------------------- pulling


def pull_trials(
    connection: RemoteConnection, machine_class: MachineClass, checker: TraceCheck | None = None
) -> PullResult:
    """Import the trials that others measured on a machine class into the local ledger.

    Packs that are damaged, not trusted or rejected by the ledger are reported and skipped.

    Raises:
        TransferError: when the remote cache does not answer.
        StoreError: when the ledger cannot be written.
    """
    key, store = index_key(machine_class), connection.store
    new = packs = 0
    problems = []
    for digest, pack in read_index(connection, key, connection.reads).items():
        if store.notes.read("ledger", "taken", digest) is not None:
            packs += 1
            continue
        try:
            result = _import(connection, pack, machine_class, Path(store.ledger), checker)
        except (InvalidAction, Corrupt, UsageError) as reason:
            text = reason.message if isinstance(reason, UsageError) else str(reason)
            text = text.replace("\n", " ")
            problems.append(connection.report(f"the trials {digest[:12]} are rejected: {text}"))
            continue
        new += sum(target.new for target in result.targets)
        packs += 1
        if result.complete:
            store.notes.write("", "ledger", "taken", digest)
    _log.debug("%d new trials in %d packs from %s", new, packs, connection.address)
    return PullResult(new, packs, tuple(problems))


def _import(
    connection: RemoteConnection,
    pack: SignedPack,
    machine_class: MachineClass,
    ledger: Path,
    checker: TraceCheck | None = None,
) -> ImportResult:
    """Download, verify and import one pack; InvalidAction, Corrupt or UsageError if it is rejected."""
    verify_index_statement(connection, index_key(machine_class), pack)
    with _temporary_folder(connection.store) as folder:
        path = folder / _PACK_NAME
        if not connection.download_blob(pack.trials, path):
            raise Corrupt("it is missing")
        result = import_pack(path, ledger, machine_class, checker)
    for problem in result.problems:
        connection.report(f"refused: {problem.replace(str(path), 'a pack of trials')}")
    return result


@contextlib.contextmanager
def _temporary_folder(store: LocalStore) -> Iterator[Path]:
    parent = Path(store.blobs.temporary_path()).parent
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


# ---------------------------------------------------------------- pushing


def push_trials(connection: RemoteConnection, machine_class: MachineClass) -> int:
    """Upload all local trials of a machine class; return their count.

    Raises:
        TransferError: when the remote cache does not accept them.
        StoreError: when the ledger cannot be read.
    """
    key, notes = index_key(machine_class), connection.store.notes
    with _temporary_folder(connection.store) as folder:
        path = folder / _PACK_NAME
        trials = _export(Path(connection.store.ledger), machine_class, path)
        if not trials:
            return 0
        packs = read_index(connection, key, connection.writes)
        if len(packs) > _MAX_PACKS:
            merged = _merge(connection, packs, machine_class, path)
            # the merged pack may have trials that this ledger lacks, so it is not recorded as this ledger's own pack
            add_to_index(connection, key, _upload(connection, key, path), merged)
            return trials
        own = _upload(connection, key, path)
    previous = notes.read("ledger", "sent", connection.address, key)
    # the new pack contains this ledger's previous one and replaces it
    add_to_index(connection, key, own, {previous or ""} - {own.trials.digest})
    notes.write("", "ledger", "taken", own.trials.digest)
    notes.write(own.trials.digest, "ledger", "sent", connection.address, key)
    return trials


def _export(ledger: Path, machine_class: MachineClass, path: Path) -> int:
    targets = [
        folder.key
        for folder in list_target_folders(ledger)
        if folder.description is not None and folder.description.machine_class == machine_class
    ]
    if not targets:
        return 0
    try:
        return export_pack(path, ledger, targets=targets).trials
    except UsageError:
        # the targets have no trials
        return 0


def _merge(
    connection: RemoteConnection,
    packs: Mapping[str, SignedPack],
    machine_class: MachineClass,
    path: Path,
) -> set[str]:
    """Merge packs into the pack at `path`; return the digests of the packs that it now contains.

    A separate ledger is used, so that trials pruned from the local ledger do not come back there.
    """
    ledger = path.parent / "ledger"
    ledger.mkdir()
    import_pack(path, ledger, machine_class)
    merged = set()
    for digest, pack in packs.items():
        with contextlib.suppress(InvalidAction, Corrupt, UsageError):
            # keep packs with trials of a newer version, which this version cannot read
            if _import(connection, pack, machine_class, ledger).complete:
                merged.add(digest)
    _export(ledger, machine_class, path)
    return merged - {_blob_ref(path).digest}


def _upload(connection: RemoteConnection, key: str, path: Path) -> SignedPack:
    trials = _blob_ref(path)
    connection.upload_missing_blob(trials, path)
    statement_path = path.with_name("statement.json")
    statement_path.write_bytes(make_index_statement(key, trials, connection.access.signer))
    statement = _blob_ref(statement_path)
    connection.upload_missing_blob(statement, statement_path)
    return SignedPack(trials, statement)


def _blob_ref(path: Path) -> BlobRef:
    return BlobRef(hash_file(path), path.stat().st_size)


# ---------------------------------------------------------------- remote index
# For each TVM build and class of device, the remote cache has an index: an action that lists packs of trials (see
# `packs`) by digest, each with a signed statement. To add a pack, a writer reads the index, writes it with the pack
# added, and reads it again. If two write at once, the overwritten one sees that its pack is missing, and adds it
# again.


PAYLOAD_TYPE: Final = "application/vnd.tvmflow.trials+json"
_PACK_PATH: Final = "trials/{}.jsonl.gz"
_STATEMENT_PATH: Final = "trials/{}.dsse.json"
_MAX_STATEMENT_BYTES: Final = 64 << 10
_MAX_PACK_BYTES: Final = 4 << 30
_MAX_WRITES: Final = 12
_PAUSE_S: Final = 0.05


class SignedPack(NamedTuple):
    """A pack of trials, and the envelope with its signed statement."""

    trials: BlobRef
    statement: BlobRef


def index_key(machine_class: MachineClass) -> str:
    """Return the key of the action that lists the packs of a machine class."""
    return digest_of(["tvmflow trials 1", machine_class.tvm, dict(machine_class.device)])


def read_index(
    connection: RemoteConnection, key: str, circuit_breaker: CircuitBreaker
) -> dict[str, SignedPack]:
    """Return the packs of an index by digest; an unreadable index is reported and counts as empty.

    Raises:
        TransferError: when the remote cache does not answer.
    """
    content = connection.get_action(key, circuit_breaker)
    if content is None:
        return {}
    try:
        files = signed_actions.decode(content)
    except InvalidAction as reason:
        connection.report(f"the index of trials {key[:12]} is rejected: {reason}")
        return {}
    packs = {}
    for path, trials in files.items():
        statement = files.get(_STATEMENT_PATH.format(trials.digest))
        if path == _PACK_PATH.format(trials.digest) and statement is not None:
            packs[trials.digest] = SignedPack(trials, statement)
    return packs


def add_to_index(
    connection: RemoteConnection, key: str, pack: SignedPack, replaced: set[str]
) -> None:
    """Add a pack to an index, remove the packs that it replaces, and repeat until the pack stays.

    Raises:
        TransferError: when the remote cache does not accept it.
    """
    for _ in range(_MAX_WRITES):
        started = time.monotonic()
        packs = read_index(connection, key, connection.writes)
        if packs.get(pack.trials.digest) == pack and not replaced & packs.keys():
            return
        files: dict[str, BlobRef] = {}
        for digest, listed in {**packs, pack.trials.digest: pack}.items():
            if digest not in replaced or listed is pack:
                files[_PACK_PATH.format(digest)] = listed.trials
                files[_STATEMENT_PATH.format(digest)] = listed.statement
        connection.put_action(key, signed_actions.encode(files))
        # wait longer than another writer takes from reading to writing
        elapsed_s = time.monotonic() - started
        time.sleep(random.uniform(1, 3) * (elapsed_s + _PAUSE_S))
    if pack.trials.digest not in read_index(connection, key, connection.writes):
        raise Unreachable("other machines keep overwriting the index of trials")


# ---------------------------------------------------------------- statements


def make_index_statement(key: str, trials: BlobRef, signer: signing.PrivateKey | None) -> bytes:
    """Return the envelope that states the index of a pack, signed if `signer` is given."""
    payload = canonical(_statement(key, trials))
    return canonical(signing.sign_envelope(PAYLOAD_TYPE, payload, (signer,) if signer else ()))


def verify_index_statement(connection: RemoteConnection, key: str, pack: SignedPack) -> None:
    """Check that a pack was made for this index, and signed by a trusted key if there are any.

    Raises:
        InvalidAction: The check fails.
        TransferError: when the remote cache does not answer.
    """
    if pack.statement.size > _MAX_STATEMENT_BYTES or pack.trials.size > _MAX_PACK_BYTES:
        raise InvalidAction(f"it has a size of {size_text(pack.trials.size)}")
    text = connection.read_blob(pack.statement, connection.reads)
    try:
        envelope = read_json(text or b"null")
        trusted = connection.access.trusted
        payload, _ = signed_actions.open_trusted(envelope, PAYLOAD_TYPE, trusted)
        if read_json(payload) != _statement(key, pack.trials):
            raise InvalidAction("its statement is about another pack")
    except Unreadable:
        raise InvalidAction("its statement is damaged") from None


def _statement(key: str, trials: BlobRef) -> Json:
    return {"index": key, "pack": trials.digest, "size": trials.size}
