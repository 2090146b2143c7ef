"""Actions as they travel: the codec agrees with protobuf's own, and nothing strange is believed."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cache_server import ActionResult
from tvmflow import signing
from tvmflow.keys import canonical, digest_of
from tvmflow.stores.remote import actions
from tvmflow.stores.remote.actions import Action, Content, Refused
from tvmflow.values import StoredFile

ONE = "1" * 64
PREIMAGE = {"stage": "import", "settings": {"x": 1}}
KEY = digest_of(PREIMAGE)
ACTION = Action(KEY, (StoredFile("a/b.so", ONE, 7),), {}, PREIMAGE, 1.5, "2024-01-01T00:00:00Z")


def as_sent(action: Action) -> tuple[dict[str, Content], bytes]:
    """Its list of files and its own part, as a remote would give them."""
    own_part = actions.manifest(action, None)
    named = Content(hashlib.sha256(own_part).hexdigest(), len(own_part))
    return actions.decode(actions.listing(action, named)), own_part


def believed(**changes: Any) -> Action:
    files, own_part = as_sent(ACTION._replace(**changes))
    return actions.believe(KEY, files, own_part, ())[0]


digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
paths = st.text("ab/.é漢🙂 \n", min_size=1, max_size=40)


@settings(max_examples=60)
@given(st.dictionaries(paths, st.tuples(digests, st.integers(0, 1 << 35)), max_size=8))
def test_what_is_written_is_what_protobuf_reads_and_the_other_way(
    files: dict[str, tuple[str, int]],
) -> None:
    """Both ways, for any paths and sizes."""
    ours = {path: Content(*each) for path, each in files.items()}
    theirs = ActionResult.FromString(actions.encode(ours))
    found = {each.path: (each.digest.hash, each.digest.size_bytes) for each in theirs.output_files}
    assert found == files
    theirs.execution_metadata.worker = "somebody"
    theirs.stdout_raw = b"said something"
    theirs.exit_code = -1
    assert actions.decode(theirs.SerializeToString()) == ours


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    """No other exception, whatever comes."""
    with contextlib.suppress(Refused):
        actions.decode(content)


@pytest.mark.parametrize("size", [-1, (64 << 30) + 1, 1 << 62])
def test_absurd_sizes_are_refused(size: int) -> None:
    """Before anything is downloaded."""
    absurd = ActionResult()
    file = absurd.output_files.add(path="files/a")
    file.digest.hash, file.digest.size_bytes = ONE, size
    with pytest.raises(Refused, match="claims"):
        actions.decode(absurd.SerializeToString())


def test_two_files_of_one_path_and_too_many_files_are_refused() -> None:
    """In the list that the server gives."""
    twice = actions.encode({"files/a": Content(ONE, 1)}) * 2
    with pytest.raises(Refused, match="two files"):
        actions.decode(twice)
    many = actions.encode({f"files/{number}": Content(ONE, 1) for number in range(10_001)})
    with pytest.raises(Refused, match="more than 10000 files"):
        actions.decode(many)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../b", "/x", "a//b", "./a", "a\\b", "C:x", "a\nb", "a\x1b[2J", "", "a/", "x" * 300],
)
def test_names_that_leave_their_folder_are_refused(name: str) -> None:
    """On any file system, and with signs that a terminal would obey."""
    with pytest.raises(Refused, match="names a file"):
        believed(files=(StoredFile(name, ONE, 1),))


def test_a_file_below_another_file_is_refused() -> None:
    """One name cannot be a file and a folder."""
    with pytest.raises(Refused, match="below another file"):
        believed(files=(StoredFile("a", ONE, 1), StoredFile("a/b", ONE, 1)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"preimage": {**PREIMAGE, "settings": {"x": 2}}}, "not the digest of what it says"),
        ({"key": "2" * 64}, "another key"),
        ({"preimage": {}}, "damaged"),
        ({"facts": []}, "damaged"),
        ({"seconds": "long"}, "damaged"),
        ({"made": "\x1b[2J"}, "damaged"),
        ({"preimage": {"stage": 1}}, "damaged"),
        ({"files": (("a", ONE, 1, 1),)}, "damaged"),
    ],
)
def test_an_own_part_that_does_not_fit_is_refused(changes: dict[str, Any], why: str) -> None:
    """Each for its reason."""
    files, _ = as_sent(ACTION)
    own_part = actions.manifest(ACTION._replace(**changes), None)
    with pytest.raises(Refused, match=why):
        actions.believe(KEY, files, own_part, ())


@pytest.mark.parametrize("facts", [{"roads": 1}, {"kernels": 3}, {"roads": {"tuned": ["\x1b[2J"]}}])
def test_facts_that_no_such_stage_gives_are_refused(facts: dict[str, Any]) -> None:
    """Else the summary of the run would fail on them, or a terminal obey them."""
    preimage = {"stage": "build", "settings": {}}
    made = ACTION._replace(key=digest_of(preimage), preimage=preimage, facts=facts)
    files, own_part = as_sent(made)
    with pytest.raises(Refused, match="its facts"):
        actions.believe(made.key, files, own_part, ())


def test_what_is_believed_is_what_was_sent() -> None:
    """All fields; and signatures only under the text that they are of."""
    assert believed() == ACTION


@pytest.mark.parametrize("own_part", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_an_own_part_that_is_no_envelope_is_refused(own_part: bytes) -> None:
    """Whatever it is."""
    files, _ = as_sent(ACTION)
    with pytest.raises(Refused):
        actions.believe(KEY, files, own_part, ())


def test_numbers_that_json_does_not_know_are_refused() -> None:
    """NaN is read by many, and could not be written again."""
    sealed = json.loads(actions.manifest(ACTION, None))
    text = base64.b64decode(sealed["payload"]).replace(b"1.5", b"NaN")
    own_part = json.dumps({**sealed, "payload": base64.b64encode(text).decode()}).encode()
    with pytest.raises(Refused, match="damaged"):
        actions.believe(KEY, as_sent(ACTION)[0], own_part, ())


def test_a_newer_versions_action_keeps_no_signatures_that_we_could_not_pass_on() -> None:
    """What it says beyond what we know is part of what was signed."""
    text = canonical(
        {**{k: v for k, v in ACTION._asdict().items() if k != "signatures"}, "more": 1}
    )
    sealed = signing.seal(actions.KIND, text, ())
    sealed["signatures"] = [{"keyid": "ab", "sig": "AAAA"}]
    own_part = canonical(sealed)
    named = Content(hashlib.sha256(own_part).hexdigest(), len(own_part))
    files = actions.decode(actions.listing(ACTION, named))
    assert actions.believe(KEY, files, own_part, ())[0].signatures == ()
