"""The index of trial packs in a remote cache, and who made each pack.

For each TVM build and class of device the remote cache has an index: an action that lists packs of
trials (see `pack`) by digest, each with a statement of who made it. A writer adds its own pack: it
reads the index, writes it with one more, and reads it again to see whether the pack stayed, so of
two that write at once the one that was overwritten adds its pack again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from tvmflow.core import signing
from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.formatting import size_text
from tvmflow.core.types import Json
from tvmflow.store.remote import action_result
from tvmflow.store.remote._base import BlobRef, Unreachable
from tvmflow.store.remote.action_result import InvalidAction
from tvmflow.store.remote.circuit_breaker import CircuitBreaker
from tvmflow.store.remote.connection import RemoteConnection
from tvmflow.tuning.machine_class import MachineClass

PAYLOAD_TYPE: Final = "application/vnd.tvmflow.trials+json"
_PACK_PATH: Final = "trials/{}.jsonl.gz"
_STATEMENT_PATH: Final = "trials/{}.dsse.json"
_MAX_STATEMENT_BYTES: Final = 64 << 10
_MAX_PACK_BYTES: Final = 4 << 30
_MAX_WRITES: Final = 12
_PAUSE_S: Final = 0.05


class SignedPack(NamedTuple):
    """A pack of trials, and the envelope with the statement of who made it."""

    trials: BlobRef
    statement: BlobRef


def index_key(machine_class: MachineClass) -> str:
    """Return the key of the action that lists the packs of a machine class."""
    return digest_of(["tvmflow trials 1", machine_class.tvm, dict(machine_class.device)])


def read_index(
    connection: RemoteConnection, key: str, circuit_breaker: CircuitBreaker
) -> dict[str, SignedPack]:
    """Return the packs of an index by digest. An index that cannot be read is reported and counts as empty.

    Raises:
        RemoteCacheError: when the remote cache does not answer.
    """
    content = connection.get_action(key, circuit_breaker)
    if content is None:
        return {}
    try:
        files = action_result.decode(content)
    except InvalidAction as reason:
        connection.report(f"the index of trials {key[:12]} is rejected: {reason}")
        return {}
    packs = {}
    for path, trials in files.items():
        statement = files.get(_STATEMENT_PATH.format(trials.digest))
        if path == _PACK_PATH.format(trials.digest) and statement is not None:
            packs[trials.digest] = SignedPack(trials, statement)
    return packs


def _encode_index(packs: Mapping[str, SignedPack]) -> bytes:
    files: dict[str, BlobRef] = {}
    for digest, pack in packs.items():
        files[_PACK_PATH.format(digest)] = pack.trials
        files[_STATEMENT_PATH.format(digest)] = pack.statement
    return action_result.encode(files)


def add_to_index(
    connection: RemoteConnection, key: str, pack: SignedPack, replaced: set[str]
) -> None:
    """Add a pack to an index in place of those that it replaces, until it stays there.

    Raises:
        RemoteCacheError: when the remote cache does not accept it.
    """
    for _ in range(_MAX_WRITES):
        started = time.monotonic()
        packs = read_index(connection, key, connection.writes)
        if packs.get(pack.trials.digest) == pack and not replaced & packs.keys():
            return
        kept = {digest: other for digest, other in packs.items() if digest not in replaced}
        connection.put_action(key, _encode_index({**kept, pack.trials.digest: pack}))
        # longer than another writer takes between its reading and its writing
        elapsed_s = time.monotonic() - started
        time.sleep(random.uniform(1, 3) * (elapsed_s + _PAUSE_S))
    if pack.trials.digest not in read_index(connection, key, connection.writes):
        raise Unreachable("other machines keep overwriting the index of trials")


# ---------------------------------------------------------------- statements


def make_statement(key: str, trials: BlobRef, signer: signing.PrivateKey | None) -> bytes:
    """Return the envelope that says to which index a pack belongs, signed by `signer` if there is one."""
    payload = canonical(_statement(key, trials))
    return canonical(signing.sign_envelope(PAYLOAD_TYPE, payload, (signer,) if signer else ()))


def verify_statement(connection: RemoteConnection, key: str, pack: SignedPack) -> None:
    """Accept only a pack that was made for this index, by a trusted key where some are named.

    Raises:
        InvalidAction: when it was not.
        RemoteCacheError: when the remote cache does not answer.
    """
    if pack.statement.size > _MAX_STATEMENT_BYTES or pack.trials.size > _MAX_PACK_BYTES:
        raise InvalidAction(f"it has a size of {size_text(pack.trials.size)}")
    text = connection.read_blob(pack.statement, connection.reads)
    trusted = connection.access.trusted
    try:
        envelope = read_json(text or b"null")
        if trusted:
            payload, _ = signing.verify_envelope(envelope, PAYLOAD_TYPE, trusted)
        else:
            payload = signing.open_envelope(envelope, PAYLOAD_TYPE)
        if read_json(payload) != _statement(key, pack.trials):
            raise InvalidAction("its statement is about another pack")
    except signing.InvalidEnvelope as reason:
        raise InvalidAction(str(reason)) from None
    except Unreadable:
        raise InvalidAction("its statement is damaged") from None


def _statement(key: str, trials: BlobRef) -> Json:
    return {"index": key, "pack": trials.digest, "size": trials.size}
