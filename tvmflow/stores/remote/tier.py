"""The remote behind a local store: results that it has are fetched, results that are made here are sent.

Nothing that a remote does fails a run. What cannot be fetched is made here; what cannot be
sent is noted in the local store (`spool/`) before it is tried, and sent by a later run.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.errors import Interrupted, StoreError
from tvmflow.report import Traffic, printable
from tvmflow.signing import PrivateKey, PublicKey
from tvmflow.stores.local import Damaged, LocalStore
from tvmflow.stores.origin import origin_of, origin_text
from tvmflow.stores.remote import actions, ledger
from tvmflow.stores.remote._base import Declined, Remote, RemoteProblem, Unreachable, Wrong
from tvmflow.stores.remote.actions import Action, Content, Refused, Untrusted
from tvmflow.stores.remote.breaker import Breaker
from tvmflow.values import Artifact, StageKey

if TYPE_CHECKING:
    from tvmflow.tuning.records import Here

Tell = Callable[[str], None]

SPOOL: Final = "spool"
_FILES_AT_ONCE: Final = 8
_RESULTS_AT_ONCE: Final = 4
_LONGEST_QUEUE: Final = 256
_LOOK_EVERY_S: Final = 0.1
# What a run that fetches leaves free on the disk.
_SPARE: Final = 64 << 20
_LEDGER: Final = "ledger-"


class Access(NamedTuple):
    """What a run does with its remote, and whom it believes. All results when `trusted` is empty.

    `wait_s` is how long a run that is done waits for what it still has to send; `patience_s`
    what a remote that does not answer may cost in all.
    """

    reads: bool = True
    writes: bool = False
    signer: PrivateKey | None = None
    trusted: tuple[PublicKey, ...] = ()
    wait_s: float = 30.0
    patience_s: float = 10.0


class Fetched(NamedTuple):
    """A result that came from the remote: how many bytes that took, and who is known to have signed it."""

    artifact: Artifact
    bytes: int
    origin: str


class Tier:
    """One remote, for the length of a run or a command. Safe to use from several threads."""

    def __init__(
        self,
        remote: Remote,
        store: LocalStore,
        access: Access,
        tell: Tell = lambda text: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.access = access
        self.remote = remote
        self.store = store
        self._told: list[str] = []
        self._tell_user = tell
        self._cancelled = cancelled
        self.reading = Breaker(
            remote.place, self.tell, then="going on without it", patience_s=access.patience_s
        )
        self.writing = Breaker(
            remote.place,
            self._tell_of_writing,
            then="what was made here waits to be sent",
            patience_s=access.patience_s,
        )
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_FILES_AT_ONCE, "remote-files")
        self._missed: set[str] = set()
        self._to_mend: set[str] = set()
        self._fetched: set[str] = set()
        self._sent: set[str] = set()
        self._bytes = {"fetched": 0, "sent": 0}
        self._pulled: set[str] = set()
        self._queue: queue.Queue[str] = queue.Queue(_LONGEST_QUEUE)
        self._tried: set[str] = set()
        self._ending = threading.Event()
        self._stopped = threading.Event()
        self._senders: list[threading.Thread] = []
        self._items_lock = threading.Lock()
        self._items = self._all_items()
        self._spool = hashlib.sha256(remote.place.encode()).hexdigest()[:16]

    def tell(self, text: str) -> None:
        """Say something to the user, once."""
        # parts of it may be a stranger's: no control signs
        text = printable(text)
        with self._lock:
            if text in self._told:
                return
            self._told.append(text)
        self._tell_user(text)

    def _tell_of_writing(self, text: str) -> None:
        # of a remote that is gone, the one line about reading says enough
        if not self.reading.open:
            self.tell(text)

    def traffic(self) -> Traffic:
        """What has gone back and forth."""
        with self._lock:
            return Traffic(
                place=self.remote.place,
                fetched=len(self._fetched),
                fetched_bytes=self._bytes["fetched"],
                sent=len(self._sent),
                sent_bytes=self._bytes["sent"],
                waiting=len(self.waiting()),
                problems=tuple(self._told),
            )

    # ------------------------------------------------------------ from the remote

    def fetch(self, key: StageKey) -> Fetched | None:
        """The result with this key, now in the local store; None where the remote does not give a good one."""
        if not self.access.reads or self.reading.open or key.digest in self._missed:
            return None
        try:
            found = self._fetch(key.digest)
        except Refused as why:
            self._refuse(key.digest, f"{self._name(key)} is refused: {why}", why)
        except Incomplete:
            # where contents expire by their age, that is every day's news
            self._to_mend.add(key.digest)
        except Wrong as why:
            self._refuse(key.digest, f"{self._name(key)} is damaged there: {why}", why)
        except (StoreError, Declined) as why:
            self.tell(f"{self.remote.place}: {self._name(key)} is not fetched: {why}")
        except (RemoteProblem, Interrupted):
            # the breaker tells of a remote that does not answer
            pass
        else:
            if found is not None:
                return found
        self._missed.add(key.digest)
        return None

    def _name(self, key: StageKey) -> str:
        return f"the result {key.digest[:12]} of {key.preimage['stage']}"

    def _refuse(self, key: str, text: str, why: RemoteProblem) -> None:
        # who does not sign would only put one result that nobody believes in place of another
        if not isinstance(why, Untrusted) or self.access.signer is not None:
            self._to_mend.add(key)
        self.tell(f"{self.remote.place}: {text}")

    def _fetch(self, key: str) -> Fetched | None:
        found = self._look(key, self.reading)
        if found is None:
            return None
        action, signers, _ = found
        missing = {
            file.digest: file.size
            for file in action.files
            if not self._is_here(file.digest, file.size)
        }
        self._check_room(sum(missing.values()))
        # all of them are waited for: one that fails must leave none behind that writes
        tasks = [self._pool.submit(self._take, *each) for each in missing.items()]
        problems = [error for task in tasks if (error := task.exception()) is not None]
        if problems:
            raise min(problems, key=lambda each: not isinstance(each, Wrong))
        origin = origin_of(self.remote.place, action.signatures, signers)
        told = {name: value for name, value in action._asdict().items() if name not in _NOT_KEPT}
        self.store.adopt(key, {**told, "origin": origin})
        with self._lock:
            self._fetched.add(key)
            self._bytes["fetched"] += sum(missing.values())
        artifact = Artifact(key, action.files, action.facts)
        return Fetched(artifact, sum(missing.values()), origin_text(origin))

    def _look(
        self, key: str, breaker: Breaker
    ) -> tuple[Action, tuple[PublicKey, ...], Mapping[str, Content]] | None:
        """What the remote says of a key, found to be believable. Raises Refused, Wrong."""
        content = breaker.ask(lambda: self.remote.action(key))
        if content is None:
            return None
        files = actions.decode(content)
        own_part = self.read(actions.manifest_of(files), breaker)
        if own_part is None:
            return None
        return (*actions.believe(key, files, own_part, self.access.trusted), files)

    def read(self, content: Content, breaker: Breaker) -> bytes | None:
        """A small content, checked. Raises Wrong."""

        def question() -> bytes | None:
            stream = io.BytesIO()
            there = self._copy(content, stream.write)
            return stream.getvalue() if there else None

        return breaker.ask(question)

    def download(self, content: Content, path: Path) -> bool:
        """Write a content to a new file, checked on its way. Raises Wrong, StoreError."""

        def question() -> bool:
            with path.open("wb") as stream:
                return self._copy(content, stream.write)

        try:
            return self.reading.ask(question)
        except OSError as error:
            raise StoreError(f"{error.strerror or error}") from error

    def _copy(self, content: Content, write: Callable[[bytes], object]) -> bool:
        digest, size = hashlib.sha256(), 0

        def sink(piece: bytes) -> None:
            nonlocal size
            if self._cancelled():
                raise Interrupted("stopped while fetching")
            size += len(piece)
            if size > content.size:
                raise Wrong(f"{content.digest[:12]} is longer than its {content.size} bytes")
            digest.update(piece)
            try:
                write(piece)
            except OSError as error:
                # the disk's doing, which must not be taken for the remote's
                raise StoreError(error.strerror or type(error).__name__) from error

        if not self.remote.fetch(content.digest, content.size, sink):
            return False
        if size != content.size or digest.hexdigest() != content.digest:
            raise Wrong(
                f"the content {content.digest[:12]} has {size} bytes with the digest "
                f"{digest.hexdigest()[:12]}"
            )
        return True

    def _is_here(self, digest: str, size: int) -> bool:
        try:
            # a content that is there is also held, so that no collection takes it before it is named
            here = Path(self.store.blob(digest)).stat().st_size == size
        except FileNotFoundError:
            return False
        return here and self.store.use_blob(digest)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.store.root).free
        if needed and needed + _SPARE > free:
            raise StoreError(f"it takes {needed} bytes, and {self.store.root} has {free} free")

    def _take(self, digest: str, size: int) -> None:
        path = Path(self.store.temporary())
        try:
            if not self.download(Content(digest, size), path):
                raise Incomplete(f"the content {digest[:12]} is missing")
            self.store.add_file(str(path))
        finally:
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------ to the remote, in the background

    def offer(self, key: str) -> None:
        """Send a result that was made here, while the run goes on. Returns at once."""
        self._enqueue(key, "")

    def _enqueue(self, item: str, note: str) -> None:
        if not self.access.writes:
            return
        self._tried.discard(item)
        # noted first: whatever happens to this process, a later one knows
        with contextlib.suppress(StoreError):
            self.store.write_note(note, SPOOL, self._spool, item)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(item)
        self._start_sending()

    def start(self) -> None:
        """Begin with what earlier runs could not send."""
        if self.access.writes and self.waiting():
            self._start_sending()

    def _start_sending(self) -> None:
        with self._lock:
            if self._senders:
                return
            # daemons: what they have not sent is in the spool, and nobody must wait for them
            self._senders = [
                threading.Thread(target=self._send_all, daemon=True)
                for _ in range(_RESULTS_AT_ONCE)
            ]
        for sender in self._senders:
            sender.start()

    def waiting(self) -> list[str]:
        """What has yet to be sent: keys, and targets of the ledger."""
        return self.store.notes(SPOOL, self._spool)

    def _send_all(self) -> None:
        while (item := self._next_item()) is not None:
            try:
                self._send_item(item)
            except Declined as why:
                self.tell(f"{self.remote.place}: {item[:12]} is not sent: {why}")
            except (RemoteProblem, StoreError, OSError):
                # the breaker tells of a remote that does not answer; what is not sent waits
                pass
            if self.writing.open or self._stopped.is_set():
                return

    def _next_item(self) -> str | None:
        with self._items_lock:
            return next(self._items, None)

    def _all_items(self) -> Iterator[str]:
        """What is offered, and when nothing is, what the spool has; ends with the run."""
        left = self.waiting()
        while True:
            try:
                # the first look at what was left needs no patience
                item = self._queue.get(timeout=0.0 if left else _LOOK_EVERY_S)
            except queue.Empty:
                if not left and self._ending.is_set():
                    left = [each for each in self.waiting() if each not in self._tried]
                    if not left and self._queue.empty():
                        return
                if not left:
                    continue
                item = left.pop(0)
            if item not in self._tried:
                self._tried.add(item)
                yield item

    def _send_item(self, item: str) -> None:
        if item.startswith(_LEDGER):
            note = self.store.read_note(SPOOL, self._spool, item)
            if note:
                ledger.push(self, ledger.here_of(note))
        else:
            with contextlib.suppress(Gone):
                self.send(item)
        self.store.remove_note(SPOOL, self._spool, item)

    def finish(self, wait_s: float | None = None) -> None:
        """Wait a limited time for what is being sent, then let go of the remote."""
        self._ending.set()
        deadline = time.monotonic() + (self.access.wait_s if wait_s is None else wait_s)
        for sender in self._senders:
            sender.join(max(deadline - time.monotonic(), 0.0))
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.remote.close()

    # ------------------------------------------------------------ to the remote

    def send_each(self, keys: Iterable[str]) -> Iterator[tuple[str, int | RemoteProblem]]:
        """Send results, several at a time; of each, how many bytes that took or what went wrong."""

        def attempt(key: str) -> int | RemoteProblem:
            try:
                sent: int | RemoteProblem = self.send(key)
            except OSError as error:
                return Gone(f"it cannot be read: {error.strerror or error}")
            except RemoteProblem as problem:
                if not isinstance(problem, Gone):
                    return problem
                sent = problem
            self.store.remove_note(SPOOL, self._spool, key)
            return sent

        keys = list(keys)
        with ThreadPoolExecutor(_RESULTS_AT_ONCE) as several:
            yield from zip(keys, several.map(attempt, keys), strict=True)

    def send(self, key: str) -> int:
        """Send a result, contents first; how many bytes that took, 0 when the remote has it.

        Raises Gone when it is not in the local store (any more), RemoteProblem.
        """
        record, artifact = self.store.record(key), self.store.find(key)
        if record is None or artifact is None:
            raise Gone("it is no longer in the store")
        action = _action_of(key, record, artifact)
        mend = key in self._to_mend
        if not mend and self._has(action):
            return 0
        own_part = actions.manifest(action, self.access.signer)
        named = Content(hashlib.sha256(own_part).hexdigest(), len(own_part))
        contents = {file.digest: file.size for file in action.files}
        # one after the other: several results are sent at once, by threads that end with the process
        sent = sum(self._send_content(*each, mend=mend) for each in contents.items())
        sent += self._send_text(named, own_part)
        listed = actions.listing(action, named)
        self.put_action(key, listed)
        with self._lock:
            self._to_mend.discard(key)
            self._sent.add(key)
            self._bytes["sent"] += sent
        return sent

    def _has(self, action: Action) -> bool:
        """Whether the remote has such a result already, as good as ours, with all that belongs to it."""
        try:
            found = self._look(action.key, self.writing)
        except Untrusted:
            return self.access.signer is None
        except (Refused, Wrong):
            return False
        if found is None:
            return False
        theirs, _, files = found
        if self.access.signer is not None and not theirs.signatures:
            return False
        return all(self._is_there(each) for each in files.values())

    def _is_there(self, content: Content) -> bool:
        return self.writing.ask(lambda: self.remote.has(*content))

    def _send_content(self, digest: str, size: int, *, mend: bool) -> int:
        """How many bytes were sent. A content that may be damaged there is sent whether it is there or not."""
        if self._stopped.is_set():
            raise Unreachable("the run has ended")
        if not mend and self._is_there(Content(digest, size)):
            return 0
        try:
            path = Path(self.store.checked_blob(digest))
        except Damaged as damage:
            raise Gone(str(damage)) from None
        self.writing.ask(lambda: self.remote.put(digest, path))
        return size

    def _send_text(self, named: Content, text: bytes) -> int:
        path = Path(self.store.temporary())
        try:
            path.write_bytes(text)
            self.writing.ask(lambda: self.remote.put(named.digest, path))
        finally:
            path.unlink(missing_ok=True)
        return named.size

    def put_action(self, key: str, listed: bytes) -> None:
        """Write an action, all of whose contents are there."""
        self.writing.ask(lambda: self.remote.put_action(key, listed))

    def send_file(self, content: Content, path: Path) -> None:
        """Send a content that is not in the store."""
        if not self._is_there(content):
            self.writing.ask(lambda: self.remote.put(content.digest, path))

    # ------------------------------------------------------------ measured trials

    def pull_ledger(self, settings: Mapping[str, Any]) -> None:
        """Before a machine is measured on: take what others have measured on such a one, once in a run."""
        here = ledger.measured_on(settings)
        if here is None or not self.access.reads or self.reading.open:
            return
        name = ledger.index_key(here)
        with self._lock:
            first = name not in self._pulled
            self._pulled.add(name)
        if first:
            with contextlib.suppress(RemoteProblem, StoreError, Interrupted):
                ledger.pull(self, here)

    def offer_ledger(self, settings: Mapping[str, Any]) -> None:
        """After a machine was measured on: send all trials on such machines, while the run goes on."""
        here = ledger.measured_on(settings)
        if here is not None:
            self._enqueue(f"{_LEDGER}{ledger.index_key(here)}", ledger.note_of(here))

    def sent_ledger(self, here: Here) -> None:
        """All trials on such machines are there: none wait to be sent."""
        self.store.remove_note(SPOOL, self._spool, f"{_LEDGER}{ledger.index_key(here)}")


class Incomplete(Wrong):
    """An action is there without all of its contents."""


class Gone(RemoteProblem):
    """What was to be sent is not in the local store, or damaged there."""


_NOT_KEPT: Final = ("key", "signatures")


def _action_of(key: str, record: Mapping[str, Any], artifact: Artifact) -> Action:
    signatures = tuple((record.get("origin") or {}).get("signatures", ()))
    fields = {name: record[name] for name in ("facts", "preimage", "seconds", "made")}
    return Action(key=key, files=artifact.files, signatures=signatures, **fields)
