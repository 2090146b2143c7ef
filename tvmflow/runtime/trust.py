"""Trust: files that are read only if a trusted key signed for them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final, TypeAlias

from tvmflow.core import signing
from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.runtime.bundles import open_file
from tvmflow.runtime.statements import compare_file, find_statements, read_statements

TrustedKeys: TypeAlias = "str | Path | Sequence[str | Path]"
"""Files of public keys, or folders of them."""

_CHUNK: Final = 1 << 20


@contextlib.contextmanager
def open_trusted_file(
    path: str | Path, trusted_keys: TrustedKeys | None, max_bytes: int
) -> Iterator[IO[bytes]]:
    """Open a file that is not larger than a limit, and that a trusted key signed for.

    Args:
        path: The file.
        trusted_keys: The keys; None for any file.
        max_bytes: The limit.

    Raises:
        BundleError: when there is no such file, or none of the keys signed for it.
        EnvironmentProblem: when signatures cannot be checked here.
        UsageError: when a file of keys holds none.
    """
    with open_file(path, max_bytes) as stream:
        if trusted_keys is None:
            yield stream
            return
        trusted = _load_keys(trusted_keys)
        # the file could be edited after it is checked: what is read is a copy that nobody else has
        with tempfile.TemporaryFile() as copy:
            digest = hashlib.sha256()
            while copy.tell() <= max_bytes and (chunk := stream.read(_CHUNK)):
                digest.update(chunk)
                copy.write(chunk)
            _check_signed(Path(path), digest.hexdigest(), trusted)
            copy.seek(0)
            yield copy


def _load_keys(trusted_keys: TrustedKeys) -> list[signing.PublicKey]:
    paths = [trusted_keys] if isinstance(trusted_keys, str | os.PathLike) else trusted_keys
    try:
        return [key for path in paths for key in signing.load_public_keys(Path(path))]
    except ImportError as error:
        raise EnvironmentProblem(
            f"signatures cannot be checked: {error}", fix="pip install cryptography"
        ) from None


def _check_signed(path: Path, digest: str, trusted: Sequence[signing.PublicKey]) -> None:
    if not trusted:
        raise BundleError(
            f"{path} is not loaded: no key is trusted", fix="name the signer's .pub file"
        )
    signed = [entry for file in find_statements(path) for entry in read_statements(file, trusted)]
    finding = compare_file(path, digest, signed)
    if not finding.good:
        raise BundleError(
            f"{path} is not loaded, because no trusted key signed for it: {finding.message}",
            fix="keep the signed statement (.intoto.jsonl) beside it; `tvmflow sign` signs one",
        )
