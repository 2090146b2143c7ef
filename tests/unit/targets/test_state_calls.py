"""Libraries with states under random calls, damaged states and a wrong runtime, which `verify` must find."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from tests.conftest import Count
from tests.support import caches
from tests.support.exports import Array
from tests.support.mutations import mutate_bytes
from tests.support.pages import ROOT
from tests.unit.targets.state_libraries import StateLibrary, write_library
from tvmflow.core.errors import BundleError
from tvmflow.recipe import Verify
from tvmflow.runtime.arrays import pack_rows, unpack_rows
from tvmflow.runtime.module import Module
from tvmflow.runtime.sessions import Session
from tvmflow.stages.verify.comparison import as_reference
from tvmflow.stages.verify.libraries import LocalLibrary
from tvmflow.stages.verify.verification import check_states
from tvmflow.stages.verify_settings import CheckSettings, InputSettings, VerifySettings

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

COMPILER: Final = ("gcc", "-std=gnu11", "-O1")
SEQUENCES: Final = 10_000


@pytest.fixture(scope="module", params=["", "float16", "int8"], ids=["float32", "float16", "int8"])
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> StateLibrary:
    return write_library(tmp_path_factory.mktemp("cached"), request.param)


def find_element(library: StateLibrary) -> str:
    """Return the dtype of the states."""
    return str(library.signature["inputs"][-1]["dtype"])


def count_bytes(library: StateLibrary) -> int:
    """Return the bytes of a row of all heads."""
    state = library.signature["inputs"][-1]
    return int(caches.HEADS * state["shape"][-1] * np.dtype(state["dtype"]).itemsize)


@pytest.fixture(scope="module")
def module(library: StateLibrary) -> Module:
    library.compile((*COMPILER, "-shared", "-fPIC"), library.folder / "right.so")
    return library.load(library.folder / "right.so")


@pytest.mark.slow
def test_random_calls_under_sanitizers(library: StateLibrary, tmp_path: Path, count: Count) -> None:
    """Every state is what the calls before left: steps, truncations, drops, forks, saves, loads and ends."""
    source = ROOT / "tests/support/c_programs/state_calls.c"
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-type-limits")
    made = tmp_path / "calls"
    elements = {"float32": "float", "float16": "uint16_t", "int8": "int8_t"}
    size = library.signature["inputs"][-1]["shape"][-1]
    macros = f"-DELEMENT={elements[find_element(library)]}", f"-DROW={size}"
    library.compile((*COMPILER, "-g", *warnings, *sanitizers, *macros, str(source)), made)
    words = [str(made), "0", str(SEQUENCES)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    count("random sequences of calls with states", SEQUENCES)


def test_attention_reads_states_where_they_are(library: StateLibrary) -> None:
    """No kernel casts or copies keys and values before attention."""
    text = (library.folder / "program.c").read_text()
    calls = re.findall(r"TF_CALL\(.*?, cached_(\w+)\((.*)\)\);", text)
    readers = [name for name, arguments in calls if "(out[1])" in arguments]
    assert readers == [name for name, arguments in calls if "(out[2])" in arguments]
    assert readers == ["attention"]


def test_states_of_another_dtype_are_refused(
    module: Module, library: StateLibrary, tmp_path: Path
) -> None:
    other = "" if find_element(library) == "float16" else "float16"
    others = write_library(tmp_path, other)
    others.compile((*COMPILER, "-shared", "-fPIC"), tmp_path / "other.so")
    session = others.load(tmp_path / "other.so").session()
    session.run(feed(0, 4, 0))
    with pytest.raises(BundleError, match="that of another model"):
        module.session().load(session.save())


def feed(seed: int, seq: int, length: int) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((1, seq, caches.WIDTH)).astype(np.float32)
    return {"x": x, "mask": np.ones((1, length + seq), np.float32)}


# As `states.c` has it: magic, model, length, dropped rows, random state, bytes, checksum.
HEAD: Final = struct.Struct("<8s16sqqQQQ")
MASK: Final = (1 << 64) - 1


def find_checksum(known: tuple[int, int, int], content: bytes) -> int:
    prime, total = 0x100000001B3, 0xCBF29CE484222325
    for number in known:
        total = (total ^ number & MASK) * prime & MASK
    whole = len(content) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", content[:whole]):
        total = (total ^ word) * prime & MASK
        total ^= total >> 29
    for byte in content[whole:]:
        total = (total ^ byte) * prime & MASK
    return total


def forge(draw: random.Random, saved: bytes, row: int) -> tuple[bytes, bool]:
    """Return a state with a right checksum, and whether it is one of this model; `row` is the bytes of a length of 1."""
    magic, model, length, dropped, state, size, _ = HEAD.unpack_from(saved)
    content = saved[HEAD.size :]
    kind = draw.choice(("magic", "length", "dropped", "size", "both", "content", "state", "model"))
    if kind in ("length", "both"):
        length = draw.choice((-1, 0, 1, 40, 41, 1 << 55, (1 << 63) - 1, -(1 << 63)))
    if kind in ("size", "both"):
        content = draw.choice((content[:-1], content[row:], content * 2, b""))
    if kind == "both" and 0 <= length <= 41:
        content = draw.randbytes(length * row)
    size = draw.choice((size, len(content), len(content), MASK))
    if kind == "content":
        content, size = draw.randbytes(len(content)), len(content)
    if kind == "state":
        state = draw.getrandbits(64)
    if kind == "dropped":
        dropped = draw.choice((-1, 3, (1 << 62) - 1, 1 << 62, -(1 << 63)))
    if kind == "magic":
        magic = b"TVMFST01"
    if kind == "model":
        model = bytes(16)
    is_right = (magic, model) == (saved[:8], saved[8:24]) and 0 <= length <= 40
    is_right &= 0 <= dropped < 1 << 62
    is_right &= size == len(content) == length * row
    checksum = find_checksum((length, dropped, state), content)
    return HEAD.pack(magic, model, length, dropped, state, size, checksum) + content, is_right


@pytest.mark.parametrize("mutations", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_states_are_refused_or_equal(
    library: StateLibrary, module: Module, mutations: int, count: Count
) -> None:
    """Also those with a right checksum, whose lengths are wrong; a refusal changes nothing."""
    draw = random.Random(mutations)
    row = 2 * count_bytes(library)
    session, other = module.session(), module.session()
    session.run(feed(0, 7, 0))
    other.run(feed(1, 3, 0))
    saved, ended = session.save(), Counter[bool]()
    assert saved[:8] == b"TVMFST02"
    for _ in range(mutations):
        is_forged = draw.random() < 0.5
        damaged, is_right = (
            forge(draw, saved, row) if is_forged else (mutate_bytes(draw, saved), False)
        )
        is_right |= damaged == saved
        before = other.save()
        try:
            other.load(damaged)
        except BundleError as error:
            assert not is_right, error
            assert other.save() == before
        else:
            assert is_right
            assert other.save() == damaged
            _continue(other)
        ended[is_right] += 1
    assert min(ended[True], ended[False]) > mutations // 50
    count("damaged states refused", ended[False])


def _continue(session: Session) -> None:
    length = session.length
    if length < 40:
        session.run(feed(2, 1, length))
        session.truncate(length)


# What is changed in the C code of a library, and how. In the program, regular expressions find it, since its sizes are
# numbered; ROW stands for the bytes of a row of all heads.
WRONG: Final = {
    "keys are appended one row too early": (
        "program",
        r"memcpy\(out\[1\] \+ \(size_t\)(v\[\d+\]), ",
        r"memcpy(out[1] + (size_t)\1 - (\1 ? ROW : 0), ",
    ),
    "half of a row of keys is appended": (
        "program",
        r"(memcpy\(out\[1\] .*, \(size_t\)v\[\d+\])\);",
        r"\1 - ROW / 2);",
    ),
    "values are not appended": (
        "program",
        r"memcpy\(out\[2\] \+ \(size_t\)v\[\d+\], ",
        "(void)(out[2], ",
    ),
    "keys are appended as values": (
        "program",
        r"(?s)(memcpy\(out\[1\] [^,]*, arena \+ (v\[\d+\]).*memcpy\(out\[2\] [^,]*, arena \+ )v\[\d+\]",
        r"\1\2",
    ),
    "attention misses the last key": (
        "program",
        r"(\(out\[0\]\), v\[1\], v\[\d+\])\)",
        r"\1 - 1)",
    ),
    "the mask has the length before the step": (
        "program",
        r"(cached_fused_subtract_multiply\(.*, v\[\d+\])\)\);",
        r"\1 - v[1]));",
    ),
    "a larger page lacks the rows before": (
        "states",
        "if (context->length) memcpy(larger.data,",
        "if (0) memcpy(larger.data,",
    ),
    "a larger page lacks the last row": (
        "states",
        "held->data, tf_state_bytes(&tf_states[state], context->length));",
        "held->data, tf_state_bytes(&tf_states[state], context->length - 1));",
    ),
    "a fork appends to rows of the other": (
        "states",
        "if (atomic_compare_exchange_strong(&shared->rows, &rows, (size_t)length)) return",
        "if (rows || shared) return",
    ),
    "the length lacks a row": (
        "states",
        "context->length = length;\n  return TF_STATUS(OK);\n}\n\nint TF(step)",
        "context->length = length - 1;\n  return TF_STATUS(OK);\n}\n\nint TF(step)",
    ),
    "a step does not count": (
        "states",
        "context->length = length;\n  return TF_STATUS(OK);\n}\n\nint TF(step)",
        "return TF_STATUS(OK);\n}\n\nint TF(step)",
    ),
    "a truncation leaves a row": (
        "states",
        "tf_keep_rows(context, 0, length);",
        "tf_keep_rows(context, 0, length < context->length ? length + 1 : length);",
    ),
    "a truncation does nothing": (
        "states",
        "if (status == TF_STATUS(OK)) tf_keep_rows(context, 0, length);",
        "",
    ),
    "a drop keeps the oldest rows": (
        "states",
        "tf_keep_rows(context, count, length);",
        "tf_keep_rows(context, 0, length);",
    ),
    "a drop does not count": (
        "states",
        "    tf_keep_rows(context, count, length);",
        "",
    ),
    "a drop moves the rows of a fork": (
        "states",
        "if (atomic_load(&tf_share_of(held)->contexts) > 1) status",
        "if (0) status",
    ),
    "a drop leaves rows between": (
        "states",
        "data + block * from + (size_t)first * row, to);",
        "data + block * from + (size_t)first * row, to - row);",
    ),
    "a reset keeps the length": (
        "states",
        "context->length = context->dropped = 0;",
        "context->dropped = 0;",
    ),
    "a loaded state lacks its last row": (
        "states",
        "state->outer, (size_t)length, state->row);\n#endif\n    } else",
        "state->outer, (size_t)length - 1, state->row);\n#endif\n    } else",
    ),
    "rows enter in another order": (
        "append",
        "memcpy(inside + (row * outer + block) * bytes,",
        "memcpy(inside + ((rows - 1 - row) * outer + block) * bytes,",
    ),
    "heads leave in another order": (
        "append",
        "memcpy(outside + (block * rows + row) * bytes,",
        "memcpy(outside + ((outer - 1 - block) * rows + row) * bytes,",
    ),
}


def edit(text: str, name: str, old: str, new: str, row: int) -> str:
    """Return the text of a file with one change of `WRONG`."""
    if name == "program":
        changed, times = re.subn(old, new.replace("ROW", str(row)), text)
        assert times == 1, old
        return changed
    assert text.count(old) == 1, old
    return text.replace(old, new)


def find_by(module: Module, weights: dict[str, Array]) -> str:
    """Return which check of `verify` finds a wrong library: the steps, or the comparison of a call."""
    checks = CheckSettings(**{**Verify().model_dump(), "data": False})
    inputs = {"mask": InputSettings(range=(0, 1))}
    settings: Any = VerifySettings.model_construct(verify=checks, inputs=inputs)
    case: Any = SimpleNamespace(settings=settings, model=SimpleNamespace(operands=()))
    verdict = check_states(LocalLibrary(module), module._signature, case)
    assert verdict is not None
    if not verdict["passed"]:
        return "steps"
    draw = np.random.default_rng(0)
    shape, dtype = (1, caches.HEADS, 5, caches.DEPTH), module.inputs[-1].dtype
    drawn = [draw.standard_normal(shape).astype("f4") for _ in range(2)]
    is_packed = module.inputs[-1].row_scales
    past = [pack_rows(array) if is_packed else array.astype(dtype) for array in drawn]
    given = feed(0, 3, 5)
    keys, values = (unpack_rows(array) if is_packed else array.astype("f4") for array in past)
    expected = caches.attend(weights, given["x"], given["mask"], (keys, values))
    # ten roundings to float16, or two to 127 steps of a value of 3
    limits = {"float16": (1e-2, 10 / 2**11), "int8": (1e-2, 2 * 3 / 127)}.get(dtype, (1e-3, 1e-4))
    found = module.run({**given, "past_key": past[0], "past_value": past[1]})
    is_close = [
        np.allclose(as_reference(a, b), b, *limits)
        for a, b in zip(found.values(), expected, strict=True)
    ]
    return "" if all(is_close) else "calls"


@pytest.mark.slow
def test_verify_finds_wrong_appends(
    library: StateLibrary, module: Module, tmp_path: Path, count: Count
) -> None:
    """Rows in the wrong place, stale pages, wrong lengths and masks, each in a library that is otherwise right."""
    weights = caches.write_cached_attention(tmp_path / "model.onnx")
    assert not find_by(module, weights)
    found, row = Counter[str](), count_bytes(library)
    for place, (what, (name, old, new)) in enumerate(WRONG.items()):
        path = library.folder / f"{name}.c"
        text, made = path.read_text(), tmp_path / f"{place}.so"
        edited = {name: edit(text, name, old, new, row)}
        library.compile((*COMPILER, "-w", "-shared", "-fPIC"), made, **edited)
        path.write_text(text)
        check = find_by(library.load(made), weights)
        assert check, what
        found[check] += 1
    assert found["steps"] > found["calls"]
    for check, number in found.items():
        count(f"wrong appends found by {check}", number)
