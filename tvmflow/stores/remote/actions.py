"""Finished stages as they travel, and what is asked of them before one is believed.

A remote keeps an action as an `ActionResult` of Bazel's Remote Execution API (protobuf), since
bazel-remote takes nothing else, and gives it out only while every content that it names is
there. Our own part (facts, pre-image, signatures) is one of those contents, in the file
`tvmflow/action.json`: so it is covered by that promise and by a digest, and an action stays
a few hundred bytes, however long its facts are. It is a DSSE envelope, with no signature
in it where nobody signed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvmflow import signing
from tvmflow.keys import canonical, digest_of
from tvmflow.report import can_be_shown
from tvmflow.stores.remote._base import RemoteProblem
from tvmflow.values import Json, StoredFile

KIND: Final = "application/vnd.tvmflow.action+json"
MANIFEST: Final = "tvmflow/action.json"
_FILES: Final = "files/"

LONGEST_MANIFEST: Final = 16 << 20
LARGEST_FILE: Final = 64 << 30
_MOST_FILES: Final = 10_000
_LONGEST_NAME: Final = 1024
_LONGEST_PART: Final = 255

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
# Letters of every alphabet, and no sign that a file system or a terminal takes for more than a letter.
_STRANGE: Final = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')


class Refused(RemoteProblem):
    """An action that is not believed; its text says why."""


class Untrusted(Refused):
    """An action that may be right, and that nobody signed who is trusted."""


class Content(NamedTuple):
    """What an action says of a file: digest (sha256, hex) and size in bytes."""

    digest: str
    size: int


class Action(NamedTuple):
    """A finished stage, as one store tells it to another. `signatures` are as in an envelope."""

    key: str
    files: tuple[StoredFile, ...]
    facts: dict[str, Json]
    preimage: dict[str, Json]
    seconds: float
    made: str
    signatures: tuple[Json, ...] = ()

    @property
    def stage(self) -> str:
        return str(self.preimage["stage"])


# ---------------------------------------------------------------- to the remote


def manifest(action: Action, signer: signing.PrivateKey | None) -> bytes:
    """Our part of an action, with the signatures that it has and, where it has none, that of `signer`."""
    own = signer is not None and not action.signatures
    sealed = signing.seal(KIND, _text_of(action), [signer] if signer and own else [])
    if action.signatures:
        sealed["signatures"] = list(action.signatures)
    return canonical(sealed)


def _text_of(action: Action) -> bytes:
    """What is signed: all of an action but its signatures."""
    told = action._asdict()
    del told["signatures"]
    return canonical(told)


def encode(files: Mapping[str, Content]) -> bytes:
    """The `ActionResult` that has these output files."""
    return b"".join(
        _message(2, _word(1, path) + _message(2, _word(1, digest) + _number(2, size)))
        for path, (digest, size) in sorted(files.items())
    )


def listing(action: Action, of_manifest: Content) -> bytes:
    """The `ActionResult` of an action whose own part is this content."""
    files = {_FILES + file.name: Content(file.digest, file.size) for file in action.files}
    return encode({**files, MANIFEST: of_manifest})


# ---------------------------------------------------------------- from the remote


def decode(content: bytes) -> dict[str, Content]:
    """The output files of an `ActionResult`. Raises Refused for what is none, or names files as none of ours does.

    What others may have added to it, as bazel-remote adds the worker, is passed over.
    """
    files: dict[str, Content] = {}
    try:
        for number, value in _fields(content):
            if number != 2:
                continue
            entry = dict(_fields(_bytes(value)))
            digest = dict(_fields(_bytes(entry[2])))
            path = _bytes(entry[1]).decode()
            if path in files:
                raise Refused(f"it has two files {path[:_LONGEST_PART]!r}")
            size = digest.get(2, 0)
            if not isinstance(size, int):
                raise ValueError("a size is no number")
            files[path] = Content(_bytes(digest[1]).decode(), size)
            if len(files) > _MOST_FILES:
                raise Refused(f"it has more than {_MOST_FILES} files")
    except (ValueError, KeyError, IndexError, TypeError) as damage:
        raise Refused(f"it is damaged ({type(damage).__name__})") from None
    for path, each in files.items():
        _check_content(path, each)
    return files


def manifest_of(files: Mapping[str, Content]) -> Content:
    """Where our own part of an action is. Raises Refused where there is none, or one too large to be ours."""
    found = files.get(MANIFEST)
    if found is None:
        raise Refused(f"it has no {MANIFEST}: another tool wrote it")
    if found.size > LONGEST_MANIFEST:
        raise Refused(f"its {MANIFEST} claims {found.size} bytes")
    return found


def believe(
    key: str,
    files: Mapping[str, Content],
    own_part: bytes,
    trusted: Sequence[signing.PublicKey],
) -> tuple[Action, tuple[signing.PublicKey, ...]]:
    """An action that is found to be this key's, and who of the trusted signed it; anybody's where none are named.

    Raises Refused, saying why; Untrusted where all that is missing is a signature.
    """
    envelope = _json(own_part)
    signers: tuple[signing.PublicKey, ...] = ()
    try:
        if trusted:
            text, signers = signing.unseal_trusted(envelope, KIND, trusted)
        else:
            text = signing.unseal(envelope, KIND)
    except signing.NotSigned as why:
        raise Untrusted(str(why)) from None
    action = _action(_json(text))
    if action.key != key:
        raise Refused(f"it is the action of another key, {action.key[:12]!r}")
    if digest_of(action.preimage) != key:
        raise Refused("its key is not the digest of what it says it was made from")
    names = {file.name: Content(file.digest, file.size) for file in action.files}
    if len(names) != len(action.files):
        raise Refused("it has two files of one name")
    if {_FILES + name: each for name, each in names.items()} | {MANIFEST: files[MANIFEST]} != files:
        raise Refused("its two lists of files differ")
    _check_names(names)
    if not can_be_shown(action.stage, action.facts):
        raise Refused("its facts are not those of such a stage")
    if _text_of(action) == text:
        # else a newer version wrote it, and what we would pass on is not what they signed
        action = action._replace(signatures=tuple(envelope["signatures"]))
    return action, signers


def _json(text: bytes) -> Any:
    try:
        found = json.loads(text)
        # NaN is read, and cannot be written; so may be what is nested too deep
        canonical(found)
    except (ValueError, RecursionError):
        raise Refused(f"its {MANIFEST} is damaged") from None
    return found


def _action(told: Any) -> Action:
    try:
        files = tuple(StoredFile(*entry) for entry in told["files"])
        if not all(
            isinstance(file.name, str) and isinstance(file.digest, str) and type(file.size) is int
            for file in files
        ):
            raise ValueError("a file is told otherwise")
        fields = {name: told[name] for name in ("key", "facts", "preimage", "seconds", "made")}
        for name, kind in _FIELDS.items():
            if not isinstance(fields[name], kind):
                raise ValueError(f"{name} is of another kind")
        found = Action(files=files, **fields)
        if not isinstance(found.preimage["stage"], str) or not _TIME.fullmatch(found.made):
            raise ValueError("no stage, or no time")
    except (KeyError, TypeError, ValueError) as shape:
        raise Refused(f"its {MANIFEST} is damaged ({shape})") from None
    return found


_FIELDS: Final[dict[str, Any]] = {
    "key": str,
    "facts": dict,
    "preimage": dict,
    "seconds": int | float,
    "made": str,
}


def _check_content(path: str, content: Content) -> None:
    if not _DIGEST.fullmatch(content.digest):
        raise Refused(f"{path[:_LONGEST_PART]!r} has no digest")
    if not 0 <= content.size <= LARGEST_FILE:
        raise Refused(f"{path[:_LONGEST_PART]!r} claims {content.size} bytes")


def _check_names(names: Mapping[str, object]) -> None:
    """Only names of files that stay in the folder that they are unpacked in, on any file system."""
    for name in names:
        parts = name.split("/")
        if (
            len(name) > _LONGEST_NAME
            or _STRANGE.search(name)
            or any(part in ("", ".", "..") or len(part) > _LONGEST_PART for part in parts)
        ):
            raise Refused(f"it names a file {name[:_LONGEST_PART]!r}")
        parents = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if parents & names.keys():
            raise Refused(f"{name[:_LONGEST_PART]!r} is below another file")


# ---------------------------------------------------------------- protobuf, as far as it is needed


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message. Raises ValueError or IndexError for what is none."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, form = tag >> 3, tag & 7
        if form == 0:
            value, at = _varint(message, at)
            # a size is signed: below zero it has all 64 bits
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if form == 2:
            length, at = _varint(message, at)
        elif form in _FIXED:
            length = _FIXED[form]
        else:
            raise ValueError(f"a field of form {form}")
        if length > len(message) - at:
            raise ValueError("a field is longer than its message")
        yield number, message[at : at + length]
        at += length


_FIXED: Final = {1: 8, 5: 4}


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise ValueError("a number without end")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a text should be")
    return value


def _message(number: int, content: bytes) -> bytes:
    return _spelled(number << 3 | 2) + _spelled(len(content)) + content


def _word(number: int, text: str) -> bytes:
    return _message(number, text.encode())


def _number(number: int, value: int) -> bytes:
    # what is zero is left out, as every encoder does
    return _spelled(number << 3) + _spelled(value) if value else b""


def _spelled(value: int) -> bytes:
    spelled = bytearray()
    while value > 0x7F:
        spelled.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*spelled, value))
