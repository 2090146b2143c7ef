"""Whatever a file holds, an import takes valid records or refuses with a sentence, within its memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trials import DEVICE, TARGET, sealed, trial
from tvmflow.cli.records import _format_import
from tvmflow.core.canonical_json import canonical
from tvmflow.core.errors import StoreError, UsageError
from tvmflow.tuning import traces
from tvmflow.tuning.ledger import Ledger, MachineClass, WorkloadDescription
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.packs import ImportResult, export_pack, import_pack
from tvmflow.tuning.trials import Baseline, Failure, FinalistsRecord, record_to_json, trial_id

HERE = MachineClass("0", DEVICE)
KEYS = [hashlib.sha256(name).hexdigest() for name in (b"one", b"two")]
WHEN = "2024-01-01T00:00:00.000+00:00"


def make_pack(folder: Path) -> bytes:
    """A pack of two workloads with a record of each kind."""
    ledger = Ledger.open(folder / "source", TARGET, "0", DEVICE)
    for key in KEYS:
        workload = ledger.workload(key)
        workload.add(
            [Baseline(5, 1.0, WHEN), FinalistsRecord(KEYS[0], "none", (1.0,), ((1.0,),), WHEN)]
        )
        failure = Failure("build", "error", "no memory")
        workload.extend([trial(1), trial(2), trial(3, run_secs=(), failure=failure)])
        workload.mark_exhausted("evolutionary/0")
        ledger.describe(key, WorkloadDescription("conv", 12.0, ("float32[1]",)))
    export_pack(folder / "pack.jsonl", folder / "source")
    return (folder / "pack.jsonl").read_bytes()


with tempfile.TemporaryDirectory() as _folder:
    PACK = make_pack(Path(_folder))


def take(folder: Path, content: bytes) -> ImportResult:
    """Import a pack into an empty ledger, and check that it can be used afterwards."""
    path, root = folder / "x.jsonl", folder / "ledger"
    path.write_bytes(content)
    try:
        return import_pack(path, root, HERE)
    finally:
        for target in list_target_folders(root):
            assert target.problem == ""
            for key, _ in target.workload_files():
                assert target.ledger.workload(key).repairs == []


# ---------------------------------------------------------------- mutations

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1e300, 10**30, "", "x" * 100, "\x1b[2J", "\ud800", [], {}, [[]], [None],
    [[[[[[]]]]]], {"v": 1}, "9999-12-31T23:59:59.999+00:00", "2024-01-01", "0001-01-01T00:00:00+23:59",
    [-1.0], [0], [10**400], ["1"], [True], [[], []], [[["Fly", [], [], []]], []], [[["Fuse", [], [10**30], []]], []],
]  # fmt: skip


def change_value(draw: st.DataObject, line: bytes) -> bytes:
    """Replace a value somewhere in a line of JSON."""
    value = json.loads(line)
    inner = value
    while True:
        names: Any = sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))
        name = draw.draw(st.sampled_from(names))
        if isinstance(inner[name], dict | list) and inner[name] and draw.draw(st.booleans()):
            inner = inner[name]
            continue
        inner[name] = draw.draw(st.sampled_from(HOSTILE))
        break
    if draw.draw(st.booleans()) and "trace" in value:
        value["id"] = trial_id(value["trace"])
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def change_bytes(draw: st.DataObject, line: bytes) -> bytes:
    """Put other bytes in place of some."""
    start = draw.draw(st.integers(0, len(line)))
    end = draw.draw(st.integers(start, min(len(line), start + 9)))
    return line[:start] + draw.draw(st.binary(max_size=9)) + line[end:]


def repeat(draw: st.DataObject, line: bytes) -> bytes:
    return line * draw.draw(st.integers(0, 3))


MUTATIONS = [change_value, change_bytes, repeat]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_a_mutated_pack_is_taken_or_refused_with_a_sentence(
    data: st.DataObject, correct: bool
) -> None:
    """Nothing else happens: what was taken can be read, and what was not is counted with its reason."""
    lines = PACK.splitlines(keepends=True)
    # without a correct digest little behind the header is reached
    first = 1 if correct else 0
    index = data.draw(st.integers(first, len(lines) - 1))
    lines[index] = data.draw(st.sampled_from(MUTATIONS))(data, lines[index])
    content = b"".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = take(Path(folder), sealed(content) if correct else content)
        except (UsageError, StoreError) as refused:
            assert refused.message and "\n  fix" not in refused.message
            return
    refusals = sum(target.invalid for target in result.targets)
    assert refusals == len(result.problems)
    assert result.complete == (not refusals)
    summary = list(_format_import(result))[-1]
    assert f"{refusals} record" in summary
    "\n".join(_format_import(result)).encode(errors="replace")


# ---------------------------------------------------------------- whole files


def bomb(_: Path) -> bytes:
    return gzip.compress(b"\0" * (64 << 20))


def bomb_in_a_record(_: Path) -> bytes:
    return gzip.compress(PACK + b'{"failure":"' + b"x" * (64 << 20) + b'"}\n')


def deep(_: Path) -> bytes:
    return b"[" * 100_000 + b"]" * 100_000 + b"\n"


def deep_header(_: Path) -> bytes:
    return PACK.replace(b'"kind":"llvm"', b'"kind":' + b"[" * 500 + b"]" * 500)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bomb, "far larger than that of any pack"),
        (bomb_in_a_record, "far larger than that of any pack"),
        (deep, "is not a trial pack"),
        (deep_header, "is not a trial pack"),
        (lambda _: PACK.decode().encode("utf-16"), "is not a trial pack"),
        (lambda _: os.urandom(1 << 16), "is not a trial pack"),
        (lambda _: b"\0" * (1 << 16), "is not a trial pack"),
        (lambda _: PACK.replace(b'"version":2', b'"version":3'), "update tvmflow"),
        (lambda _: PACK.replace(b'"version":2', b'"version":NaN'), "is not a trial pack"),
        (lambda _: PACK.replace(b'"version":2', b'"version":1e999'), "is not a trial pack"),
        (lambda _: PACK.replace(b'"version":2', b'"version":' + b"9" * 5000), "is not a trial pack"),
        (lambda _: PACK.replace(b'"version":2', b'"version":2,"version":2'), "is not a trial pack"),
        (lambda _: gzip.compress(PACK)[:-9], "cannot be unpacked"),
        (lambda _: gzip.compress(PACK) + b"more", "cannot be unpacked"),
        (lambda _: PACK[: len(PACK) // 2], "digest"),
        (lambda _: PACK.replace(b'"trials":6', b'"trials":7'), "digest"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_pack_is_refused_within_the_memory(
    tmp_path: Path, content: Callable[[Path], bytes], message: str
) -> None:
    """Nothing is imported, and the file is named."""
    (tmp_path / "x.jsonl").write_bytes(content(tmp_path))
    tracemalloc.start()
    with pytest.raises(UsageError, match=message) as refused:
        import_pack(tmp_path / "x.jsonl", tmp_path / "ledger", HERE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(tmp_path / "x.jsonl") in refused.value.message and refused.value.fix
    assert peak < 100 << 20
    assert not (tmp_path / "ledger").exists()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe without a writer is not waited for, and a device without an end is not read."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(UsageError, match="is not a regular file"):
            import_pack(path, tmp_path / "ledger", HERE)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StoreError, match="cannot read"):
        import_pack(tmp_path / "loop", tmp_path / "ledger", HERE)


def test_an_export_does_not_replace_a_device(tmp_path: Path) -> None:
    """For root that would otherwise be possible."""
    make_pack(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not replaced"):
        export_pack(tmp_path / "pipe", tmp_path / "source")


LLVM: Any = [
    [["Annotate", ["l1", '"define void @f() { ret void }"'], ["pragma_import_llvm"], []]],
    [],
]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"run_secs": [0.0]}, "greater than 0"),
        ({"run_secs": [1e999]}, "is not a number in JSON"),
        ({"seed": 10**30}, "the field 'seed' is wrong"),
        ({"when": "2999-01-01T00:00:00.000+00:00"}, "is in the future"),
        ({"when": "yesterday"}, "the field 'when' is wrong"),
        ({"host": "x" * (2 << 20)}, "is longer than"),
        ({"host": json.loads("[" * 99 + "]" * 99)}, "nests too deeply"),
        ({"v": 9}, "this tvmflow can read"),
        ({"v": True}, "not a version"),
        ({"more": 1}, "the field 'more' is wrong"),
        ({"trace": [[["Fly", [], [], []]], []]}, "an instruction that no search writes: 0, 'Fly'"),
        ({"trace": LLVM}, "the annotation 'pragma_import_llvm', in instruction 0 (Annotate)"),
        ({"trace": [[["Fuse", [], [10**30], []]], []]}, "a number that TVM cannot hold"),
        ({"trace": [[], [[3, 1]]]}, "a decision about an instruction that it lacks"),
        ({"trace": [[["Fuse"]], []]}, "its trace is malformed"),
        ({"tvm": "9"}, "measured with TVM 9"),
    ],
)  # fmt: skip
def test_one_invalid_record_is_refused_alone(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    """All others are taken."""
    value = {**record_to_json(trial(7)), **record}
    line = json.dumps(
        {**value, "id": trial_id(value["trace"])}, sort_keys=True, separators=(",", ":")
    )
    result = take(tmp_path, sealed(PACK + line.encode() + b"\n"))
    assert [(target.new, target.invalid) for target in result.targets] == [(6, 1)]
    assert reason in result.problems[0]


def test_records_after_a_line_that_names_no_workload_are_refused(tmp_path: Path) -> None:
    """They could otherwise enter the ledger of the workload before."""
    second = PACK.rindex(b'{"about":')
    moved = PACK[:second] + b" " + PACK[second:]
    result = take(tmp_path, sealed(moved))
    assert [(target.new, target.invalid) for target in result.targets] == [(3, 6)]


def test_many_problems_are_counted_and_few_are_kept(tmp_path: Path) -> None:
    """A hostile file cannot fill the memory with sentences."""
    result = take(tmp_path, sealed(PACK + b'{"failure":\n' * 5000))
    assert [target.invalid for target in result.targets] == [5000]
    assert len(result.problems) == 1000


def test_the_instructions_are_those_of_tvm() -> None:
    """A search writes no other ones."""
    from tvm.s_tir.schedule import InstructionKind

    def exists(kind: str) -> bool:
        try:
            return InstructionKind.get(kind) is not None
        except Exception:
            return False

    assert all(map(exists, traces.INSTRUCTIONS))


def test_a_folder_with_another_description_is_refused(tmp_path: Path) -> None:
    """Fields of other types, and a key that is not the digest of its description."""
    header, _, body = PACK.partition(b"\n")
    changes: list[dict[str, Any]] = [
        {"tvm": 1},
        {"device": []},
        {"target": {"mattr": 5}},
        {"target": None},
    ]
    for change in changes:
        value = json.loads(header)
        (entry,) = value["targets"].values()
        entry["about"].update(change)
        (tmp_path / "x.jsonl").write_bytes(sealed(canonical(value) + b"\n" + body))
        with pytest.raises(UsageError, match=r"is not a trial pack|does not have that key"):
            import_pack(tmp_path / "x.jsonl", tmp_path / "ledger", HERE)
