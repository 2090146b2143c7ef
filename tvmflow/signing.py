"""Ed25519 signatures: keys in files, and envelopes that carry a text with those who signed it.

Keys are PEM files, as OpenSSL and others read and write them: PKCS#8 for the private half,
SubjectPublicKeyInfo for the public one. A key is known by the sha256 (hex) of its public half
in DER. Envelopes are those of DSSE 1.0 (Dead Simple Signing Envelope, secure-systems-lab), as
in-toto and Sigstore use them: what is signed is the type with the text, so that a signature
under one kind of text is none under another.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.errors import EnvironmentProblem, UsageError
from tvmflow.values import Json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

KEY_VARIABLE: Final = "TVMFLOW_SIGNING_KEY"
TRUSTED_VARIABLE: Final = "TVMFLOW_TRUSTED_KEYS"

PUBLIC_SUFFIX: Final = ".pub"
_LONGEST_KEY_FILE: Final = 1 << 20
_END: Final = b"-----END PUBLIC KEY-----"


class NotSigned(Exception):
    """An envelope that nobody signed who is trusted, or whose signature is not of this text."""


class PublicKey(NamedTuple):
    """Who can be recognised: `id` is the sha256 (hex) of the key in DER, `name` where it came from."""

    id: str
    name: str
    key: Ed25519PublicKey

    def signed(self, signature: bytes, text: bytes) -> bool:
        """Whether the signature is this key's under this text."""
        from cryptography.exceptions import InvalidSignature

        with contextlib.suppress(InvalidSignature):
            self.key.verify(signature, text)
            return True
        return False


class PrivateKey(NamedTuple):
    """Who can sign."""

    public: PublicKey
    key: Ed25519PrivateKey

    def sign(self, text: bytes) -> bytes:
        return self.key.sign(text)


# ---------------------------------------------------------------- keys


def generate(path: Path) -> PublicKey:
    """Make a key: the private half in `path` (readable by its owner alone), the public one beside it as `.pub`.

    Raises UsageError when one of the files is there.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    beside = path.with_name(path.name + PUBLIC_SUFFIX)
    for each in (path, beside):
        if each.exists():
            raise UsageError(f"{each} is there already", fix="give another name; keys are kept")
    _write_new(beside, public, 0o644)
    _write_new(path, private, 0o600)
    return _known(key.public_key(), str(beside))


def _write_new(path: Path, content: bytes, mode: int) -> None:
    with _readable(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)


def load_private(path: Path) -> PrivateKey:
    """The key in a PEM file. Raises UsageError for what is none, EnvironmentProblem for what cannot be read."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    content = _read(path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{path} holds no private key that can be used ({_short(error)})",
            fix="give one that `tvmflow keygen` made, or an unencrypted Ed25519 key in PKCS#8",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(
            f"{path} holds a key of another kind than Ed25519", fix="make one with `tvmflow keygen`"
        )
    return PrivateKey(_known(key.public_key(), str(path)), key)


def load_public(place: Path) -> tuple[PublicKey, ...]:
    """The keys in a file (one PEM block after another), or in the `.pub` files of a folder.

    Raises UsageError when there is none in it, or one of another kind.
    """
    files = sorted(place.glob(f"*{PUBLIC_SUFFIX}")) if place.is_dir() else [place]
    found = [key for file in files for key in _public_keys(file)]
    if not found:
        raise UsageError(
            f"{place} holds no public key", fix="put the .pub files of those you trust there"
        )
    return tuple({key.id: key for key in found}.values())


def _public_keys(path: Path) -> Iterator[PublicKey]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    for block in _read(path).split(_END)[:-1]:
        try:
            key = serialization.load_pem_public_key(block + _END)
        except ValueError as error:
            raise UsageError(f"{path} is damaged ({_short(error)})") from None
        if not isinstance(key, Ed25519PublicKey):
            raise UsageError(f"{path} holds a key of another kind than Ed25519")
        yield _known(key, str(path))


def _known(key: Ed25519PublicKey, name: str) -> PublicKey:
    from cryptography.hazmat.primitives import serialization

    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return PublicKey(hashlib.sha256(der).hexdigest(), name, key)


def _read(path: Path) -> bytes:
    with _readable(path, "read"), path.open("rb") as stream:
        return stream.read(_LONGEST_KEY_FILE)


@contextlib.contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UsageError(
            f"there is no key {path}", fix="make one with `tvmflow keygen FILE`"
        ) from None
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be {what}: {error.strerror or error}") from error


def _short(error: Exception) -> str:
    return str(error).partition(".")[0] or type(error).__name__


# ---------------------------------------------------------------- envelopes


def signed_text(kind: str, text: bytes) -> bytes:
    """What a signature in an envelope is of: DSSE's pre-authentication encoding."""
    name = kind.encode()
    return b" ".join((b"DSSEv1", str(len(name)).encode(), name, str(len(text)).encode(), text))


def seal(kind: str, text: bytes, signers: Sequence[PrivateKey]) -> Json:
    """A text of a media type with the signatures of all signers, of which there may be none."""
    message = signed_text(kind, text)
    signatures = [{"keyid": each.public.id, "sig": _encode(each.sign(message))} for each in signers]
    return {"payloadType": kind, "payload": _encode(text), "signatures": signatures}


def unseal(envelope: Json, kind: str) -> bytes:
    """The text in an envelope, whoever signed it. Raises NotSigned for what is no envelope of this kind."""
    return _opened(envelope, kind)[0]


def unseal_trusted(
    envelope: Json, kind: str, trusted: Sequence[PublicKey]
) -> tuple[bytes, tuple[PublicKey, ...]]:
    """The text in an envelope and those of the trusted who signed it, at least one. Raises NotSigned."""
    text, signatures = _opened(envelope, kind)
    message = signed_text(kind, text)
    known = {key.id: key for key in trusted}
    wrong = [
        name for name, sig in signatures if name in known and not known[name].signed(sig, message)
    ]
    if wrong:
        raise NotSigned(f"the signature of {known[wrong[0]].name} is not of this text")
    found = tuple(known[name] for name, _ in signatures if name in known)
    if not found:
        others = ", ".join(name[:12] for name, _ in signatures)
        raise NotSigned(
            f"it is signed by {others}, and none of them is trusted"
            if others
            else "it is not signed"
        )
    return text, found


def _opened(envelope: Json, kind: str) -> tuple[bytes, list[tuple[str, bytes]]]:
    try:
        if envelope["payloadType"] != kind:
            raise NotSigned(f"it holds {envelope['payloadType']!r} and not {kind}")
        entries: Sequence[Mapping[str, str]] = envelope["signatures"]
        signatures = [(str(each["keyid"]), _decode(each["sig"])) for each in entries]
        return _decode(envelope["payload"]), signatures
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotSigned(f"it is no envelope ({type(error).__name__}: {error})") from None


def _encode(content: bytes) -> str:
    return base64.standard_b64encode(content).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


# ---------------------------------------------------------------- who signs, and who is trusted


def own_key() -> PrivateKey | None:
    """The key that `$TVMFLOW_SIGNING_KEY` names; None where it names none."""
    named = os.environ.get(KEY_VARIABLE)
    return load_private(Path(named)) if named else None


def trusted_keys() -> tuple[PublicKey, ...]:
    """Those that `$TVMFLOW_TRUSTED_KEYS` names, a file or a folder; none where it names none."""
    named = os.environ.get(TRUSTED_VARIABLE)
    return load_public(Path(named)) if named else ()
