"""Model files of strangers: read in a worker, within limits of memory and time, whatever is in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.support.source_files import empty_source_files
from tests.unit.frontends import readers
from tests.unit.frontends.worst_files import (
    CASES,
    MAX_BYTES,
    MAX_SECONDS,
    commands_for,
    run_command,
    write_case,
)
from tvmflow.core.errors import RecipeError, TvmflowError, UsageError
from tvmflow.frontends._reading import read_in_worker
from tvmflow.frontends.base import NotAModel
from tvmflow.planning.new_recipe import inspect_model

pytestmark = pytest.mark.usefixtures("in_tmp_path")

REASONS = {
    "tflite-shared-tensors": "names the same tables, lists or names so often that they are more than 1,921,",
    "tflite-shared-operators": "names the same tables, lists or names so often that they are more than 1,921,",
    "tflite-shared-names": "names the same tables, lists or names so often that they are more than 1,861,",
    "tflite-equal-outputs": "names the same tables, lists or names so often that they are more than 421,",
    "onnx-nodes": "it has more than 100,000 nodes, which tvmflow does not import",
    "onnx-nodes-of-a-function": "it has more than 100,000 nodes, which tvmflow does not import",
    "onnx-attributes": "it has more than 800,000 nodes, attributes and tensors",
    "onnx-sparse": "it has more than 800,000 nodes, attributes and tensors",
    "onnx-functions": "it has more than 100,000 nodes when its functions are inlined",
    "onnx-nested": "it is nested more than 100 levels deep",
    "pt2-graph": "its graph has 943,718,403 bytes, and the limit is 67,108,864",
    "pt2-lists": "reading it takes more than 800.0 MB of memory",
    "pt2-deep": "its graph is not a JSON document, or is damaged",
    "pt2-weights": "its files have 943,719,286 bytes when they are unpacked, and the limit for its size is 268,435,456",
    "pt2-names": "reading it takes more than 800.0 MB of memory",
    "mxnet-nodes": "it has 100,001 nodes, and the limit is 100,000",
    "mxnet-deep": "it is nested too deep",
    "mxnet-lists": "it has 62,914,661 bytes, and the limit is 33,554,432",
    "mxnet-params": "it ends within array 50001 of 1152921504606846976",
    "onnx-values": "it has more than 2,000,000 fields of nodes, attributes and tensors",
}


def test_every_case_has_its_reason() -> None:
    """None is refused for another one."""
    assert {*REASONS} == {*CASES}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_slow])
def test_small_files_that_would_fill_the_memory_are_refused(tmp_path: Path, name: str) -> None:
    """With what is too much, and the limit; nothing was read beyond it."""
    model = write_case(name, tmp_path)
    with pytest.raises((RecipeError, UsageError)) as caught:
        inspect_model(str(model), tmp_path, empty_source_files())
    assert REASONS[name] in caught.value.message and caught.value.exit_code == 2


@pytest.mark.faults
@pytest.mark.parametrize("name", CASES)
def test_every_command_refuses_them_within_limits(tmp_path: Path, name: str, count: Count) -> None:
    """At most 1 GiB in any process, 10 s of CPU time, exit code 2."""
    model = write_case(name, tmp_path)
    for command, words in commands_for(model).items():
        if (name, command) == ("mxnet-params", "plan"):
            # planning does not read parameters
            continue
        ended = run_command(tmp_path, *words)
        assert ended.code == 2 and REASONS[name] in ended.text, (command, ended)
        assert ended.peak_bytes <= MAX_BYTES and ended.seconds <= MAX_SECONDS, (command, ended)
        count("worst model files refused", 1)


# ---------------------------------------------------------------- the worker


def test_a_file_is_read_in_another_process_and_once(tmp_path: Path) -> None:
    """All facts come back as they are; a file that has changed is read again."""
    path = tmp_path / "m"
    path.write_text("a")
    read = read_in_worker(readers.name_process)
    facts = read(path)
    assert facts.weights[0] != str(os.getpid())
    assert facts._replace(weights=()) == readers.name_process(path)._replace(weights=())
    assert read(path) is facts
    path.write_text("bc")
    assert read(path).data_files == ("bc",)


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (readers.refuse, "m is none"),
        (readers.end, "the process that reads it ended without a result (exit status 3)"),
        (readers.allocate, "reading it takes more than 800.0 MB of memory, the limit for what is not weights"),
        (readers.describe_at_length, "its inputs take more than 16.0 MB to describe"),
        pytest.param(
            *(readers.loop, "reading it takes more than 7 s, the limit for its size"), marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_what_a_reader_does_not_survive_is_a_sentence(
    tmp_path: Path, reader: object, reason: str
) -> None:
    """The command lives on."""
    (tmp_path / "m").write_text("a")
    with pytest.raises(NotAModel) as caught:
        read_in_worker(reader)(tmp_path / "m")  # type: ignore[arg-type]  # one of those above
    assert str(caught.value) == reason


def test_errors_of_readers_arrive_as_they_are(tmp_path: Path) -> None:
    """Those of tvmflow, and those of the system."""
    (tmp_path / "m").write_text("a")
    with pytest.raises(UsageError, match="m is wrong") as caught:
        read_in_worker(readers.fail)(tmp_path / "m")
    assert caught.value.fix == "write another" and isinstance(caught.value, TvmflowError)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        read_in_worker(readers.name_process)(tmp_path / "folder")


def test_a_process_without_threads_forks_and_leaves_nothing(tmp_path: Path) -> None:
    """As commands do: no new interpreter is started, and no process is left."""
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08hello")
    code = (
        "import subprocess, sys, os\n"
        "def refuse(*_, **__): raise AssertionError('a process was started')\n"
        "subprocess.Popen = refuse\n"
        "from pathlib import Path\n"
        "from tvmflow.frontends import FRONTENDS\n"
        "try: FRONTENDS['onnx'].read_facts({'model': Path(sys.argv[1])}).inputs\n"
        "except Exception as error: print(error.message)\n"
        "try: os.waitpid(-1, 0)\n"
        "except ChildProcessError: print('no child')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "m.onnx"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "the file is not an ONNX model: it is not in protobuf format",
        "no child",
    ]
