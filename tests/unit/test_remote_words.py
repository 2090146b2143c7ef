"""What the command line says about remotes, and what is remembered of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.support.small_runs import Machine, outcomes, plan_of, store_in
from tvmflow import fastpath, plancache
from tvmflow.commands import cache, remote
from tvmflow.errors import UsageError
from tvmflow.stores.local import LocalStore
from tvmflow.stores.remote.tier import Tier

NAMES = ("TVMFLOW_REMOTE", "TVMFLOW_REMOTE_MODE", "TVMFLOW_SIGNING_KEY", "TVMFLOW_TRUSTED_KEYS")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return store_in(tmp_path / "store")


def tier_of(store: LocalStore, *words: str) -> Tier | None:
    parser = argparse.ArgumentParser()
    remote.about_remote_of_run(parser)
    return remote.tier_of_run(parser.parse_args(words), store, lambda text: None, lambda: False)


def test_without_a_remote_and_offline_there_is_none(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word beats the variable; an empty one is none."""
    assert tier_of(store) is None
    monkeypatch.setenv("TVMFLOW_REMOTE", "http://from-environment")
    found = tier_of(store)
    assert found is not None and found.remote.place == "http://from-environment"
    assert (found.access.reads, found.access.writes) == (True, False)
    named = tier_of(store, "--remote", "http://named", "--remote-mode", "both")
    assert named is not None and named.remote.place == "http://named"
    assert (named.access.reads, named.access.writes) == (True, True)
    assert tier_of(store, "--remote", "") is None
    assert tier_of(store, "--remote-mode", "off") is None
    monkeypatch.setenv("TVMFLOW_REMOTE_MODE", "off")
    assert tier_of(store) is None
    assert tier_of(store, "--remote-mode", "write") is not None


def test_a_store_is_not_its_own_remote(store: LocalStore) -> None:
    """Nor a folder in it."""
    for place in (store.root, f"{store.root}/shared"):
        with pytest.raises(UsageError, match="is in this store itself"):
            tier_of(store, "--remote", place)


def test_keys_that_are_not_there_stop_a_run_before_it_begins(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else everything would be believed, or nothing signed."""
    monkeypatch.setenv("TVMFLOW_REMOTE", "http://host")
    with pytest.raises(UsageError, match="there is no key"):
        tier_of(store, "--require-signatures", str(tmp_path / "none.pub"))
    with pytest.raises(UsageError, match="holds no public key"):
        tier_of(store, "--require-signatures", str(tmp_path))
    monkeypatch.setenv("TVMFLOW_SIGNING_KEY", str(tmp_path / "none"))
    assert tier_of(store) is not None
    with pytest.raises(UsageError, match="there is no key"):
        tier_of(store, "--remote-mode", "both")


def test_an_up_to_date_run_that_may_write_is_looked_at_properly_while_results_wait(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what waits would wait for the next change."""
    argv = ["run", "net.yaml", "--remote-mode=both"]
    assert not fastpath.must_send(store, argv)
    store.write_note("", "spool", "place", "a" * 64)
    assert fastpath.must_send(store, argv)
    assert not fastpath.must_send(store, ["run", "net.yaml"])
    monkeypatch.setenv("TVMFLOW_REMOTE_MODE", "write")
    assert fastpath.must_send(store, ["run", "net.yaml"])


def test_a_password_does_not_enter_the_name_of_a_remembered_plan() -> None:
    """Not even as a digest, against which passwords could be tried."""
    names = {
        plancache._name(["run", "--remote", f"http://{who}host/x"])
        for who in ("", "ann:one@", "ann:two@")
    }
    assert len(names) == 1
    assert plancache._name(["run", "--remote", "http://other/x"]) not in names


def test_both_sub_commands_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` of push and pull, and no recipe for pull."""
    parser = argparse.ArgumentParser()
    cache.add_parser(parser.add_subparsers())
    for words in (["cache", "push", "--help"], ["cache", "pull", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args(words)
        assert stopped.value.code == 0
        assert "--remote URL" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["cache", "pull"])
    assert stopped.value.code == 2 and "RECIPE" in capsys.readouterr().err


def cache_command(store: LocalStore, *words: str) -> int:
    parser = argparse.ArgumentParser()
    cache.add_parser(parser.add_subparsers())
    args = parser.parse_args(["cache", *words, "--store", store.root])
    code: int = args.command(args)
    return code


def test_push_sends_everything_what_waits_and_nothing_twice(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a remote that was away when the results were made; the second time there is nothing to send."""
    shared = tmp_path / "shared"
    Machine(tmp_path, str(shared), writes=True).run(plan_of())
    capsys.readouterr()
    assert cache_command(store, "push", "--remote", str(shared)) == 4
    told = capsys.readouterr()
    assert told.err.startswith(f"tvmflow: remote: {shared}: there is no such folder")
    assert "not sent: " in told.out
    shared.mkdir()
    assert cache_command(store, "push", "--remote", str(shared)) == 0
    assert capsys.readouterr().out.startswith(f"4 results sent to {shared} (")
    assert store.notes("spool", *store.notes("spool")) == []
    assert cache_command(store, "push", "--all", "--json", "--remote", str(shared)) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["sent"], sorted(again["known"])) == ({}, sorted(store.keys()))
    other = Machine(tmp_path / "other", str(shared))
    assert set(outcomes(other.run(plan_of())).values()) == {"fetched"}


def test_push_needs_a_remote_and_leave_to_use_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, and offline."""
    with pytest.raises(UsageError, match="no remote is named"):
        cache_command(store, "push")
    monkeypatch.setenv("TVMFLOW_REMOTE_MODE", "off")
    with pytest.raises(UsageError, match="remotes are not to be used"):
        cache_command(store, "push", "--remote", "/srv/cache")
