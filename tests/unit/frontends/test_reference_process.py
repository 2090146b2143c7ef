"""The process of a reference: how it ends."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from tvmflow.frontends import _reference_process

WORKER = """
import atexit, sys
from tvmflow.frontends._reference_process import serve

class Model:
    name, note, can_observe = "a framework", "", False
    def run(self, arrays):
        return list(arrays.values())

def load(message):
    atexit.register(print, "what a framework tidies up", file=sys.stderr)
    print("what a framework prints")
    return Model()

serve(load)
"""


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_reference_ends_at_once(is_cut_off: bool) -> None:
    """It leaves its memory to the system; what it has printed is in its log, and an error is the last line."""
    requests = io.BytesIO()
    _reference_process.send(requests, {})
    if is_cut_off:
        _reference_process.send(requests, {"call": "run"})
        requests.seek(-5, io.SEEK_END)
        requests.write(b"????")
    done = subprocess.run(
        [sys.executable, "-c", WORKER], input=requests.getvalue(), capture_output=True, check=False
    )
    answer = _reference_process.receive(io.BytesIO(done.stdout))
    assert answer == ({"name": "a framework", "note": "", "can_observe": False}, {})
    first, *others = done.stderr.decode().splitlines()
    if is_cut_off:
        assert done.returncode == 1
        assert others[-1].startswith("json.decoder.JSONDecodeError")
    else:
        assert (done.returncode, first, others) == (0, "what a framework prints", [])
