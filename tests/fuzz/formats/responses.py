"""Hostile answers of a server on this machine: every command that talks to one ends with a message, soon."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.formats.cases import Case, Ending
from tests.support.hub import COMMIT, Hub
from tests.support.mutations import mutate_bytes, mutate_tree
from tests.support.project import Project
from tvmflow.cli.main import main

_RECIPE: Final = "tiny.yaml"
_REMOTE: Final = "remote"
_HUB_RECIPE: Final = f"hf://org/net/tiny.onnx@{COMMIT}"
# A run starts a process with TVM.
_SLOWEST: Final = "web run"
_MAX_SENT: Final = 64 << 20
_SHORTEST_PAUSE_S: Final = 0.01

_STATUS_LINES: Final = (
    b"",
    b"\r\n",
    b"\x00\x01\x02",
    b"SSH-2.0-OpenSSH_9.9",
    b"HTTP/9.9 200 OK",
    b"HTTP/1.1",
    b"HTTP/1.1 -1 no",
    b"HTTP/1.1 99999 large",
    b"HTTP/1.1 " + b"2" * 5000,
    b"HTTP/1.1 200 \x1b[2J\x1b]0;title\x07",
    b"HTTP/1.1 404 \xff\xfe",
    b"HTTP/1.1 500 " + b"x" * 70_000,
    b"HTTP/1.0 200",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 300,
)
_STATUSES: Final = (
    *(100, 101, 199, 201, 202, 203, 204, 205, 206, 226, 299, 300, 304, 305, 306),
    *(400, 401, 403, 404, 405, 407, 408, 409, 410, 411, 412, 413, 416, 418, 425, 429, 431, 451),
    *(500, 501, 502, 503, 504, 507, 511, 599, 600, 999),
)
_NUMBERS: Final = (
    "9" * 5000,
    "9" * 19,
    "1" + "0" * 30,
    "-1",
    "0",
    "1",
    "+5",
    "0x10",
    "1e3",
    "NaN",
    "inf",
    " 7",
    "1_0",
    "\xb2",
    "\u0663".encode().decode("latin-1"),
    "",
    "1, 2",
)
_RANGES: Final = (
    *(f"bytes {number}-{number}/{number}" for number in _NUMBERS),
    *(f"bytes 0-0/{number}" for number in _NUMBERS),
    "bytes */*",
    "bytes",
    "/",
    "lines 1-2/3",
)
_TEXTS: Final = (
    *_NUMBERS,
    "\x1b[2J",
    "\xff" * 30,
    "a\x00b",
    '"' * 3,
    'W/"x"',
    "x" * 60_000,
    "gzip, deflate, br",
    "Fri, 31 Dec 9999 23:59:59 GMT",
)
_HEADERS: Final = (
    *("ETag", "Last-Modified", "Retry-After", "Content-Encoding", "Content-Type", "Connection"),
    *("X-Error-Code", "X-Error-Message", "WWW-Authenticate", "Set-Cookie", "X-Repo-Commit", "Link"),
)
_LOCATIONS: Final = (
    "http://[bad/",
    "http://[::1",
    "http://]/",
    "http://[v1.x]/",
    "ftp://127.0.0.1/file",
    "file:///etc/passwd",
    "javascript:alert(1)",
    "data:text/plain,hello",
    "gopher://127.0.0.1/\x01\x02",
    "ftp://127.0.0.1/\x1b[2J\x07",
    "unix:/tmp/x",
    "http://" + "a" * 70 + "/",
    "http://" + "a." * 200 + "/",
    "http://a..b/",
    "http://.a/",
    "http://\xfc" * 3 + "/",
    "http://xn--\xff/",
    "http://127.0.0.1:99999/",
    "http://127.0.0.1:-1/",
    "http://127.0.0.1:" + "9" * 5000 + "/",
    "http://127.0.0.1:port/",
    "http://user:password@127.0.0.1:1/",
    "http://127.0.0.1:1/",
    "http:///path",
    "http://",
    "http:",
    "//",
    "//[",
    "?",
    "#",
    "",
    "/again",
    "../../..",
    "/a b\tc\x01",
    "/\xff\xfe",
    "/%zz%",
    "/" + "x" * 60_000,
    "https://127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/again",
    "HTTP://127.0.0.1:{port}/AGAIN",
    "http://127.0.0.1:{port}\\@127.0.0.1:{port}/",
)
_CHUNK_SIZES: Final = (
    b"",
    b"0",
    b"1",
    b"-1",
    b"-ffff",
    b"f" * 5000,
    b"7fffffffffffffff",
    b"8000000000000000",
    b"zz",
    b"5;" + b"x" * 70_000,
    b"\x00",
    b" 5 ",
    b"0x5",
)
_JSON: Final = (
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 990 + b"]" * 990,
    b'{"siblings":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"sha":' + b"9" * 5000 + b"}",
    b'{"sha": NaN, "siblings": Infinity}',
    b'{"sha": "a", "sha": "b"}',
    b'"\\ud800"',
    b"null",
    b"\xff\xfe[\x00]\x00",
    b"<html><body>502 Bad Gateway</body></html>",
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>",
    b"",
)


class Answer(NamedTuple):
    """What a server says: the first line, the headers, and the body."""

    status: bytes
    headers: list[tuple[str, str]]
    body: bytes


# Gives a right answer to a method, a path, and the headers of a request.
Service = Callable[[str, str, Mapping[str, str]], Answer]


def ok(body: bytes, *headers: tuple[str, str]) -> Answer:
    return Answer(b"HTTP/1.1 200 OK", [("Content-Length", str(len(body))), *headers], body)


def _failed(status: int) -> Answer:
    return Answer(b"HTTP/1.1 %d No" % status, [("Content-Length", "0")], b"")


# ---------------------------------------------------------------- what the server would say


def _file(content: bytes) -> Service:
    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        requested = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        start = int(requested[1]) if requested else 0
        full = ok(content[start:], ("ETag", '"one"'))
        if not requested:
            return full
        part = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return Answer(b"HTTP/1.1 206 Part", [*full.headers, ("Content-Range", part)], full.body)

    return answer


def _hub(content: bytes, *, is_small: bool) -> Service:
    hub = Hub(files={"tiny.onnx": content}, small={"tiny.onnx"} if is_small else set())

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if path.startswith("/api/"):
            return ok(json.dumps(hub.info()).encode())
        return _file(content)(method, path, headers)

    return answer


def _cache(folder: Path) -> Service:
    """A cache, which forgets what is stored."""

    def answer(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if method == "PUT":
            return ok(b"")
        _, kind, name = path.rsplit("/", 2) if path.count("/") > 1 else ("", "", "")
        file = folder / kind / name[:2] / name
        return ok(file.read_bytes(), ("ETag", '"one"')) if file.is_file() else _failed(404)

    return answer


# ---------------------------------------------------------------- what it says instead


def _mutate_status(draw: random.Random, answer: Answer) -> Answer:
    if draw.random() < 0.5:
        return answer._replace(status=draw.choice(_STATUS_LINES))
    return answer._replace(status=b"HTTP/1.1 %d text" % draw.choice(_STATUSES))


def _mutate_header(draw: random.Random, answer: Answer) -> Answer:
    choice = draw.randrange(6)
    headers = list(answer.headers)
    if choice == 0:
        headers = [(n, draw.choice(_NUMBERS) if n == "Content-Length" else v) for n, v in headers]
    elif choice == 1:
        headers.append(("Content-Range", draw.choice(_RANGES)))
        if draw.random() < 0.7:
            return Answer(b"HTTP/1.1 206 Partial Content", headers, answer.body)
    elif choice == 2:
        headers.append((draw.choice(_HEADERS), draw.choice(_TEXTS)))
    elif choice == 3:
        headers += [(f"X-{number}", "x") for number in range(draw.choice((90, 120, 5000)))]
    elif choice == 4:
        headers = [(name, value) for name, value in headers if draw.random() < 0.3]
    else:
        headers.append(("Content-Length", draw.choice(_NUMBERS)))
    return answer._replace(headers=headers)


def _mutate_body(draw: random.Random, answer: Answer) -> Answer:
    choice = draw.randrange(6)
    body = answer.body
    if choice == 0:
        body = draw.choice(_JSON)
    elif choice == 1:
        body = mutate_bytes(draw, body or b"x")
    elif choice == 2:
        # the length that was promised is another one
        return answer._replace(body=body[: len(body) // 2])
    elif choice == 3:
        return answer._replace(body=body + draw.randbytes(100))
    elif choice == 4:
        with contextlib.suppress(ValueError):
            body = json.dumps(mutate_tree(draw, json.loads(body)), allow_nan=True).encode()
    else:
        # without an end: it is cut off after `_MAX_SENT`
        return answer._replace(headers=[], body=b" " * _MAX_SENT)
    headers = [(n, str(len(body)) if n == "Content-Length" else v) for n, v in answer.headers]
    return answer._replace(headers=headers, body=body)


def _mutate_location(draw: random.Random, answer: Answer) -> Answer:
    status = draw.choice((301, 302, 303, 307, 308, 300, 304))
    location = ("Location", draw.choice(_LOCATIONS))
    headers = [location] * draw.choice((1, 1, 1, 2))
    body = draw.choice((b"", b"", b"moved", b" " * _MAX_SENT))
    if draw.random() < 0.7:
        headers.append(("Content-Length", str(len(body))))
    return Answer(b"HTTP/1.1 %d Moved" % status, headers, body)


def _mutate_chunks(draw: random.Random, answer: Answer) -> Answer:
    sizes = [draw.choice((b"%x" % len(answer.body), *_CHUNK_SIZES)) for _ in range(3)]
    body = b"".join(size + b"\r\n" + answer.body + b"\r\n" for size in sizes)
    headers = [(n, v) for n, v in answer.headers if n != "Content-Length" or draw.random() < 0.2]
    return answer._replace(headers=[*headers, ("Transfer-Encoding", "chunked")], body=body)


def _mutate_head_bytes(draw: random.Random, answer: Answer) -> Answer:
    """Change bytes anywhere in the head, ends of lines included."""
    return Answer(mutate_bytes(draw, _head(answer)), [], answer.body)


_MUTATIONS: Final = (
    _mutate_status,
    _mutate_header,
    _mutate_header,
    _mutate_body,
    _mutate_body,
    _mutate_location,
    _mutate_location,
    _mutate_chunks,
    _mutate_head_bytes,
)


def _head(answer: Answer) -> bytes:
    lines = [f"{name}: {value}".encode("latin-1", "replace") for name, value in answer.headers]
    return b"\r\n".join([answer.status, *lines, b"", b""])


# ---------------------------------------------------------------- the server


@contextlib.contextmanager
def serve(service: Service, draw: random.Random, sent: list[int]) -> Iterator[int]:
    """Give the port of a server whose answers are hostile, one request for each connection.

    Args:
        service: What it would say.
        draw: Chooses which answers are changed, and how.
        sent: Gets one number for each hostile answer.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    # some servers lie at once, others after right answers
    patience = draw.choice((0, 0, 0, 1, 2, 4))
    share = draw.choice((1.0, 1.0, 0.5, 0.2))

    def handle(connection: socket.socket) -> None:
        nonlocal patience
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            request = _read_request(connection)
            if request is None:
                return
            answer = service(*request)
            if patience > 0:
                patience -= 1
            elif draw.random() < share:
                for _ in range(draw.choice((1, 1, 2))):
                    answer = draw.choice(_MUTATIONS)(draw, answer)
                sent.append(1)
            head = _head(answer).replace(b"{port}", str(port).encode())
            connection.sendall(head + (b"" if request[0] == "HEAD" else answer.body))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield port
    finally:
        listener.close()


def _read_request(connection: socket.socket) -> tuple[str, str, dict[str, str]] | None:
    with connection.makefile("rb") as stream:
        words = stream.readline(70_000).decode("latin-1").split()
        headers = {}
        while line := stream.readline(70_000).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        rest = int(headers.get("content-length", "0"))
        while rest and (piece := stream.read(min(rest, 1 << 20))):
            rest -= len(piece)
        return (words[0], urllib.parse.unquote(words[1]), headers) if len(words) == 3 else None


# ---------------------------------------------------------------- cases


def prepare(folder: Path) -> None:
    """Make a store, a remote cache with the same results, and the recipes of all cases."""
    project = Project(folder)
    project.write_recipe(trials=2)
    (folder / _REMOTE).mkdir()
    for words in (
        ("run", _RECIPE, "--until", "tune"),
        ("cache", "push", _RECIPE, "--ledger", "--remote", _REMOTE),
    ):
        done = project.tvmflow(*words)
        assert done.code == 0, done.out + done.err
    for name in ("plan", "cache", "run"):
        importlib.import_module(f"tvmflow.cli.{name}")
    os.environ.update(
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="any",
        AWS_ALLOW_HTTP="true",
        HF_HOME=str(folder / "hf"),
        NO_PROXY="*",
    )


def make_case(draw: random.Random, folder: Path) -> Case:
    kind = draw.choice([kind for kind in _KINDS if kind != _SLOWEST or draw.random() < 0.2])
    sent: list[int] = []
    store = folder / "store"
    # what is known of this machine need not be found out again
    unused = () if kind.startswith("push") else ("actions", "cas", "ledger", "last", "downloads")
    shutil.copytree(
        folder.parent / "cache", store, symlinks=True, ignore=shutil.ignore_patterns(*unused)
    )
    count = folder / "sent.txt"

    def action() -> int:
        real_sleep: Callable[[float], None] = time.sleep
        # pauses before further attempts, which a user would wait for
        time.sleep = lambda seconds: real_sleep(min(float(seconds), _SHORTEST_PAUSE_S))
        with serve(_KINDS[kind](folder), draw, sent) as port:
            code = main([*_command(kind, port, folder), "--store", str(store)])
        count.write_text(str(len(sent)))
        return code

    def check(ending: Ending) -> str:
        return _find_wrong_content(store)

    def counts() -> Mapping[str, int]:
        return {"hostile answers": int(count.read_text()) if count.exists() else 0}

    return Case(action, check, counts)


def _find_wrong_content(store: Path) -> str:
    """Return what is in a store under a digest that it does not have."""
    for place in ("cas", "downloads"):
        for path in sorted((store / place).rglob("*")):
            if path.is_file() and re.fullmatch("[0-9a-f]{64}", path.name):
                actual = hashlib.sha256(path.read_bytes()).hexdigest()
                if actual != path.name:
                    return f"the store has {path}, whose digest is {actual}"
    return ""


def _model(folder: Path) -> bytes:
    return (folder.parent / "tiny.onnx").read_bytes()


_KINDS: Final[dict[str, Callable[[Path], Service]]] = {
    "web": lambda folder: _file(_model(folder)),
    "web run": lambda folder: _file(b"another model"),
    "hub": lambda folder: _hub(_model(folder), is_small=False),
    "hub small": lambda folder: _hub(_model(folder), is_small=True),
    "hub branch": lambda folder: _hub(_model(folder), is_small=False),
    "pull": lambda folder: _cache(folder.parent / _REMOTE),
    "pull bucket": lambda folder: _cache(folder.parent / _REMOTE),
    "push": lambda folder: _cache(folder.parent / _REMOTE),
    "push bucket": lambda folder: _cache(folder.parent / _REMOTE),
    "bucket": lambda folder: _file(_model(folder)),
}


def _command(kind: str, port: int, folder: Path) -> list[str]:
    """Return the words of a command that talks to the server."""
    name = kind.partition(" ")[0]
    os.environ["AWS_ENDPOINT_URL"] = os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{port}"
    if name in ("pull", "push"):
        url = "s3://any" if "bucket" in kind else f"http://127.0.0.1:{port}"
        recipe = str(folder.parent / _RECIPE)
        return ["cache", name, recipe, "--ledger", "--remote", url, "--remote-timeout", "2"]
    address = {
        "web": f"http://127.0.0.1:{port}/tiny.onnx",
        "bucket": "s3://any/tiny.onnx",
        "hub": _HUB_RECIPE.replace(COMMIT, "main") if kind == "hub branch" else _HUB_RECIPE,
    }[name]
    pin = f"\n  sha256: {hashlib.sha256(_model(folder)).hexdigest()}" if kind == "web run" else ""
    path = folder / _RECIPE
    text = (folder.parent / _RECIPE).read_text()
    path.write_text(text.replace("onnx: tiny.onnx", f"onnx: {address}{pin}"))
    return ["run", str(path), "--until", "import"] if pin else ["plan", str(path)]
