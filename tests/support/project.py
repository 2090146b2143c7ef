"""A folder with a small model and a recipe, and the real command that runs in it."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmflow.cli import main
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.types import Json
from tvmflow.executors import local
from tvmflow.targets import llvm_query
from tvmflow.targets.host import CPU_VARIABLE

RECIPE = """\
# a small convolutional net
recipe: 1
name: tiny
model:
  onnx: tiny.onnx
inputs:
  data: {{shape: [1, 3, 8, 8], dtype: float32}}
targets:
{targets}
tune: {{trials: {trials}, repeat: 2, min_repeat_ms: 2, choices: false}}
outputs: [shared-library, bundle]
verify: {{against: reference, repeat: 2, samples: 2, rtol: {rtol}, atol: 1.0e-4}}
"""

WHOLE_BUDGET = Path(__file__).parent / "whole_budget"
STAGES = ("import", "lower", "extract_tasks", "tune", "pick_best", "build", "export", "verify")


class Ran(NamedTuple):
    """A finished command."""

    code: int
    out: str
    err: str
    events: list[dict[str, Any]]

    @property
    def stages(self) -> dict[str, dict[str, Any]]:
        """The report of each stage by label, from the last event of `--json`."""
        finished = self.events[-1]
        return {stage["stage_id"].partition(":")[2]: stage for stage in finished["stages"]}

    @property
    def ran(self) -> list[str]:
        """The labels of the stages that ran, in the plan's order."""
        return [label for label, stage in self.stages.items() if stage["outcome"] == "ran"]

    def outcome(self, label: str) -> str:
        return str(self.stages[label]["outcome"])


class _SharedForkServer(ForkServer):
    """A fork server that goes on when a command ends, for the next one."""

    def cancel(self) -> None:
        """Stop nothing."""

    def close(self) -> None:
        """Stop nothing."""


_servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
# They are of the test, or nothing that a child of the server reads.
_NOT_OF_SERVERS = ("PYTEST_CURRENT_TEST", "TVMFLOW_REMOTE", "TVMFLOW_STORE", "XDG_RUNTIME_DIR")


def _start_shared(preload: Sequence[str] = ()) -> ForkServer:
    """Return the fork server of this environment, which a command before has started, if there is one."""
    environment = frozenset(
        (name, value) for name, value in os.environ.items() if name not in _NOT_OF_SERVERS
    )
    server = _servers.get(environment)
    if server is None or server.is_gone:
        server = _servers[environment] = _SharedForkServer.start(preload)
        atexit.register(ForkServer.close, server)
    return server


def _query_shared(
    function: Callable[[Json], Any], queries: Sequence[Json], run_process: Any
) -> list[Json]:
    """Return the facts of targets from the shared server, up to the target over which a child ended."""
    if function is not llvm_query.query_target or run_process is not subprocess.run:
        return _query_in_process(function, queries, run_process)
    answers: list[Json] = []
    server = _start_shared(local.PRELOADED)
    for query in queries:
        outcome = server.call(llvm_query.answer_query, query, timeout_s=120)
        if outcome.kind == "crashed":
            break
        assert outcome.kind == "ok", outcome
        answers.append(outcome.value)
    return answers


_query_in_process = llvm_query._query_in_process


@contextlib.contextmanager
def shared_fork_server() -> Iterator[None]:
    """Let commands in this process share one that has loaded TVM, which takes seconds."""
    with (
        mock.patch.object(local, "ForkServer", mock.Mock(start=_start_shared)),
        mock.patch.object(llvm_query, "_query_in_process", _query_shared),
    ):
        yield


class Project:
    """A recipe, its model and its store in one folder; nothing outside is touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name == CPU_VARIABLE or not name.startswith("TVMFLOW_")
        }
        self.write_model()
        self.write_recipe()

    def write_recipe(
        self,
        *,
        trials: int = 0,
        targets: Sequence[str] = ("host",),
        rtol: str = "1.0e-3",
        name: str = "tiny.yaml",
    ) -> None:
        lines = "\n".join(f"  - {target}" for target in targets)
        text = RECIPE.format(trials=trials, targets=lines, rtol=rtol)
        (self.folder / name).write_text(text)

    def spend_whole_budget(self) -> None:
        """Leave no kernel without trials: what one may gain is measured, and on a busy machine that is anything."""
        self.environment["PYTHONPATH"] += f":{WHOLE_BUDGET}"

    def edit_recipe(self, old: str, new: str, name: str = "tiny.yaml") -> None:
        path = self.folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def write_model(self, *, seed: int = 0, producer: str = "tests", channels: int = 4) -> None:
        """Write a model: conv 3x3, relu, global average pooling, dense; `data` (1, 3, 8, 8) to `scores` (1, 5)."""
        rng = np.random.default_rng(seed)

        def weight(name: str, *shape: int) -> onnx.TensorProto:
            return numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)

        nodes = [
            helper.make_node("Conv", ["data", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("Gemm", ["f", "dense"], ["scores"], transB=1),
        ]
        weights = [
            weight("w", channels, 3, 3, 3),
            weight("b", channels),
            weight("dense", 5, channels),
        ]
        graph = helper.make_graph(
            nodes,
            "tiny",
            [helper.make_tensor_value_info("data", TensorProto.FLOAT, [1, 3, 8, 8])],
            [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 5])],
            weights,
        )
        model = helper.make_model(
            graph, producer_name=producer, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]
        )
        onnx.save(model, str(self.folder / "tiny.onnx"))

    def write_products(self, rows: int | str = 64) -> None:
        """Write a model of two matrix products that fill a GPU's tensor cores: `data` (rows, 128) to `scores` (rows, 128).

        Args:
            rows: Their number, or the name of a dimension.
        """
        rng = np.random.default_rng(0)
        weights = [
            numpy_helper.from_array((rng.normal(size=shape) / 16).astype(np.float32), name)
            for name, shape in (("first", (128, 256)), ("second", (256, 128)))
        ]
        nodes = [
            helper.make_node("MatMul", ["data", "first"], ["f"]),
            helper.make_node("Relu", ["f"], ["r"]),
            helper.make_node("MatMul", ["r", "second"], ["scores"]),
        ]
        sides = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 128])
            for name in ("data", "scores")
        ]
        graph = helper.make_graph(nodes, "tiny", sides[:1], sides[1:], weights)
        model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
        onnx.save(model, str(self.folder / "tiny.onnx"))
        self.edit_recipe("[1, 3, 8, 8]", f"[{rows}, 128]")

    # ------------------------------------------------------------ running

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "tvmflow", *words]

    def tvmflow(self, *words: str, cwd: Path | None = None) -> Ran:
        """Run one command to its end, in the project's folder or in another."""
        done = subprocess.run(
            self.command(*words),
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr, _events(words, done.stdout))

    def call(self, *words: str, cwd: Path | None = None) -> Ran:
        """Run one command in this process, which imports its modules, and TVM for its stages, once for all."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            pytest.MonkeyPatch.context() as patch,
            shared_fork_server(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(cwd or self.folder)
            code = main.main(list(words))
        return Ran(code, out.getvalue(), err.getvalue(), _events(words, out.getvalue()))

    def run(self, *words: str) -> Ran:
        """Run `tvmflow run tiny.yaml --json …`, which must not end with a traceback."""
        return _checked(self.tvmflow("run", "tiny.yaml", "--json", *words))

    def run_here(self, *words: str) -> Ran:
        """Run the same in this process."""
        return _checked(self.call("run", "tiny.yaml", "--json", *words))

    def start(self, *words: str, start_new_session: bool = False) -> subprocess.Popen[str]:
        """Start a run without waiting for its end."""
        process = subprocess.Popen(
            self.command("run", "tiny.yaml", "--json", *words),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=start_new_session,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kill what a failed test left running: it would hold the devices of this machine."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def kill_after(self, seconds: float) -> bool:
        """Start a run, kill it with SIGKILL, and return whether it was still running."""
        process = self.start()
        time.sleep(seconds)
        running = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return running

    # ------------------------------------------------------------ looking

    def digests(self, *labels: str) -> dict[str, str]:
        """Return the digest of each file in the last results of these stages, by `label/file`."""
        from tvmflow.store.local import LocalStore

        store = LocalStore(str(self.folder / "cache"))
        digests = {}
        for label in labels:
            artifact = store.find(store.last_key("tiny", label) or "")
            assert artifact is not None, label
            digests.update({f"{label}/{file.name}": file.digest for file in artifact.files})
        return digests

    def trials(self) -> list[str]:
        """Return the id of every measured trial in the ledger."""
        ids = []
        for path in sorted((self.folder / "cache" / "ledger").rglob("*.jsonl")):
            # Other records mark the end of a search.
            records = [json.loads(line) for line in path.read_text().splitlines() if line]
            ids += [f"{path.stem}/{record['id']}" for record in records if "id" in record]
        return ids

    def debris(self) -> list[str]:
        """Return the work folders and temporary files that a kill may have left."""
        cache = self.folder / "cache"
        return sorted(
            str(path.relative_to(cache))
            for name in ("work", "tmp")
            for path in (cache / name).glob("*")
        )

    def forget_results(self) -> None:
        """Remove the store."""
        shutil.rmtree(self.folder / "cache", ignore_errors=True)


def _checked(result: Ran) -> Ran:
    assert "Traceback" not in result.err, result.err
    assert result.code in (0, 1, 3, 4), result.err
    return result


def _events(words: Sequence[str], text: str) -> list[dict[str, Any]]:
    if "--json" not in words:
        return []
    return [json.loads(line) for line in text.splitlines()]
