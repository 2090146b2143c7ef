"""Measured trials of a team: whoever tunes begins with what all others have measured on such a machine.

For each build of TVM and class of device the remote has an index, an action that names packs of
trials (see `tuning.pack`) by content. A writer adds its own pack: it reads the index, writes it
with one more, and looks again whether it stayed, so of two that write at once the one that was
overwritten adds its pack again. Whatever becomes of the index, the local ledger is the truth,
and the next tuning offers it anew.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow import signing, tools
from tvmflow.errors import UsageError
from tvmflow.keys import canonical, digest_of
from tvmflow.stores.remote import actions
from tvmflow.stores.remote._base import Unreachable, Wrong
from tvmflow.stores.remote.actions import Content, Refused
from tvmflow.stores.remote.breaker import Breaker

if TYPE_CHECKING:
    from tvmflow.stores.remote.tier import Tier
    from tvmflow.tuning.pack import Received
    from tvmflow.tuning.records import Here

KIND: Final = "application/vnd.tvmflow.trials+json"
_PACK: Final = "trials/{}.jsonl.gz"
_SEAL: Final = "trials/{}.dsse.json"
_LONGEST_SEAL: Final = 64 << 10
_LARGEST_PACK: Final = 4 << 30
# What a pack may unpack to, for each of its bytes.
_MOST_UNPACKED: Final = 200
# More packs than this are made into one.
_MOST_PACKS: Final = 16
_ROUNDS: Final = 12
_PAUSE_S: Final = 0.05


class Pack(NamedTuple):
    """A pack of trials, and the statement of who made it."""

    trials: Content
    seal: Content


class Pulled(NamedTuple):
    """What a ledger got: new trials, how many packs are whole and taken, and what is wrong with others."""

    new: int
    packs: int
    problems: tuple[str, ...]


# ---------------------------------------------------------------- which machines share


def measured_on(settings: Mapping[str, Any]) -> Here | None:
    """The kind of machine that a `tune` stage measures on; None when it measures nothing."""
    from tvmflow.tuning.records import Here

    if "device" not in settings:
        return None
    return Here(tools.identity("apache-tvm"), settings["device"])


def index_key(here: Here) -> str:
    """Where the packs of such machines are named, as an action's key."""
    return digest_of(["tvmflow trials 1", here.tvm, here.device])


def note_of(here: Here) -> str:
    return json.dumps(here._asdict())


def here_of(note: str) -> Here:
    """What `note_of` was made from."""
    from tvmflow.tuning.records import Here

    return Here(**json.loads(note))


def all_here(tier: Tier) -> list[Here]:
    """This machine, and all those that the local ledger has trials of."""
    from tvmflow.tuning.records import Here, folders, this_machine

    known = [
        Here(each.about["tvm"], each.about["device"])
        for each in folders(Path(tier.store.ledger))
        if not each.wrong
    ]
    return list({index_key(each): each for each in [this_machine(), *known]}.values())


# ---------------------------------------------------------------- the index


def _packs(tier: Tier, key: str, breaker: Breaker) -> dict[str, Pack]:
    """What the index names, by digest. One that cannot be read counts as empty, and is told."""
    content = breaker.ask(lambda: tier.remote.action(key))
    if content is None:
        return {}
    try:
        files = actions.decode(content)
    except Refused as why:
        tier.tell(f"{tier.remote.place}: the index of trials {key[:12]} is refused: {why}")
        return {}
    found = {}
    for path, trials in files.items():
        seal = files.get(_SEAL.format(trials.digest))
        if path == _PACK.format(trials.digest) and seal is not None:
            found[trials.digest] = Pack(trials, seal)
    return found


def _index(packs: Mapping[str, Pack]) -> bytes:
    files: dict[str, Content] = {}
    for digest, pack in packs.items():
        files[_PACK.format(digest)] = pack.trials
        files[_SEAL.format(digest)] = pack.seal
    return actions.encode(files)


def _statement(key: str, trials: Content) -> dict[str, Any]:
    return {"index": key, "pack": trials.digest, "size": trials.size}


def _check_seal(tier: Tier, key: str, pack: Pack, breaker: Breaker) -> None:
    """Raises Refused for a pack that none of the trusted made for this index."""
    if pack.seal.size > _LONGEST_SEAL or pack.trials.size > _LARGEST_PACK:
        raise Refused(f"it claims {pack.trials.size} bytes")
    text = tier.read(pack.seal, breaker)
    try:
        envelope = json.loads(text or b"null")
        if tier.access.trusted:
            said, _ = signing.unseal_trusted(envelope, KIND, tier.access.trusted)
        else:
            said = signing.unseal(envelope, KIND)
        if json.loads(said) != _statement(key, pack.trials):
            raise Refused("its seal is of another pack")
    except signing.NotSigned as why:
        raise Refused(str(why)) from None
    except (ValueError, RecursionError):
        raise Refused("its seal is damaged") from None


# ---------------------------------------------------------------- from the remote


def pull(tier: Tier, here: Here) -> Pulled:
    """Add the trials that others measured on such a machine to the local ledger. Raises RemoteProblem, StoreError.

    A pack that is damaged, not trusted or refused by the ledger's own rules is named and left out.
    """
    key = index_key(here)
    new = taken = 0
    problems = []
    for digest, pack in _packs(tier, key, tier.reading).items():
        if tier.store.read_note("ledger", "taken", digest) is not None:
            taken += 1
            continue
        try:
            received = _take(tier, key, pack, here, Path(tier.store.ledger))
        except (Refused, Wrong, UsageError) as why:
            text = f"{tier.remote.place}: the trials {digest[:12]} are refused: {_words(why)}"
            tier.tell(text)
            problems.append(text)
            continue
        new += sum(each.new for each in received.targets)
        taken += 1
        if received.complete:
            tier.store.write_note("", "ledger", "taken", digest)
    return Pulled(new, taken, tuple(problems))


def _take(tier: Tier, key: str, pack: Pack, here: Here, root: Path) -> Received:
    """Add one pack to a ledger. Raises Refused, Wrong, UsageError."""
    from tvmflow.tuning.pack import import_pack

    _check_seal(tier, key, pack, tier.reading)
    with _scratch(tier) as folder:
        path = folder / "trials.jsonl.gz"
        if not tier.download(pack.trials, path):
            raise Wrong("it is missing")
        _check_unpacked(path)
        received = import_pack(path, root, here)
    for problem in received.problems:
        tier.tell(
            f"{tier.remote.place}: not taken: {problem.replace(str(path), 'a pack of trials')}"
        )
    return received


def _check_unpacked(path: Path) -> None:
    """Raises Refused for a small pack that would fill a disk or a memory."""
    most = path.stat().st_size * _MOST_UNPACKED + (1 << 20)
    with contextlib.suppress(EOFError, OSError), gzip.open(path, "rb") as stream:
        while stream.read(1 << 20):
            if stream.tell() > most:
                raise Refused("it unpacks to far more than any such pack")


def _words(why: Exception) -> str:
    return (why.message if isinstance(why, UsageError) else str(why)).replace("\n", " ")


@contextlib.contextmanager
def _scratch(tier: Tier) -> Iterator[Path]:
    """A folder on the disk of the store that is gone afterwards."""
    path = Path(tier.store.temporary())
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        yield Path(folder)


# ---------------------------------------------------------------- to the remote


def push(tier: Tier, here: Here) -> int:
    """Give the remote the local trials of such machines; how many it was given. Raises RemoteProblem, StoreError."""
    key = index_key(here)
    with _scratch(tier) as folder:
        path = folder / "trials.jsonl.gz"
        packed = _pack_up(Path(tier.store.ledger), here, path)
        if not packed:
            return 0
        packs = _packs(tier, key, tier.writing)
        if len(packs) > _MOST_PACKS:
            joined = _joined(tier, key, packs, here, folder, path)
            # it holds what this ledger may lack: to be pulled as any other, and never this one's to replace
            _enter(tier, key, _send(tier, key, path), joined)
            return packed
        own = _send(tier, key, path)
    before = tier.store.read_note("ledger", "sent", tier.remote.place, key)
    # what this ledger gave before is in what it gives now
    _enter(tier, key, own, {before or ""} - {own.trials.digest})
    tier.store.write_note("", "ledger", "taken", own.trials.digest)
    tier.store.write_note(own.trials.digest, "ledger", "sent", tier.remote.place, key)
    return packed


def _pack_up(root: Path, here: Here, path: Path) -> int:
    """Write all trials of such machines into one file; how many there are."""
    from tvmflow.tuning.pack import export_pack
    from tvmflow.tuning.records import folders

    own = [
        each.key
        for each in folders(root)
        if not each.wrong and (each.about["tvm"], each.about["device"]) == tuple(here)
    ]
    if not own:
        return 0
    try:
        return export_pack(path, root, targets=own).trials
    except UsageError:
        # targets that were looked at and never measured on
        return 0


def _joined(
    tier: Tier, key: str, packs: Mapping[str, Pack], here: Here, folder: Path, path: Path
) -> set[str]:
    """Add to the file at `path` what the packs have; those that are now in it as a whole.

    By way of a ledger of its own: what was forgotten in the local one on purpose stays forgotten there.
    """
    from tvmflow.tuning.pack import import_pack

    root = folder / "ledger"
    root.mkdir()
    import_pack(path, root, here)
    whole = set()
    for digest, pack in packs.items():
        with contextlib.suppress(Refused, Wrong, UsageError):
            # a newer version's trials, that this one cannot read, must not go
            if _take(tier, key, pack, here, root).complete:
                whole.add(digest)
    _pack_up(root, here, path)
    return whole - {_content_of(path).digest}


def _send(tier: Tier, key: str, path: Path) -> Pack:
    trials = _content_of(path)
    tier.send_file(trials, path)
    signer = tier.access.signer
    text = canonical(_statement(key, trials))
    beside = path.with_name("seal.json")
    beside.write_bytes(canonical(signing.seal(KIND, text, (signer,) if signer else ())))
    seal = _content_of(beside)
    tier.send_file(seal, beside)
    return Pack(trials, seal)


def _content_of(path: Path) -> Content:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return Content(digest.hexdigest(), path.stat().st_size)


def _enter(tier: Tier, key: str, own: Pack, gone: set[str]) -> None:
    """Add a pack to the index in place of those that it makes superfluous, until it stays there."""
    for _ in range(_ROUNDS):
        started = time.monotonic()
        there = _packs(tier, key, tier.writing)
        if there.get(own.trials.digest) == own and not gone & there.keys():
            return
        kept = {digest: pack for digest, pack in there.items() if digest not in gone}
        listed = _index({**kept, own.trials.digest: own})
        tier.put_action(key, listed)
        # longer than another takes from its look to its writing
        took = time.monotonic() - started
        time.sleep(random.uniform(1, 3) * (took + _PAUSE_S))
    if own.trials.digest not in _packs(tier, key, tier.writing):
        raise Unreachable("others keep writing the index of trials")
