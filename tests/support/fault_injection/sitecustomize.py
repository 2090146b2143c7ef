"""Imported by every Python process of a run: makes one stage crash, hang, take memory, fill the disk, vary its output, or compute with a wrong weight, kernel or model."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tests.support.importing import after_import

STAGE, FAULT, TARGET = (os.environ.get("INJECTED_FAULT") or "::").split(":")


def _fail() -> NoReturn:
    if FAULT == "segfault":
        ctypes.string_at(0)
    if FAULT == "full-disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if FAULT == "memory":
        print("taking memory", flush=True)
        held = bytearray(2 << 30)
        for start in range(0, len(held), 1 << 24):
            held[start : start + (1 << 24)] = b"x" * (1 << 24)
            time.sleep(0.01)
    if FAULT == "native-hang":
        # unlike `time.sleep`, it keeps all other threads of the process from running
        ctypes.PyDLL(None).sleep(1000)
    time.sleep(1000)
    raise AssertionError(f"unknown fault {FAULT!r}")


def _change_code(path: Path) -> None:
    """Write another byte into an object's code each time, well after its beginning."""
    from elftools.elf.elffile import ELFFile

    with path.open("r+b") as stream:
        text = ELFFile(stream).get_section_by_name(".text")
        place = text["sh_offset"] + text["sh_size"] - 5
        stream.seek(place)
        old = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([(old + 1 + os.getpid() % 200) % 256]))


def _change_weight(path: Path) -> None:
    """Negate the largest weight of a model: its library is wrong, and its reference is not."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(path)
    name = max(weights, key=lambda name: weights[name].size)
    flat = weights[name].reshape(-1)
    place = abs(flat).argmax()
    flat[place] = -flat[place]
    save_file(weights, path)


def _spoil_kernels(module: ModuleType) -> None:
    """Negate one column of each product of matrices that is scheduled."""
    from tests.support.verification import spoil_kernel

    schedule = module.schedule_kernels

    def schedule_spoiled(mod: Any, *arguments: Any, **options: Any) -> Any:
        for var in mod.get_global_vars():
            if var.name_hint.startswith(("dense", "matmul")):
                mod = spoil_kernel(var.name_hint)(mod)
        return schedule(mod, *arguments, **options)

    module.schedule_kernels = schedule_spoiled  # type: ignore[attr-defined]


def _inject(module: ModuleType) -> None:
    """Wrap `run` of the chosen stage's module."""
    run = module.run

    # The type of the settings is read from the function's annotations.
    @functools.wraps(run)
    def run_with_fault(settings: Any, context: Any) -> Any:
        if FAULT == "vary-output":
            facts = run(settings, context)
            _change_code(context.out / "vm" / "lib0.o")
            return facts
        if FAULT == "wrong-weight":
            facts = run(settings, context)
            _change_weight(context.out / "params.safetensors")
            return facts
        if FAULT == "other-model":
            model = Path(TARGET).resolve()
            return run(settings, context._replace(inputs={**context.inputs, "model": model}))
        if FAULT == "wrong-kernel":
            if settings.target.get("mcpu") == TARGET:
                _spoil_kernels(module)
            return run(settings, context)
        if not TARGET or settings.target.get("mcpu") == TARGET:
            _fail()
        return run(settings, context)

    module.run = run_with_fault  # type: ignore[attr-defined]


if STAGE:
    after_import(f"tvmflow.stages.{STAGE}", _inject)
