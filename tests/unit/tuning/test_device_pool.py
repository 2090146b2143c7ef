"""Tuning on remote devices: every trial is measured once, whatever happens to the devices."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.support import rpc
from tests.support.rpc import KEY, running_pool
from tests.support.trials import TARGET
from tests.support.tuning import dense, model, recipe, relu, resolved_target
from tvmflow.cli import main
from tvmflow.core import packages
from tvmflow.core.errors import EXIT_ENVIRONMENT, EnvironmentProblem, StageError
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.stages import extract_tasks, lower, pick_best, tune
from tvmflow.targets.tracker import TRACKER_VARIABLE, Tracker, split_address
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.rpc_device import DevicePool, RpcEndpoint, run_trial
from tvmflow.tuning.trials import Trial

STAGES: dict[str, Any] = {
    "lower": lower,
    "extract_tasks": extract_tasks,
    "tune": tune,
    "pick_best": pick_best,
}
DEVICE = {"kind": "rpc", "class": KEY}
NOWHERE = f"{rpc.HOST}:1"
# the kernel without a schedule is measured once, before the trials
UNTUNED = 1
# a session takes long enough for a signal in its middle, on a busy machine too
LONG_MS = 50


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.DevicePool]:
    """Two devices that stay alive in all tests."""
    with running_pool(tmp_path_factory.mktemp("pool"), servers=2) as started:
        yield started


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[rpc.DevicePool]:
    """Two devices for one test."""
    with running_pool(tmp_path, servers=2) as started:
        yield started


class Tuning:
    """The stages of a small model, for a target that is tuned on the devices of a tracker."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self._fork_server = fork_server
        self._folder = folder
        ir = folder / "model.json"
        ir.write_text(tvm.ir.save_json(model(dense(32), relu, shape=(32, 32))))
        self.files = {"import/model.json": str(ir)}
        self.runs = 0

    def __call__(
        self,
        name: str,
        trials: int = 6,
        min_repeat_ms: int = 1,
        on_event: Callable[[dict[str, Any]], None] = lambda _: None,
        **remote: Any,
    ) -> Outcome:
        device_pool = {"key": KEY, "priority": 1, "timeout_s": 20.0, **remote}
        target = resolved_target()._replace(device=DEVICE, remote=device_pool)
        chosen = recipe(trials=trials, min_repeat_ms=min_repeat_ms)
        self.runs += 1
        folder = self._folder / f"{self.runs}-{name}"
        outcome = self._fork_server.call(
            "tests.support.tuning:run_stage",
            {
                "name": name,
                "settings": STAGES[name].settings(chosen, target).to_json(),
                "inputs": self.files,
                "folder": str(folder),
                "ledger": str(self._folder / "ledger"),
            },
            timeout_s=120,
            log=self._folder / "log",
            emit=on_event,
        )
        self.files |= {f"{name}/{file.name}": str(file) for file in (folder / "out").iterdir()}
        return outcome

    def trials(self) -> list[Trial]:
        """Those of the model's only workload; the ledger's file has a line for each."""
        build = packages.identity("apache-tvm")
        ledger = Ledger.open(self._folder / "ledger", TARGET, build, DEVICE)
        (task,) = json.loads(Path(self.files["extract_tasks/tasks.json"]).read_text())
        records = ledger.workload(task["key"])
        lines = records.path.read_text().splitlines()
        assert sum("run_secs" in line for line in lines) == len(records)
        return list(records.trials.values())


@pytest.fixture
def tuning(fork_server: ForkServer, tmp_path: Path) -> Tuning:
    folder = tmp_path / "stages"
    folder.mkdir()
    tuning_stages = Tuning(fork_server, folder)
    for name in ("lower", "extract_tasks"):
        outcome = tuning_stages(name)
        assert outcome.kind == "ok", outcome.message
    return tuning_stages


def count_sessions(pool: rpc.DevicePool) -> int:
    return sum(server.sessions for server in pool.servers)


def at_first(event: dict[str, Any], do: Callable[[], object]) -> None:
    """Do something when the first trial has been measured."""
    if event["done"] == 1:
        do()


@pytest.mark.slow
def test_trials_are_distributed_over_the_devices(pool: rpc.DevicePool, tuning: Tuning) -> None:
    """Each device measures some, records name it, and the finalists are timed on one of them."""
    outcome = tuning("tune", tracker=pool.address)
    assert outcome.kind == "ok", outcome.message
    assert (outcome.value["measured"], outcome.value["failed"]) == (6, 0)
    hosts = [trial.host for trial in tuning.trials()]
    assert {host["server"] for host in hosts} == {server.address for server in pool.servers}
    assert all((host["model"], host["threads"]) == (KEY, 2) for host in hosts)
    before = count_sessions(pool)
    outcome = tuning("pick_best", tracker=pool.address)
    assert outcome.kind == "ok", outcome.message
    assert count_sessions(pool) == before + 1
    report = json.loads(Path(tuning.files["pick_best/finalists.json"]).read_text())
    ((_, kernel),) = report.items()
    assert kernel["error"] == "" and kernel["untuned_us"] > 0
    assert all(9 <= len(finalist["samples_us"]) <= 36 for finalist in kernel["finalists"])


def test_trials_in_the_ledger_need_no_tracker(pool: rpc.DevicePool, tuning: Tuning) -> None:
    """A second run measures nothing, so it works without reaching the devices."""
    assert tuning("tune", 2, tracker=pool.address).kind == "ok"
    again = tuning("tune", 2, tracker=NOWHERE)
    assert again.kind == "ok", again.message
    assert (again.value["measured"], again.value["reused"]) == (0, 2)


@pytest.mark.slow
def test_a_device_that_dies_costs_no_trial(own_pool: rpc.DevicePool, tuning: Tuning) -> None:
    """Its trial is measured on the other device; none is lost or repeated."""
    dies, lives = own_pool.servers

    def kill(event: dict[str, Any]) -> None:
        at_first(event, lambda: dies.at_next_session(signal.SIGKILL))

    outcome = tuning("tune", 10, LONG_MS, on_event=kill, tracker=own_pool.address)
    assert outcome.kind == "ok", outcome.message
    assert (outcome.value["measured"], outcome.value["failed"]) == (10, 0)
    served = [trial.host["server"] for trial in tuning.trials()]
    assert len(served) == 10 and set(served[-3:]) == {lives.address}
    assert count_sessions(own_pool) == 10 + UNTUNED + 1


@pytest.mark.slow
def test_a_device_that_hangs_costs_time_but_no_trial(
    own_pool: rpc.DevicePool, tuning: Tuning
) -> None:
    """After `timeout_s` the trial goes to the other device."""
    hangs = own_pool.servers[0]

    def stop(event: dict[str, Any]) -> None:
        at_first(event, lambda: hangs.at_next_session(signal.SIGSTOP))

    outcome = tuning("tune", 10, LONG_MS, on_event=stop, tracker=own_pool.address, timeout_s=4.0)
    assert outcome.kind == "ok", outcome.message
    assert (outcome.value["measured"], outcome.value["failed"]) == (10, 0)
    served = [trial.host["server"] for trial in tuning.trials()]
    assert len(served) == 10
    assert count_sessions(own_pool) == 10 + UNTUNED + 1


@pytest.mark.slow
def test_a_kernel_that_takes_too_long_fails_and_frees_its_device(
    pool: rpc.DevicePool, tuning: Tuning
) -> None:
    """Its server ends the session after `timeout_s`; after the second session the trial has failed."""
    outcome = tuning("tune", 1, 60_000, tracker=pool.address, timeout_s=1.0)
    assert outcome.kind == "error" and "1 trial failed" in outcome.message
    (trial,) = tuning.trials()
    assert trial.failure is not None
    assert (trial.failure.phase, trial.failure.kind) == ("run", "timeout")
    pool.wait_for(2)


def test_a_candidate_that_fails_twice_is_to_blame(
    pool: rpc.DevicePool, fork_server: ForkServer
) -> None:
    """It gets a second session, and no third."""
    device_pool = DevicePool(RpcEndpoint(pool.address, KEY, 1, 20.0), fork_server, None)
    before = count_sessions(pool)
    session = device_pool.call("tests.support.rpc:fail", {"phase": "run"})
    assert session is not None and session.failure is not None
    assert session.failure.message == "as it was told"
    assert count_sessions(pool) == before + 2


def test_devices_that_refuse_end_the_tuning(pool: rpc.DevicePool, fork_server: ForkServer) -> None:
    """After three failures to send a kernel, the last one's reason is reported."""
    device_pool = DevicePool(RpcEndpoint(pool.address, KEY, 1, 20.0), fork_server, None)
    with pytest.raises(StageError, match=r"'board' cannot be used; the last, 127.*as it was told"):
        device_pool.call("tests.support.rpc:fail", {"phase": "send"})


def test_no_trial_begins_when_the_time_is_over(
    pool: rpc.DevicePool, fork_server: ForkServer
) -> None:
    """The call returns None."""
    device_pool = DevicePool(RpcEndpoint(pool.address, "other", 1, 20.0), fork_server, None)
    assert device_pool.call("tests.support.rpc:fail", {"phase": "run"}, lambda: False) is None


def test_an_unreachable_tracker_is_reported(tuning: Tuning) -> None:
    """Address, cause and remedy."""
    outcome = tuning("tune", tracker=NOWHERE)
    assert (outcome.kind, outcome.error) == ("error", "EnvironmentProblem")
    assert f"the RPC tracker at {NOWHERE} cannot be used: Connection refused" in outcome.message
    assert "rpc_tracker" in outcome.fix and TRACKER_VARIABLE in outcome.fix


def test_a_server_that_is_no_tracker_is_reported(pool: rpc.DevicePool) -> None:
    """The address of a device, given as the tracker's."""
    address = pool.servers[0].address
    with pytest.raises(EnvironmentProblem, match=f"tracker at {address} cannot be used"):
        Tracker(address).list_devices()


def test_without_a_tracker_the_message_says_where_to_set_it(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the recipe nor the environment; the environment alone is enough."""
    monkeypatch.delenv(TRACKER_VARIABLE, raising=False)
    remote = {"key": KEY, "priority": 1, "timeout_s": 1.0}
    with pytest.raises(StageError, match=f"neither the recipe nor .{TRACKER_VARIABLE} names one"):
        RpcEndpoint.from_settings(remote)
    monkeypatch.setenv(TRACKER_VARIABLE, NOWHERE)
    assert RpcEndpoint.from_settings(remote).tracker == NOWHERE
    assert RpcEndpoint.from_settings({**remote, "tracker": "a:2"}).tracker == "a:2"


def test_an_unknown_device_key_is_reported_with_the_known_ones(
    pool: rpc.DevicePool, tuning: Tuning
) -> None:
    """Each with its number of devices, and how to add one."""
    outcome = tuning("tune", tracker=pool.address, key="bord")
    assert outcome.kind == "error"
    assert "has no device with the key 'bord'; it has board (2)" in outcome.message
    assert f"tvmflow device serve --tracker {pool.address} --key bord" in outcome.fix


def test_a_device_with_fewer_threads_than_the_target_is_refused(
    pool: rpc.DevicePool, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Its times would not be comparable."""
    device_pool = DevicePool(RpcEndpoint(pool.address, KEY, 1, 20.0), fork_server, None)
    request = {"target": {**TARGET, "num-cores": 64}}
    with pytest.raises(StageError, match="with 2 threads, but the target is for 64 threads"):
        device_pool.call(run_trial, request)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:0", "host:70000", "h:x"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    """Everything else is refused."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(text)
    assert split_address("[::1]:9190") == ("::1", 9190)


# ---------------------------------------------------------------- tvmflow device


def test_device_ls_lists_this_machine_and_the_trackers_devices(
    pool: rpc.DevicePool, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many there are of each key, how many are free, and where."""
    pool.wait_for(2)
    addresses = sorted(server.address for server in pool.servers)
    assert main.main(["device", "ls", "--tracker", pool.address]) == 0
    this_machine, head, columns, row = capsys.readouterr().out.splitlines()
    assert this_machine.startswith("this machine: ")
    assert head == f"the tracker at {pool.address}:"
    assert columns.split() == ["key", "total", "free", "pending", "at"]
    assert row.split(maxsplit=4) == [KEY, "2", "2", "0", ", ".join(addresses)]
    assert main.main(["device", "ls", "--json", "--tracker", pool.address]) == 0
    output = json.loads(capsys.readouterr().out)
    (board,) = output["devices"]
    assert board == {"key": KEY, "total": 2, "free": 2, "pending": 0, "addresses": addresses}
    assert output["host"]["cores"] >= 1


def test_device_ls_without_a_tracker_shows_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how to set one; an invalid address is a usage error."""
    monkeypatch.delenv(TRACKER_VARIABLE, raising=False)
    assert main.main(["device", "ls"]) == 0
    assert TRACKER_VARIABLE in capsys.readouterr().out
    assert main.main(["device", "ls", "--tracker", "here"]) == 2
    assert "--tracker: 'here' is not HOST:PORT" in capsys.readouterr().err
    monkeypatch.setenv(TRACKER_VARIABLE, "there")
    assert main.main(["device", "ls"]) == 2
    assert f"${TRACKER_VARIABLE}: 'there' is not HOST:PORT" in capsys.readouterr().err
    assert main.main(["device", "ls", "--tracker", NOWHERE]) == EXIT_ENVIRONMENT
    assert "Connection refused" in capsys.readouterr().err


@pytest.mark.slow
def test_a_served_device_survives_a_kernel_that_crashes(tmp_path: Path) -> None:
    """The session is lost, and the device is free again; TVM's own server would not recover."""
    with running_pool(tmp_path, servers=0) as pool:
        server = pool.add(tvmflow_server=True)
        pool.wait_for(1)
        lease = Tracker(pool.address).request(KEY, 1, lambda: True)
        assert lease is not None and lease.address == server.address
        session = tvm.rpc.connect(lease.host, lease.port, lease.match)
        server.crash_session()
        with pytest.raises(tvm.error.InternalError):
            session.get_function("runtime.NumThreads")
        pool.wait_for(1)
        assert "a session failed" in server.log
