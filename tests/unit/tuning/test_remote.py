"""Tuning on devices behind a tracker: every trial is measured once, whatever becomes of the devices."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.support import rpc
from tests.support.rpc import KEY, running_farm
from tests.support.trials import TARGET
from tests.support.tuning import dense, model, recipe, relu, resolved_target
from tvmflow import cli, tools
from tvmflow.errors import StageError
from tvmflow.executors.nursery import Nursery, Outcome
from tvmflow.stages import extract_tasks, pick_best, tune
from tvmflow.targets.tracker import VARIABLE, Tracker, split_address
from tvmflow.tuning.ledger import Ledger, Trial
from tvmflow.tuning.remote import Farm, Place

STAGES: dict[str, Any] = {"extract_tasks": extract_tasks, "tune": tune, "pick_best": pick_best}
DEVICE = {"kind": "rpc", "class": KEY}
NOWHERE = f"{rpc.HOST}:1"
# the kernel without a schedule is measured once, before the trials
UNTUNED = 1


@pytest.fixture(scope="module")
def workers() -> Iterator[Nursery]:
    with Nursery.start(["tests.support.tuning", "tvmflow.tuning.remote"]) as server:
        yield server


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.Farm]:
    """Two devices that no test harms."""
    with running_farm(tmp_path_factory.mktemp("farm"), servers=2) as found:
        yield found


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[rpc.Farm]:
    """Two devices for one test."""
    with running_farm(tmp_path, servers=2) as found:
        yield found


class Tuning:
    """The stages of a small model, for a target that is tuned on the devices of a tracker."""

    def __init__(self, workers: Nursery, folder: Path) -> None:
        self._workers = workers
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
        there = {"key": KEY, "priority": 1, "timeout_s": 20.0, **remote}
        target = resolved_target()._replace(device=DEVICE, remote=there)
        chosen = recipe(trials=trials, min_repeat_ms=min_repeat_ms)
        self.runs += 1
        folder = self._folder / f"{self.runs}-{name}"
        outcome = self._workers.call(
            "tests.support.tuning:run_stage",
            {
                "name": name,
                "settings": STAGES[name].settings(chosen, target),
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
        build = tools.identity("apache-tvm")
        ledger = Ledger.open(self._folder / "ledger", TARGET, build, DEVICE)
        (task,) = json.loads(Path(self.files["extract_tasks/tasks.json"]).read_text())
        records = ledger.workload(task["key"])
        assert len(records.path.read_text().splitlines()) == len(records)
        return list(records.trials.values())


@pytest.fixture
def tuning(workers: Nursery, tmp_path: Path) -> Tuning:
    folder = tmp_path / "stages"
    folder.mkdir()
    made = Tuning(workers, folder)
    outcome = made("extract_tasks")
    assert outcome.kind == "ok", outcome.message
    return made


def sessions_of(farm: rpc.Farm) -> int:
    return sum(server.sessions for server in farm.servers)


def at_first(event: dict[str, Any], do: Callable[[], object]) -> None:
    """Do something when the first trial has been measured."""
    if event["done"] == 1:
        do()


def test_trials_are_shared_among_the_devices(farm: rpc.Farm, tuning: Tuning) -> None:
    """Each device measures some, a record says which, and the finalists are timed there too."""
    outcome = tuning("tune", tracker=farm.address)
    assert outcome.kind == "ok", outcome.message
    assert (outcome.value["measured"], outcome.value["failed"]) == (6, 0)
    hosts = [trial.host for trial in tuning.trials()]
    assert {host["server"] for host in hosts} == {server.address for server in farm.servers}
    assert all((host["model"], host["cores"]) == (KEY, 2) for host in hosts)
    before = sessions_of(farm)
    outcome = tuning("pick_best", tracker=farm.address)
    assert outcome.kind == "ok", outcome.message
    assert sessions_of(farm) == before + 1
    report = json.loads(Path(tuning.files["pick_best/finalists.json"]).read_text())
    ((_, kernel),) = report.items()
    assert kernel["error"] == "" and kernel["untuned_us"] > 0
    assert [len(each["samples_us"]) for each in kernel["finalists"]] == [9, 9]


def test_what_the_ledger_holds_needs_no_tracker(farm: rpc.Farm, tuning: Tuning) -> None:
    """A second run measures nothing, so it may be made where the devices cannot be reached."""
    assert tuning("tune", tracker=farm.address).kind == "ok"
    again = tuning("tune", tracker=NOWHERE)
    assert again.kind == "ok", again.message
    assert (again.value["measured"], again.value["reused"]) == (0, 6)


def test_a_device_that_dies_costs_no_trial(doomed: rpc.Farm, tuning: Tuning) -> None:
    """What it was measuring is measured on the other, nothing is lost or doubled."""
    dies, lives = doomed.servers

    def kill(event: dict[str, Any]) -> None:
        at_first(event, lambda: dies.at_next_session(signal.SIGKILL))

    outcome = tuning("tune", 10, on_event=kill, tracker=doomed.address)
    assert outcome.kind == "ok", outcome.message
    assert (outcome.value["measured"], outcome.value["failed"]) == (10, 0)
    served = [trial.host["server"] for trial in tuning.trials()]
    assert len(served) == 10 and set(served[-3:]) == {lives.address}
    assert sessions_of(doomed) == 10 + UNTUNED + 1


@pytest.mark.slow
def test_a_device_that_hangs_costs_its_time_and_no_trial(doomed: rpc.Farm, tuning: Tuning) -> None:
    """After `timeout_s` the trial goes to the other device."""
    hangs = doomed.servers[0]

    def stop(event: dict[str, Any]) -> None:
        at_first(event, lambda: hangs.at_next_session(signal.SIGSTOP))

    outcome = tuning("tune", 10, on_event=stop, tracker=doomed.address, timeout_s=2.0)
    assert outcome.kind == "ok", outcome.message
    assert (outcome.value["measured"], outcome.value["failed"]) == (10, 0)
    served = [trial.host["server"] for trial in tuning.trials()]
    assert len(served) == 10
    assert sessions_of(doomed) == 10 + UNTUNED + 1


def test_a_kernel_that_takes_too_long_fails_and_frees_its_device(
    farm: rpc.Farm, tuning: Tuning
) -> None:
    """Its server ends the session after `timeout_s`; after the second one the trial has failed."""
    outcome = tuning("tune", 1, 60_000, tracker=farm.address, timeout_s=0.5)
    assert outcome.kind == "error" and "all 1 trials failed" in outcome.message
    (trial,) = tuning.trials()
    assert trial.failure is not None
    assert (trial.failure.phase, trial.failure.kind) == ("run", "timeout")
    farm.wait_for(2)


def test_a_candidate_that_fails_twice_is_to_blame(farm: rpc.Farm, workers: Nursery) -> None:
    """It gets a second session, and no third."""
    there = Farm(Place(farm.address, KEY, 1, 20.0), workers, None)
    before = sessions_of(farm)
    session = there.call("tests.support.rpc:fail", {"phase": "run"})
    assert session is not None and session.failure is not None
    assert session.failure.message == "as it was told"
    assert sessions_of(farm) == before + 2


def test_devices_that_refuse_are_no_candidates_fault(farm: rpc.Farm, workers: Nursery) -> None:
    """What cannot even be sent to three of them ends the tuning, with the last one's reason."""
    there = Farm(Place(farm.address, KEY, 1, 20.0), workers, None)
    with pytest.raises(StageError, match=r"'board' cannot be used; the last, 127.*as it was told"):
        there.call("tests.support.rpc:fail", {"phase": "send"})


def test_a_trial_does_not_wait_for_a_device_beyond_its_time(
    farm: rpc.Farm, workers: Nursery
) -> None:
    """With no time left, none is begun."""
    there = Farm(Place(farm.address, "other", 1, 20.0), workers, None)
    assert there.call("tests.support.rpc:fail", {"phase": "run"}, lambda: False) is None


def test_a_tracker_that_is_not_there_is_named(tuning: Tuning) -> None:
    """Address, cause and remedy."""
    outcome = tuning("tune", tracker=NOWHERE)
    assert (outcome.kind, outcome.error) == ("error", "StageError")
    assert f"the RPC tracker at {NOWHERE} cannot be used: Connection refused" in outcome.message
    assert "rpc_tracker" in outcome.fix and VARIABLE in outcome.fix


def test_what_is_no_tracker_is_told_from_one(farm: rpc.Farm) -> None:
    """The address of a device, given as the tracker's."""
    address = farm.servers[0].address
    with pytest.raises(StageError, match=f"tracker at {address} cannot be used"):
        Tracker(address).devices()


def test_without_a_tracker_the_sentence_says_where_to_name_one(
    workers: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the recipe nor the environment; the environment alone is enough."""
    monkeypatch.delenv(VARIABLE, raising=False)
    remote = {"key": KEY, "priority": 1, "timeout_s": 1.0}
    with pytest.raises(StageError, match=f"neither the recipe nor .{VARIABLE} names one"):
        Place.of(remote)
    monkeypatch.setenv(VARIABLE, NOWHERE)
    assert Place.of(remote).tracker == NOWHERE
    assert Place.of({**remote, "tracker": "a:2"}).tracker == "a:2"


def test_a_key_that_no_device_has_is_answered_with_those_there_are(
    farm: rpc.Farm, tuning: Tuning
) -> None:
    """Each with its number of devices, and how to add one."""
    outcome = tuning("tune", tracker=farm.address, key="bord")
    assert outcome.kind == "error"
    assert "has no device with the key 'bord'; it has board (2)" in outcome.message
    assert f"tvmflow device serve --tracker {farm.address} --key bord" in outcome.fix


def test_a_device_with_fewer_threads_than_the_target_is_refused(
    farm: rpc.Farm, workers: Nursery, tmp_path: Path
) -> None:
    """Its times would be those of another machine."""
    there = Farm(Place(farm.address, KEY, 1, 20.0), workers, None)
    request = {"target": {**TARGET, "num-cores": 64}}
    with pytest.raises(StageError, match="with 2 threads, and the target says num-cores 64"):
        there.call("tvmflow.tuning.remote:run_one", request)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:0", "host:70000", "h:x"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    """Everything else is refused."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(text)
    assert split_address("[::1]:9190") == ("::1", 9190)


# ---------------------------------------------------------------- tvmflow device


def test_device_ls_lists_this_machine_and_the_trackers_devices(
    farm: rpc.Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many there are of each key, how many are free, and where."""
    farm.wait_for(2)
    addresses = sorted(server.address for server in farm.servers)
    assert cli.main(["device", "ls", "--tracker", farm.address]) == 0
    here, head, columns, row = capsys.readouterr().out.splitlines()
    assert here.startswith("this machine: ")
    assert head == f"the tracker at {farm.address}:"
    assert columns.split() == ["key", "total", "free", "pending", "at"]
    assert row.split(maxsplit=4) == [KEY, "2", "2", "0", ", ".join(addresses)]
    assert cli.main(["device", "ls", "--json", "--tracker", farm.address]) == 0
    found = json.loads(capsys.readouterr().out)
    (board,) = found["devices"]
    assert board == {"key": KEY, "total": 2, "free": 2, "pending": 0, "addresses": addresses}
    assert found["host"]["cores"] >= 1


def test_device_ls_without_a_tracker_shows_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says how to name one; an address that is none is a mistake of the command line."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert cli.main(["device", "ls"]) == 0
    assert VARIABLE in capsys.readouterr().out
    assert cli.main(["device", "ls", "--tracker", "here"]) == 2
    assert "'here' is not HOST:PORT" in capsys.readouterr().err
    assert cli.main(["device", "ls", "--tracker", NOWHERE]) == 1
    assert "Connection refused" in capsys.readouterr().err


def test_a_served_device_survives_a_kernel_that_crashes(tmp_path: Path) -> None:
    """The session is lost, and the device is free again; a server of TVM would be gone for good."""
    with running_farm(tmp_path, servers=0) as farm:
        server = farm.add(ours=True)
        farm.wait_for(1)
        turn = Tracker(farm.address).request(KEY, 1, lambda: True)
        assert turn is not None and turn.address == server.address
        session = tvm.rpc.connect(turn.host, turn.port, turn.match)
        server.crash_session()
        with pytest.raises(tvm.error.InternalError):
            session.get_function("runtime.NumThreads")
        farm.wait_for(1)
        assert "a session went wrong" in server.log
