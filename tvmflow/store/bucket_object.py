"""An object in a bucket as a response, so that it is downloaded like a file of a web server.

Credentials are found as for remote caches in buckets (see `store.remote.bucket`).
"""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from types import TracebackType
from typing import Any, Final

from tvmflow.store.remote._base import RemoteCacheError
from tvmflow.store.remote.bucket import NoObject, library_errors, open_bucket

_CHUNK: Final = 1 << 18
# A slower download is continued by a further request.
_TRANSFER_TIMEOUT_S: Final = 3600.0


class ObjectResponse:
    """The bytes of an object from a position on, with the interface of `http.client.HTTPResponse`."""

    def __init__(self, status: int, headers: Message, chunks: Iterator[Any]) -> None:
        self.status = status
        self.headers = headers
        self._chunks = chunks

    def read1(self, size: int) -> bytes:
        """Return the next bytes; none at the end. Their number is the library's choice.

        Raises:
            OSError: when the connection breaks.
        """
        try:
            with library_errors(_TRANSFER_TIMEOUT_S):
                return bytes(next(self._chunks, b""))
        except (RemoteCacheError, NoObject) as error:
            raise OSError(str(error)) from None

    def __enter__(self) -> ObjectResponse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return


def open_object(url: str, offset: int, validator: str, timeout_s: float) -> ObjectResponse:
    """Return an object from a position on; from its beginning when it is another one than before.

    Args:
        url: Its URL.
        offset: How many bytes have arrived.
        validator: The ETag of the object that they are from.
        timeout_s: How long to wait for an answer.

    Raises:
        ImportError: when obstore is not installed.
        ValueError: when the URL or the environment variables of the service are wrong.
        NoObject: when there is no such object.
        RemoteCacheError: when the bucket does not answer, or denies access.
    """
    import obstore

    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    store = open_bucket(f"{scheme}://{bucket}", timeout_s, _TRANSFER_TIMEOUT_S)
    with library_errors(timeout_s):
        meta = obstore.head(store, path)
        size, tag = int(meta["size"]), meta["e_tag"] or ""
        headers = Message()
        if tag:
            headers["ETag"] = tag
        if offset > size or validator != tag:
            offset = 0
        if offset:
            headers["Content-Range"] = f"bytes {offset}-{size - 1}/{size}"
        else:
            headers["Content-Length"] = str(size)
        if offset == size:
            return ObjectResponse(206 if offset else 200, headers, iter(()))
        options: Any = {"range": {"offset": offset}, **({"if_match": tag} if tag else {})}
        answer = obstore.get(store, path, options=options)
        chunks = iter(answer.stream(min_chunk_size=_CHUNK))
    return ObjectResponse(206 if offset else 200, headers, chunks)
