"""The number of threads follows affinity, quota and environment; the machine of the tests has none of its own say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvmflow.targets import threads


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may run on eight CPUs, without a quota."""
    monkeypatch.setattr(threads, "list_allowed_cpus", lambda: list(range(8)))
    monkeypatch.setattr(threads, "read_quota", lambda: 1000)


def make_groups(folder: Path, own: str, **files: str) -> int:
    """Return the quota of a process with these control groups; `__` in a name is a `/`, `_` a dot."""
    (folder / "own").write_text(own)
    for name, content in files.items():
        path = folder / "root" / name.replace("__", "/").replace("cpu_max", "cpu.max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return threads.read_quota(str(folder / "own"), str(folder / "root"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [("400000 100000\n", 4), ("150000 100000\n", 1), ("50000 100000", 0), ("max 100000\n", None), ("x y", None), ("", None)],
)  # fmt: skip
def test_the_quota_of_a_container_is_known(
    tmp_path: Path, content: str, expected: int | None
) -> None:
    """Whole CPUs; a thread that waits for its quota makes all others wait."""
    quota = make_groups(tmp_path, "0::/\n", cpu_max=content)
    assert quota == expected if expected is not None else quota > 1_000_000


def test_the_smallest_quota_of_all_groups_around_counts(tmp_path: Path) -> None:
    """A service in a slice with a quota; a group that is not mounted has none."""
    own = "0::/system.slice/net.service/gone\n"
    quota = make_groups(
        tmp_path,
        own,
        **{"system.slice__cpu_max": "300000 100000", "system.slice__net.service__cpu_max": "max 100000"},
    )  # fmt: skip
    assert quota == 3


def test_the_first_version_of_control_groups_is_read(tmp_path: Path) -> None:
    """Its files are those of the controller `cpu`, and -1 is not a quota."""
    for quota, expected in (("250000", 2), ("-1", 1_000_000_000)):
        folder = tmp_path / "root/cpu,cpuacct/docker"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        own = tmp_path / "own"
        own.write_text("5:memory:/docker\n4:cpu,cpuacct:/docker\n1:cpuset:/\n")
        assert threads.read_quota(str(own), str(tmp_path / "root")) == expected


@pytest.mark.usefixtures("allowed")
def test_cpus_that_share_a_core_count_once(tmp_path: Path) -> None:
    """Kernels keep the arithmetic of a core busy with one thread."""
    for cpu in range(6):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 3},{cpu % 3 + 3}\n")
    # nothing is known of the last two
    assert threads.count_usable_cores(str(tmp_path)) == 5
    assert threads.count_usable_cpus() == 8


@pytest.mark.usefixtures("allowed")
def test_an_environment_variable_decides_before_the_machine() -> None:
    """TVM's own before that of OpenMP; what is not a number of threads is left out."""
    assert threads.choose_threads({"TVM_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}) == 3
    assert threads.choose_threads({"TVM_NUM_THREADS": "0", "OMP_NUM_THREADS": "5"}) == 5
    assert threads.choose_threads({"OMP_NUM_THREADS": "4,2"}) == threads.count_usable_cores()


def test_a_small_quota_leaves_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a CPU is still one thread."""
    monkeypatch.setattr(threads, "read_quota", lambda: 0)
    assert (threads.count_usable_cpus(), threads.count_usable_cores()) == (1, 1)


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program starts later does not inherit the number of threads."""
    monkeypatch.setenv("TVM_NUM_THREADS", "7")
    monkeypatch.delenv("TVM_BIND_THREADS", raising=False)
    with threads.environment_for(2):
        assert (os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"]) == ("2", "0")
    assert os.environ["TVM_NUM_THREADS"] == "7" and "TVM_BIND_THREADS" not in os.environ
