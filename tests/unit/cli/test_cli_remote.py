"""The remote cache on the command line, and what a cached answer records of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_runs import RunHost, outcomes, plan_of, store_in
from tvmflow.cli import cache, main
from tvmflow.cli.arguments import RunRemoteCacheOptions
from tvmflow.cli.commands import Command
from tvmflow.cli.options import Options
from tvmflow.cli.parser import CommandParser
from tvmflow.core.errors import UsageError
from tvmflow.engine import answers
from tvmflow.engine.remote_access import RemoteSettings, must_upload, open_run_client
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.store.local import LocalStore
from tvmflow.store.remote.client import RemoteCacheClient

NAMES = ("TVMFLOW_REMOTE", "TVMFLOW_REMOTE_MODE", "TVMFLOW_SIGNING_KEY", "TVMFLOW_TRUSTED_KEYS")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return store_in(tmp_path / "store")


class OnlyRemote(Options):
    remote: RunRemoteCacheOptions


def run_nothing(options: OnlyRemote) -> int:
    """Return the exit code of a command that does nothing."""
    return 0


def parse_remote(*arguments: str) -> RemoteSettings:
    parser = CommandParser(Command("run", run_nothing))
    options = parser.read_options(parser.parse(arguments))
    assert isinstance(options, OnlyRemote)
    return options.remote.settings()


def open_client(store: LocalStore, *arguments: str) -> RemoteCacheClient | None:
    return open_run_client(parse_remote(*arguments), store, lambda text: None, lambda: False)


def test_a_run_without_a_remote_cache_or_offline_has_no_client(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option takes precedence over the variable; an empty value means none."""
    assert open_client(store) is None
    monkeypatch.setenv("TVMFLOW_REMOTE", "http://from-environment")
    client = open_client(store)
    assert client is not None and client.connection.address == "http://from-environment"
    assert (client.connection.access.reads, client.connection.access.writes) == (True, False)
    named = open_client(store, "--remote", "http://named", "--remote-mode", "both")
    assert named is not None and named.connection.address == "http://named"
    assert (named.connection.access.reads, named.connection.access.writes) == (True, True)
    assert open_client(store, "--remote", "") is None
    assert open_client(store, "--remote-mode", "off") is None
    monkeypatch.setenv("TVMFLOW_REMOTE_MODE", "off")
    assert open_client(store) is None
    assert open_client(store, "--remote-mode", "write") is not None


def test_a_store_is_not_its_own_remote_cache(store: LocalStore) -> None:
    """Nor is a folder in it."""
    for place in (store.root, f"{store.root}/shared"):
        with pytest.raises(UsageError, match="is inside the store"):
            open_client(store, "--remote", place)


def test_missing_keys_stop_a_run_before_it_begins(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise everything would be trusted, or nothing signed."""
    monkeypatch.setenv("TVMFLOW_REMOTE", "http://host")
    with pytest.raises(UsageError, match="there is no key"):
        open_client(store, "--require-signatures", str(tmp_path / "none.pub"))
    with pytest.raises(UsageError, match="holds no public key"):
        open_client(store, "--require-signatures", str(tmp_path))
    monkeypatch.setenv("TVMFLOW_SIGNING_KEY", str(tmp_path / "none"))
    assert open_client(store) is not None
    with pytest.raises(UsageError, match="there is no key"):
        open_client(store, "--remote-mode", "both")


def test_a_run_with_nothing_to_do_goes_on_while_results_wait_for_their_upload(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would wait for the next change."""
    assert not must_upload(parse_remote("--remote-mode=both"), store)
    store.notes.write("", "spool", "place", "a" * 64)
    assert must_upload(parse_remote("--remote-mode=both"), store)
    assert not must_upload(parse_remote(), store)
    monkeypatch.setenv("TVMFLOW_REMOTE_MODE", "write")
    assert must_upload(parse_remote(), store)


def test_a_password_is_not_part_of_the_name_of_a_cached_answer() -> None:
    """Not even as a digest, against which passwords could be tried."""
    names = {
        answers.answer_path(["run", "--remote", f"http://{who}host/x"])
        for who in ("", "ann:one@", "ann:two@")
    }
    assert len(names) == 1
    assert answers.answer_path(["run", "--remote", "http://other/x"]) not in names


def test_both_sub_commands_have_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`pull` needs a recipe."""
    for words in (["cache", "push", "--help"], ["cache", "pull", "--help"]):
        assert main.main(words) == 0
        assert "--remote URL" in capsys.readouterr().out
    assert main.main(["cache", "pull"]) == 2
    assert "RECIPE" in capsys.readouterr().err


def cache_command(store: LocalStore, *arguments: str) -> int:
    argv = ["cache", *arguments, "--store", store.root]
    return main.parse(argv)()


def test_push_uploads_waiting_results_and_no_result_twice(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a remote cache that was not available when the results were made."""
    shared = tmp_path / "shared"
    RunHost(tmp_path, str(shared), writes=True).run(plan_of())
    capsys.readouterr()
    assert cache_command(store, "push", "--remote", str(shared)) == 4
    captured = capsys.readouterr()
    assert captured.err.startswith(f"tvmflow: remote cache: {shared}: the folder does not exist")
    assert "not uploaded: " in captured.out
    shared.mkdir()
    assert cache_command(store, "push", "--remote", str(shared)) == 0
    assert capsys.readouterr().out.startswith(f"4 results uploaded to {shared} (")
    assert store.notes.list("spool", *store.notes.list("spool")) == []
    assert cache_command(store, "push", "--all", "--json", "--remote", str(shared)) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["uploaded"], sorted(again["known"])) == ({}, sorted(store.keys()))
    other = RunHost(tmp_path / "other", str(shared))
    assert set(outcomes(other.run(plan_of())).values()) == {"fetched"}


def test_pull_shows_problems_with_trials(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code alone does not say what is missing."""
    plan = plan_of()
    problems = ["trials of cpu: damaged"]
    monkeypatch.setattr(cache, "_evaluate", lambda *_: (plan, evaluate_plan(plan, store)))
    monkeypatch.setattr(cache, "_pull_trials", lambda *_: (0, problems))
    command = ("pull", "a.yaml", "--ledger", "--remote", str(tmp_path))
    assert cache_command(store, *command) == 1
    assert capsys.readouterr().out.splitlines()[-1] == problems[0]
    assert cache_command(store, *command, "--json") == 1
    assert json.loads(capsys.readouterr().out)["problems"] == problems


def test_push_needs_a_remote_cache_and_permission_to_use_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, and offline, it is an error."""
    with pytest.raises(UsageError, match="no remote cache is named"):
        cache_command(store, "push")
    monkeypatch.setenv("TVMFLOW_REMOTE_MODE", "off")
    with pytest.raises(UsageError, match="remote caches must not be used"):
        cache_command(store, "push", "--remote", "/srv/cache")


def test_a_push_without_recipes_plans_nothing(store: LocalStore, tmp_path: Path) -> None:
    """It begins at once: what waits is known by its keys."""
    words = ["cache", "push", "--remote", str(tmp_path), "--store", store.root]
    code = f"import sys; from tvmflow.cli import main; main.main({words}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {".".join(name.split(".")[:2]) for name in done.stdout.split()}
    assert not loaded & {"tvmflow.planning", "tvmflow.stages", "pydantic", "yaml"}
