"""The note of a stage's last failure: kept until it succeeds, with a log only where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.store.local import Failure, LocalStore, find_failure, forget_failure, remember_failure

FAILURE = Failure("rejected", "a" * 64, 1.5e9, 2.5, "3 elements differ", "lower rtol")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def test_a_failure_is_remembered_until_it_is_forgotten(store: LocalStore) -> None:
    assert find_failure(store, "net:verify/host") is None
    remember_failure(store, "net:verify/host", FAILURE)
    assert find_failure(store, "net:verify/host") == FAILURE
    assert find_failure(store, "net:verify/edge") is None
    forget_failure(store, "net:verify/host")
    forget_failure(store, "net:verify/host")
    assert find_failure(store, "net:verify/host") is None


def test_a_log_that_is_empty_or_gone_is_not_named(store: LocalStore, tmp_path: Path) -> None:
    log = tmp_path / "verify.log"
    remember_failure(store, "net:verify", FAILURE._replace(log=str(log)))
    for content, named in ((None, ""), ("", ""), ("text", str(log))):
        if content is not None:
            log.write_text(content)
        failure = find_failure(store, "net:verify")
        assert failure is not None and failure.log == named


def test_the_note_of_another_version_is_none(store: LocalStore) -> None:
    store.notes.write('{"reason": "x"}', "failures", "net", "verify")
    assert find_failure(store, "net:verify") is None


def test_the_outcome_is_a_part_of_a_sentence() -> None:
    texts = [FAILURE._replace(outcome=outcome).text for outcome in ("rejected", "crashed", "new")]
    assert texts == [
        *("its last attempt was rejected", "its last attempt crashed", "its last attempt new"),
    ]
