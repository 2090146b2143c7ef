"""Remembers the plan that a command line gave, so that an up-to-date run need not read YAML.

An entry is valid while every file that planning read has the content it had, this machine
is the same, and tvmflow's own code is. Then the same words in the same folder mean the same
plan.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from tvmflow.keys import digest_of
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore
from tvmflow.targets.host import read_host
from tvmflow.values import Delivery, InputFile, Json, Need, Plan, StageSpec

# What may come and go without meaning anything.
_NO_CODE = (".pyc", "~", ".swp")

# Where a toolchain that a recipe names is looked for, and a GPU's driver; and which GPUs may be seen.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
# What NVIDIA's driver makes on a server, on a Jetson, and on Windows' Linux; and where it tells of itself.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg")
_NVIDIA = "/proc/driver/nvidia"


class Planned(NamedTuple):
    """A plan, what planning read, and the options of the command line that matter to an up-to-date run."""

    plan: Plan
    reads: tuple[str, ...]
    dist: str
    json: bool


def save(store: LocalStore, argv: Sequence[str], planned: Planned, digests: FileDigests) -> None:
    """Remember what `argv` gave in the current folder."""
    entry = {
        "circumstances": _circumstances(),
        "reads": [[path, _content(path, digests)] for path in planned.reads],
        "plan": planned.plan,
        "dist": planned.dist,
        "json": planned.json,
    }
    store.write_note(json.dumps(entry), "plans", _name(argv))


def load(store: LocalStore, argv: Sequence[str], digests: FileDigests) -> Planned | None:
    """What `argv` gave the last time, if it would give the same now."""
    try:
        entry = json.loads(store.read_note("plans", _name(argv)) or "null")
        if not entry or entry["circumstances"] != _circumstances():
            return None
        if any(_content(path, digests) != digest for path, digest in entry["reads"]):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    reads = tuple(path for path, _ in entry["reads"])
    return Planned(_plan(entry["plan"]), reads, entry["dist"], entry["json"])


def _content(path: str, digests: FileDigests) -> str:
    """The file's digest; empty for one that is not there, and that planning would have read if it were."""
    try:
        return digests.digest(path)
    except FileNotFoundError:
        return ""


def _name(argv: Sequence[str]) -> str:
    # who may see the store must not be able to try passwords against a digest
    return digest_of([os.getcwd(), [_without_user(word) for word in argv]])


def _without_user(word: str) -> str:
    scheme, colon, rest = word.partition("://")
    return scheme + colon + (rest.rpartition("@")[2] if colon else rest)


def _circumstances() -> str:
    """This machine and this code: a digest over the stamps of all files of this package."""
    variables = [os.environ.get(name) for name in _VARIABLES]
    here = [
        read_host().fingerprint(),
        variables,
        [os.path.exists(path) for path in _DRIVERS],
        _gpus(),
    ]
    digest = hashlib.sha256(json.dumps(here).encode())
    root = os.path.dirname(os.path.abspath(__file__))
    for folder in _folders(root):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            # not only modules: exporters copy files of other kinds into what they write
            if not entry.name.endswith(_NO_CODE) and entry.is_file():
                status = entry.stat()
                digest.update(f"{entry.path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _gpus() -> list[str]:
    """NVIDIA's driver and the GPUs, as they are where it has told the kernel of them."""
    found = []
    try:
        for path in (f"{_NVIDIA}/version", *sorted(_entries(f"{_NVIDIA}/gpus"))):
            with open(path, encoding="utf-8", errors="replace") as stream:
                found.append(stream.read())
    except OSError:
        # there is none, or it tells less
        pass
    return found


def _entries(folder: str) -> list[str]:
    return [f"{entry.path}/information" for entry in os.scandir(folder)]


def _folders(root: str) -> list[str]:
    found = [root]
    for folder in found:
        found += [entry.path for entry in os.scandir(folder) if entry.is_dir()]
    return [folder for folder in found if not folder.endswith("__pycache__")]


def _plan(value: Json) -> Plan:
    stages, deliveries = value
    return Plan(tuple(_spec(entry) for entry in stages), tuple(_delivery(e) for e in deliveries))


def _spec(value: Json) -> StageSpec:
    spec = StageSpec(*value)
    return spec._replace(
        files=tuple(InputFile(*entry) for entry in spec.files),
        needs=tuple(Need(stage, of, tuple(files)) for stage, of, files in spec.needs),
        tools=tuple(spec.tools),
        pinned=tuple((name, digest) for name, digest in spec.pinned),
    )


def _delivery(value: Json) -> Delivery:
    delivery = Delivery(*value)
    return delivery._replace(files=tuple((stored, name) for stored, name in delivery.files))
