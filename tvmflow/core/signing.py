"""Ed25519 signatures: keys in files, and signed envelopes.

Keys are PEM files in OpenSSL's format: PKCS#8 for private keys, SubjectPublicKeyInfo for public keys. A key's id is the
sha256 (hex) of the public key in DER. Envelopes follow DSSE 1.0 (Dead Simple Signing Envelope, secure-systems-lab), as
in in-toto and Sigstore; the signature also covers the type of the text.
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

from tvmflow.core.disk_errors import explain, make_folder
from tvmflow.core.errors import EnvironmentProblem, UsageError
from tvmflow.core.types import Json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

KEY_VARIABLE: Final = "TVMFLOW_SIGNING_KEY"
TRUSTED_VARIABLE: Final = "TVMFLOW_TRUSTED_KEYS"

PUBLIC_SUFFIX: Final = ".pub"
_MAX_KEY_FILE_BYTES: Final = 1 << 20
_PEM_END: Final = b"-----END PUBLIC KEY-----"
SHORT_ID: Final = 12
"""Number of characters of a key's id in messages."""


class InvalidEnvelope(Exception):
    """An envelope that cannot be read, that no trusted key signed, or whose signature is wrong."""


class PublicKey(NamedTuple):
    """A public key; `name` is the file that it was read from."""

    id: str
    name: str
    key: ed25519.Ed25519PublicKey

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return whether this key made the signature of a message."""
        from cryptography.exceptions import InvalidSignature

        with contextlib.suppress(InvalidSignature):
            self.key.verify(signature, message)
            return True
        return False


class PrivateKey(NamedTuple):
    """A private key with its public key."""

    public: PublicKey
    key: ed25519.Ed25519PrivateKey

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        return self.key.sign(message)


def generate_key(path: Path) -> PublicKey:
    """Generate a key pair: the private key in `path`, for its owner only, the public key in `path.pub`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public_pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public_path = path.with_name(path.name + PUBLIC_SUFFIX)
    for file in filter(Path.exists, (path, public_path)):
        fix = "give another name; keys are never overwritten"
        raise UsageError(f"{file} already exists", fix=fix)
    with contextlib.ExitStack() as undo:
        for file, content, mode in ((public_path, public_pem, 0o666), (path, private_pem, 0o600)):
            undo.callback(file.unlink, missing_ok=True)
            _write_new(file, content, mode)
        undo.pop_all()
    return _public_key(key.public_key(), str(public_path))


def _write_new(path: Path, content: bytes, mode: int) -> None:
    make_folder(path.parent)
    with _key_file_errors(path, "write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)


def load_private_key(path: Path) -> PrivateKey:
    """Return the private key in a PEM file; UsageError if it is missing, encrypted or not Ed25519."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    content = _read(path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{path} holds no private key that can be used ({_first_sentence(error)})",
            fix="give one that `tvmflow keygen` made, or an unencrypted Ed25519 key in PKCS#8",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        fix = "make one with `tvmflow keygen`"
        raise UsageError(f"{path} holds a key that is not Ed25519", fix=fix)
    return PrivateKey(_public_key(key.public_key(), str(path)), key)


def load_public_keys(path: Path) -> tuple[PublicKey, ...]:
    """Return the public keys in a file of PEM blocks, or in the `.pub` files of a folder.

    Raises UsageError if there is no key, or a key is damaged or not Ed25519.
    """
    files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
    keys = {key.id: key for file in files for key in _read_public_keys(file)}
    if not keys:
        fix = "put the .pub files of trusted signers there"
        raise UsageError(f"{path} holds no public key", fix=fix)
    return tuple(keys.values())


def _read_public_keys(path: Path) -> Iterator[PublicKey]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    for block in _read(path).split(_PEM_END)[:-1]:
        try:
            key = serialization.load_pem_public_key(block + _PEM_END)
        except ValueError as error:
            raise UsageError(f"{path} is damaged ({_first_sentence(error)})") from None
        if not isinstance(key, Ed25519PublicKey):
            raise UsageError(f"{path} holds a key that is not Ed25519")
        yield _public_key(key, str(path))


def _public_key(key: ed25519.Ed25519PublicKey, name: str) -> PublicKey:
    from cryptography.hazmat.primitives import serialization

    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return PublicKey(hashlib.sha256(der).hexdigest(), name, key)


def _read(path: Path) -> bytes:
    with _key_file_errors(path, "read"), path.open("rb") as stream:
        return stream.read(_MAX_KEY_FILE_BYTES)


@contextlib.contextmanager
def _key_file_errors(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        fix = "make one with `tvmflow keygen FILE`"
        raise UsageError(f"there is no key {path}", fix=fix) from None
    except OSError as error:
        text = f"cannot {action} {path}: {error.strerror or error}"
        if action == "read" and isinstance(error, (PermissionError, IsADirectoryError)):
            fix = "name the file of a key, which this user may read"
            raise EnvironmentProblem(text, fix=fix) from error
        raise explain(error, path) or EnvironmentProblem(text) from error


def _first_sentence(error: Exception) -> str:
    return str(error).partition(".")[0] or type(error).__name__


def load_signing_key() -> PrivateKey | None:
    """Return the key in the file `$TVMFLOW_SIGNING_KEY`, or None if that is not set."""
    path = os.environ.get(KEY_VARIABLE)
    return load_private_key(Path(path)) if path else None


def load_trusted_keys() -> tuple[PublicKey, ...]:
    """Return the keys in the file or folder `$TVMFLOW_TRUSTED_KEYS`; none if that is not set."""
    path = os.environ.get(TRUSTED_VARIABLE)
    return load_public_keys(Path(path)) if path else ()


# ---------------------------------------------------------------- envelopes


def pre_authentication_encoding(payload_type: str, text: bytes) -> bytes:
    """Return the bytes that a signature covers (PAE in DSSE 1.0)."""
    name = payload_type.encode()
    return b" ".join((b"DSSEv1", str(len(name)).encode(), name, str(len(text)).encode(), text))


def sign_envelope(payload_type: str, text: bytes, signers: Sequence[PrivateKey]) -> Json:
    """Return an envelope with a text, its media type, and the signatures of all signers."""
    message = pre_authentication_encoding(payload_type, text)
    signatures = [
        {"keyid": signer.public.id, "sig": _encode(signer.sign(message))} for signer in signers
    ]
    return {"payloadType": payload_type, "payload": _encode(text), "signatures": signatures}


def open_envelope(envelope: Json, payload_type: str) -> bytes:
    """Return the text in an envelope without checking its signatures."""
    return _parse(envelope, payload_type)[0]


def verify_envelope(
    envelope: Json, payload_type: str, trusted: Sequence[PublicKey]
) -> tuple[bytes, tuple[PublicKey, ...]]:
    """Return the text in an envelope and the trusted keys that signed it.

    Raises InvalidEnvelope if the type differs, no trusted key signed it, or a trusted key's signature is wrong.
    """
    text, signatures = _parse(envelope, payload_type)
    message = pre_authentication_encoding(payload_type, text)
    keys = {key.id: key for key in trusted}
    for key_id, signature in signatures:
        if key_id in keys and not keys[key_id].verifies(signature, message):
            raise InvalidEnvelope(f"the signature of {keys[key_id].name} does not match this text")
    signers = tuple(keys[key_id] for key_id, _ in signatures if key_id in keys)
    if not signers:
        if others := ", ".join(key_id[:SHORT_ID] for key_id, _ in signatures):
            raise InvalidEnvelope(f"it is signed by {others}, and none of them is trusted")
        raise InvalidEnvelope("it is not signed")
    return text, signers


def _parse(envelope: Json, payload_type: str) -> tuple[bytes, list[tuple[str, bytes]]]:
    try:
        if envelope["payloadType"] != payload_type:
            raise InvalidEnvelope(f"it holds {envelope['payloadType']!r} and not {payload_type}")
        entries: Sequence[Mapping[str, str]] = envelope["signatures"]
        signatures = [(str(entry["keyid"]), _decode(entry["sig"])) for entry in entries]
        return _decode(envelope["payload"]), signatures
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidEnvelope(f"it is not an envelope ({type(error).__name__}: {error})") from None


def _encode(content: bytes) -> str:
    return base64.standard_b64encode(content).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
