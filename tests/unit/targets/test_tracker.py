"""An RPC tracker that answers whatever it likes: the commands that ask it say so."""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

import pytest

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.targets.tracker import Tracker

_MAGIC = struct.pack("<i", 0x2F271)


def answers() -> list[bytes]:
    values: list[Any] = [
        [0, {}],
        [0, []],
        [0, {"server_info": [{"key": "x"}], "queue_info": {}}],
        [0, {"server_info": 5, "queue_info": {}}],
        [0, {"server_info": [], "queue_info": []}, 3],
        [1, {}],
        7,
    ]
    return [json.dumps(value).encode() for value in values] + [b"[" * 100_000, b"\xff", b"9" * 5000]


@pytest.mark.parametrize("answer", answers())
def test_an_answer_that_is_no_trackers_is_reported(answer: bytes) -> None:
    """Also one that nests too deeply for Python's own reader."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4)
            connection.sendall(_MAGIC)
            connection.recv(1024)
            connection.sendall(struct.pack("<i", len(answer)) + answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, pytest.raises(EnvironmentProblem, match="cannot be used"):
        Tracker(f"127.0.0.1:{listener.getsockname()[1]}").list_devices()
    thread.join()
