"""The remote behind a store: a second machine repeats nothing, and nothing that a remote does fails a run."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cache_server import Cache, cache_server
from tests.support.small_runs import Hands, Machine, outcomes, plan_of
from tvmflow import signing
from tvmflow.report import summary
from tvmflow.stores import usage
from tvmflow.stores.local import LocalStore
from tvmflow.stores.remote import actions

PLAN = plan_of(width=2)
ALL = {"import": "fetched", **{f"{s}/t{n}": "fetched" for n in (0, 1) for s in ("build", "export", "verify")}}  # fmt: skip
WRITES: dict[str, Any] = {"reads": True, "writes": True}


@pytest.fixture
def cache() -> Iterator[Cache]:
    with cache_server() as made:
        yield made


@pytest.fixture
def filled(cache: Cache, tmp_path: Path) -> Cache:
    """A remote that has all results of `PLAN`."""
    Machine(tmp_path / "one", cache.url, **WRITES).run(PLAN)
    assert len(cache.ac) == len(PLAN.stages)
    cache.requests.clear()
    return cache


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- the second machine


@pytest.mark.parametrize("kind", ["http", "folder"])
def test_a_second_machine_repeats_nothing(kind: str, cache: Cache, tmp_path: Path) -> None:
    """An empty store elsewhere gets every stage, the same bytes are delivered, and no worker starts."""
    shared = tmp_path / "shared"
    shared.mkdir()
    url = cache.url if kind == "http" else shared.as_uri()
    one = Machine(tmp_path / "one", url, **WRITES)
    first = one.run(PLAN)
    assert first.remote is not None and first.remote.sent == 7 and first.remote.waiting == 0
    two = Machine(tmp_path / "two", url)
    second = two.run(PLAN)
    assert outcomes(second) == ALL
    assert (two.hands.calls, two.hands.started, two.said) == ([], 0, [])
    assert everything(two.dist) == everything(one.dist) != {}
    assert second.remote is not None
    assert second.remote.fetched == 7 and second.remote.fetched_bytes > 0
    assert "7 fetched (" in summary(second) and second.exit_code == 0
    assert {stage.reason for stage in second.stages} == {f"from {second.remote.place}, not signed"}
    third = two.run(PLAN)
    assert set(outcomes(third).values()) == {"hit"}


def test_only_what_is_missing_is_downloaded(filled: Cache, tmp_path: Path) -> None:
    """Contents that are here are not asked for, nor are stages that are up to date."""
    two = Machine(tmp_path / "two", filled.url)
    two.run(PLAN)
    contents = len(filled.asked("GET", "cas"))
    filled.requests.clear()
    action = next(Path(two.store.root, "actions").rglob("?" * 64))
    action.unlink()
    report = two.run(PLAN)
    assert sorted(outcomes(report).values()) == ["fetched"] + ["hit"] * 6
    # the one content is our own part of the action
    assert [len(filled.asked("GET", shelf)) for shelf in ("ac", "cas")] == [1, 1]
    assert contents > 7 and report.remote is not None and report.remote.fetched_bytes == 0


def test_what_the_remote_lacks_runs_here_and_the_rest_is_fetched(
    filled: Cache, tmp_path: Path
) -> None:
    """A stage in the middle that is gone is made, and what follows is fetched all the same."""
    one = LocalStore(str(tmp_path / "one/store"))
    key = one.last_key("net", "build/t0")
    assert key is not None
    del filled.ac[key]
    two = Machine(tmp_path / "two", filled.url)
    assert outcomes(two.run(PLAN)) == {**ALL, "build/t0": "ran"}
    assert two.hands.calls == ["build"]
    assert filled.asked("PUT") == []


def test_reading_alone_never_writes_and_writing_alone_never_reads(
    cache: Cache, tmp_path: Path
) -> None:
    """`--remote-mode read` (the default) and `write`."""
    Machine(tmp_path / "one", cache.url).run(PLAN)
    assert cache.asked("PUT") == []
    writer: dict[str, Any] = {"reads": False, "writes": True}
    Machine(tmp_path / "two", cache.url, **writer).run(PLAN)
    assert len(cache.ac) == 7
    third = Machine(tmp_path / "three", cache.url, **writer)
    assert set(outcomes(third.run(PLAN)).values()) == {"ran"}


def test_bytes_of_an_action_may_be_changed_by_the_server_and_its_files_not_twice_sent(
    filled: Cache, tmp_path: Path
) -> None:
    """A second writer finds everything there."""
    other = Machine(tmp_path / "other", filled.url, reads=False, writes=True)
    report = other.run(PLAN)
    assert report.remote is not None
    assert (report.remote.sent, report.remote.waiting) == (0, 0)
    assert filled.asked("PUT") == []


# ---------------------------------------------------------------- dead, slow, and forbidding


def test_a_dead_remote_is_said_once_and_costs_nothing(tmp_path: Path) -> None:
    """Nothing listens: one line, and the run goes on as without it; what was made waits."""
    with cache_server() as gone:
        url = gone.url
    machine = Machine(tmp_path, url, **WRITES)
    started = time.monotonic()
    report = machine.run(plan_of(width=3))
    assert set(outcomes(report).values()) == {"ran"} and report.exit_code == 0
    assert machine.said == [f"{url}: nothing listens there; going on without it"]
    assert report.remote is not None and report.remote.waiting == 10
    assert time.monotonic() - started < 10


def test_a_remote_that_never_answers_costs_its_patience_once(cache: Cache, tmp_path: Path) -> None:
    """Each wait is limited, and so is their sum."""
    cache.slow_s = 20.0
    machine = Machine(tmp_path, cache.url, patience_s=0.3)
    machine.timeout_s = 0.3
    started = time.monotonic()
    report = machine.run(PLAN)
    assert set(outcomes(report).values()) == {"ran"}
    assert machine.said == [f"{cache.url}: no answer within 0.3 s; going on without it"]
    assert time.monotonic() - started < 10


def test_a_server_that_dies_midway_leaves_a_run_that_ends_well(
    filled: Cache, tmp_path: Path
) -> None:
    """What came is kept, the rest is made here."""
    filled.die_after = 6
    two = Machine(tmp_path / "two", filled.url, **WRITES)
    report = two.run(PLAN)
    assert report.exit_code == 0
    ended = list(outcomes(report).values())
    assert set(ended) == {"fetched", "ran"} and "fetched" in ended
    assert len(two.said) == 1
    # it comes back: the next run sends what waited, although there is nothing else to do
    filled.die_after = -1
    waiting = report.remote.waiting if report.remote else 0
    assert waiting == ended.count("ran")
    again = two.run(PLAN)
    assert again.remote is not None and again.remote.waiting == 0


@pytest.mark.parametrize("status", [503, 429])
def test_trouble_that_passes_is_waited_out(status: int, filled: Cache, tmp_path: Path) -> None:
    """Two answers that say so are followed by the right one."""
    filled.statuses = [status, status]
    two = Machine(tmp_path / "two", filled.url)
    assert outcomes(two.run(PLAN)) == ALL
    assert two.said == []


def test_a_remote_that_does_not_know_us_is_said_once(filled: Cache, tmp_path: Path) -> None:
    """401: one line, and no further question."""
    filled.token = "Bearer right"
    two = Machine(tmp_path / "two", filled.url)
    assert set(outcomes(two.run(PLAN)).values()) == {"ran"}
    assert two.said == [f"{filled.url}: it answers 401 Unauthorized; going on without it"]
    assert len(filled.requests) == 1


def test_even_one_question_to_a_dead_remote_is_heard(tmp_path: Path) -> None:
    """A run of one stage says why it was not fetched."""
    with cache_server() as gone:
        url = gone.url
    machine = Machine(tmp_path, url)
    machine.run(plan_of()._replace(stages=plan_of().stages[:1], deliveries=()))
    assert machine.said == [f"{url}: nothing listens there; going on without it"]


def test_one_content_that_is_not_taken_does_not_stop_the_others(
    cache: Cache, tmp_path: Path
) -> None:
    """413: it is named and waits; all else is sent."""
    cache.statuses = [413]
    machine = Machine(tmp_path, cache.url, reads=False, writes=True)
    report = machine.run(PLAN)
    assert report.remote is not None and report.remote.sent == 6 and report.remote.waiting == 1
    assert len(machine.said) == 1 and "is not sent: it answers 413" in machine.said[0]


def test_who_may_only_read_reads_on(filled: Cache, tmp_path: Path) -> None:
    """403 for what is sent stops the sending alone; the result waits, and nothing fails."""
    filled.read_only = True
    key = next(iter(filled.ac))
    del filled.ac[key]
    two = Machine(tmp_path / "two", filled.url, **WRITES)
    report = two.run(PLAN)
    assert sorted(outcomes(report).values()).count("fetched") == 6
    assert two.said == [
        f"{filled.url}: it answers 403 Forbidden; what was made here waits to be sent"
    ]
    assert report.remote is not None and report.remote.waiting == 1


def test_a_run_does_not_wait_longer_than_it_was_told_to(cache: Cache, tmp_path: Path) -> None:
    """What did not get through is in the spool, and the next run sends it."""
    cache.slow_s = 0.3
    slow = Machine(tmp_path, cache.url, **WRITES, wait_s=0.1)
    started = time.monotonic()
    report = slow.run(plan_of())
    assert report.remote is not None and report.remote.waiting > 0
    assert "not yet sent to" in summary(report)
    assert time.monotonic() - started < 10
    cache.slow_s = 0.0
    again = Machine(tmp_path, cache.url, **WRITES).run(plan_of())
    assert again.remote is not None
    assert again.remote.waiting == 0 and len(cache.ac) == 4


def test_sending_does_not_hold_up_the_stages(cache: Cache, tmp_path: Path) -> None:
    """Results are sent while later stages run: the first is there before the last is done."""
    there: list[int] = []

    def during(stage: str) -> None:
        if stage == "verify":
            deadline = time.monotonic() + 5
            while not cache.ac and time.monotonic() < deadline:
                time.sleep(0.01)
            there.append(len(cache.ac))

    Machine(tmp_path, cache.url, hands=Hands(during=during), **WRITES).run(plan_of())
    assert there and there[0] > 0


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_is_named_not_used_and_mended(filled: Cache, tmp_path: Path) -> None:
    """The stage runs here; a machine that may write puts the right content in its place."""
    one = LocalStore(str(tmp_path / "one/store"))
    artifact = one.find(one.last_key("net", "export/t1") or "")
    assert artifact is not None
    digest = artifact.digests(("main.bin",))["main.bin"]
    right = filled.cas[digest]
    filled.flip(digest)
    reader = Machine(tmp_path / "reader", filled.url)
    assert outcomes(reader.run(PLAN)) == {**ALL, "export/t1": "ran"}
    assert len(reader.said) == 1
    assert f"the result {artifact.key[:12]} of export is damaged there" in reader.said[0]
    assert digest[:12] in reader.said[0]
    assert filled.cas[digest] != right
    writer = Machine(tmp_path / "writer", filled.url, **WRITES)
    assert outcomes(writer.run(PLAN)) == {**ALL, "export/t1": "ran"}
    assert filled.cas[digest] == right
    assert outcomes(Machine(tmp_path / "third", filled.url).run(PLAN)) == ALL


def test_a_content_that_expired_is_a_miss(filled: Cache, tmp_path: Path) -> None:
    """A folder or bucket that forgets contents by age: nothing to complain about; a writer completes it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    Machine(tmp_path / "writer", str(shared), **WRITES).run(plan_of())
    store = LocalStore(str(tmp_path / "writer/store"))
    artifact = store.find(store.last_key("net", "build/t0") or "")
    assert artifact is not None
    digest = artifact.digests(("main.bin",))["main.bin"]
    expired = shared / "cas" / digest[:2] / digest
    expired.unlink()
    other = Machine(tmp_path / "other", str(shared), **WRITES)
    assert outcomes(other.run(plan_of()))["build/t0"] == "ran"
    assert other.said == [] and expired.is_file()


def test_a_local_file_that_is_damaged_is_fetched_again(filled: Cache, tmp_path: Path) -> None:
    """The remote mends the local store too."""
    two = Machine(tmp_path / "two", filled.url)
    two.run(PLAN)
    artifact = two.store.find(two.store.last_key("net", "export/t0") or "")
    assert artifact is not None
    blob = Path(two.store.blob(artifact.digests(("main.bin",))["main.bin"]))
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[::-1])
    again = Machine(tmp_path / "two", filled.url)
    again.dist = tmp_path / "elsewhere"
    report = again.run(PLAN)
    assert report.exit_code == 0 and again.hands.calls == []
    assert len(report.damage) == 1 and outcomes(report)["export/t0"] == "fetched"


def test_no_room_for_what_would_be_fetched_is_said(
    filled: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is downloaded."""
    monkeypatch.setattr("tvmflow.stores.remote.tier._SPARE", 1 << 60)
    two = Machine(tmp_path / "two", filled.url)
    assert set(outcomes(two.run(plan_of())).values()) == {"ran"}
    assert all("is not fetched: it takes" in text for text in two.said) and two.said


# ---------------------------------------------------------------- who made it


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """Two signers, `ci` and `eve`."""
    made = {}
    for name in ("ci", "eve"):
        made[name] = tmp_path / "keys" / name
        signing.generate(made[name])
    return made


def trusted(path: Path) -> tuple[signing.PublicKey, ...]:
    return signing.load_public(path.with_name(path.name + signing.PUBLIC_SUFFIX))


def test_signed_results_are_taken_and_their_signer_is_known(
    cache: Cache, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """Who signed is in the reason of each stage, and stays with the result, also when it travels on."""
    signer = signing.load_private(keys["ci"])
    Machine(tmp_path / "one", cache.url, **WRITES, signer=signer).run(PLAN)
    two = Machine(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]))
    report = two.run(PLAN)
    assert outcomes(report) == ALL
    name = f"ci ({signer.public.id[:12]})"
    assert {stage.reason for stage in report.stages} == {f"from {cache.url}, signed by {name}"}
    with cache_server() as second:
        tier = Machine(tmp_path / "two", second.url, writes=True).tier()
        sent = dict(tier.send_each(two.store.keys()))
        tier.finish()
        assert len(sent) == 7 and all(isinstance(each, int) for each in sent.values())
        three = Machine(tmp_path / "three", second.url, trusted=trusted(keys["ci"]))
        assert outcomes(three.run(PLAN)) == ALL


@pytest.mark.parametrize("checks", [True, False])
def test_the_use_of_a_store_tells_whose_signatures_there_are(
    cache: Cache, tmp_path: Path, keys: dict[str, Path], checks: bool
) -> None:
    """How many results each key signed and nobody did, of those from elsewhere; and whether that was checked."""
    signer = signing.load_private(keys["ci"])
    machine = Machine(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]) if checks else ())
    Machine(tmp_path / "one", cache.url, **WRITES, signer=signer).run(PLAN)
    machine.run(PLAN)
    key = signer.public.id[:12] + ("" if checks else " (not checked)")
    expected = [(f"signed by {key}", 7)]
    if not checks:
        Machine(tmp_path / "three", cache.url, **WRITES).run(plan_of(value=9))
        machine.run(plan_of(value=9))
        expected.append(("fetched, not signed", 4))
    # made here
    machine.access = machine.access._replace(reads=False)
    machine.run(plan_of(value=5))
    rows = usage.measure(machine.store).rest
    assert [row[:2] for row in rows if "signed" in row.name] == expected


@pytest.mark.parametrize(
    ("signed_by", "why"),
    [(None, "it is not signed"), ("eve", "and none of them is trusted")],
)
def test_results_that_nobody_trusted_signed_are_refused_and_named(
    signed_by: str | None, why: str, cache: Cache, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """Their stages run here; a machine that signs puts its own in their place."""
    signer = signing.load_private(keys[signed_by]) if signed_by else None
    Machine(tmp_path / "one", cache.url, **WRITES, signer=signer).run(plan_of())
    two = Machine(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]))
    assert set(outcomes(two.run(plan_of())).values()) == {"ran"}
    assert len(two.said) == 4
    assert all("is refused: " in text and why in text for text in two.said)
    ours = signing.load_private(keys["ci"])
    mending = Machine(
        tmp_path / "three", cache.url, **WRITES, signer=ours, trusted=trusted(keys["ci"])
    )
    mending.run(plan_of())
    four = Machine(tmp_path / "four", cache.url, trusted=trusted(keys["ci"]))
    assert set(outcomes(four.run(plan_of())).values()) == {"fetched"}


def test_a_signature_of_other_files_is_refused(
    cache: Cache, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """Files that were exchanged under a signature that is right for others."""
    signer = signing.load_private(keys["ci"])
    Machine(tmp_path / "one", cache.url, **WRITES, signer=signer).run(plan_of())
    evil = b"another library"
    digest = hashlib.sha256(evil).hexdigest()
    cache.cas[digest] = evil
    for key, content in cache.ac.items():
        files = actions.decode(content)
        files["files/main.bin"] = actions.Content(digest, len(evil))
        cache.ac[key] = actions.encode(files)
    two = Machine(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]))
    assert set(outcomes(two.run(plan_of())).values()) == {"ran"}
    assert {text.partition("refused: ")[2] for text in two.said} == {
        "its two lists of files differ"
    }
    assert not Path(two.store.blob(digest)).exists()


# ---------------------------------------------------------------- secrets


def test_credentials_show_nowhere(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password in the address and a token in the environment: used, and in no file, event or line."""
    monkeypatch.delenv("TVMFLOW_REMOTE_TOKEN", raising=False)
    url = cache.url.replace("http://", "http://ann:hunter2%40x@")
    machine = Machine(tmp_path / "one", url, **WRITES)
    report = machine.run(plan_of())
    assert set(cache.authorizations) == {"Basic YW5uOmh1bnRlcjJAeA=="}
    cache.token = "nobody"
    refused = Machine(tmp_path / "two", url, **WRITES)
    told = [*machine.said, *refused.said, report, refused.run(plan_of()), machine.events]
    monkeypatch.setenv("TVMFLOW_REMOTE_TOKEN", "s3cret-token")
    with_token = Machine(tmp_path / "three", cache.url, **WRITES)
    told += [with_token.run(plan_of()), with_token.said]
    assert "Bearer s3cret-token" in cache.authorizations
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    names = "".join(str(path) for path in tmp_path.rglob("*"))
    for secret in ("hunter2", "s3cret", "aHVudGVy", "YW5uOmh1"):
        assert secret not in repr(told) and secret not in names
        assert secret.encode() not in files
        assert all(secret.encode() not in each for each in cache.cas.values())


def test_two_machines_that_write_at_once_disturb_nobody(cache: Cache, tmp_path: Path) -> None:
    """Both end, and a third gets everything."""
    machines = [
        Machine(tmp_path / name, cache.url, hands=Hands(salt=name), **WRITES) for name in "ab"
    ]
    threads = [threading.Thread(target=each.run, args=(PLAN,)) for each in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    third = Machine(tmp_path / "third", cache.url)
    report = third.run(PLAN)
    assert "failed" not in outcomes(report).values() and report.exit_code == 0
    assert outcomes(report)["import"] == "fetched"
    assert list(Path(third.store.root, "tmp").iterdir()) == []
