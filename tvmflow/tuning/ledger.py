"""The trial ledger: all trials ever measured, in one folder for each target.

A target's folder is named by the digest of its description, so that trials that must not be
compared never meet. It holds an append-only file for each workload (see `workload_ledger`) and
small notes about it: a description for people, and the saved kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeGuard

from pydantic import StrictStr, TypeAdapter

from tvmflow.core import documents, packages
from tvmflow.core.canonical_json import canonical, digest_of, document
from tvmflow.core.files import temporary_name, write_atomically
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Json
from tvmflow.targets.host import read_host
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning.trials import RECORD_VERSION
from tvmflow.tuning.workload_ledger import WorkloadLedger, unwritable

_log = logging.getLogger(__name__)


class TargetDescription(NamedTuple):
    """The facts that all trials of one folder share: the content of its `about.json`.

    Attributes:
        target: TVM's target as JSON; the order of CPU features (`mattr`) has no meaning.
        tvm: The identity of the TVM build.
        device: The class of the device: `kind` and `class`.
    """

    target: Mapping[StrictStr, Json]
    tvm: StrictStr
    device: Mapping[StrictStr, StrictStr]

    @property
    def key(self) -> str:
        """The name of the folder."""
        return digest_of(self.to_json())[:32]

    @property
    def threads(self) -> int | None:
        """The number of threads that kernels were measured with; None for those of a GPU."""
        return split_threads(self.target)[1]

    def is_near(self, other: TargetDescription) -> bool:
        """Return whether the code is the same, and was measured with other threads or on another device."""
        codes = [
            (split_threads(entry.to_json()["target"])[0], entry.tvm) for entry in (self, other)
        ]
        return (
            codes[0] == codes[1]
            and self.key != other.key
            and None not in (self.threads, other.threads)
        )

    @property
    def machine_class(self) -> MachineClass:
        """The TVM build and the device that the trials are from."""
        return MachineClass(self.tvm, self.device)

    @property
    def text(self) -> str:
        """The target for people: kind, CPU, features, threads, TVM build, class of device."""
        target = self.target
        chip = target.get("mcpu") or target.get("mtriple") or target.get("arch") or ""
        fields = [" ".join(str(field) for field in (target.get("kind", ""), chip) if field)]
        fields += [str(feature) for feature in target.get("mattr", ())]
        fields += [count_text(threads, "thread")] if (threads := self.threads) else []
        fields.append(f"TVM {self.tvm}")
        fields.append(str(self.device.get("class") or self.device.get("kind", "")))
        return ", ".join(fields)

    def to_json(self) -> Json:
        """Return the content of `about.json`."""
        features = sorted(self.target.get("mattr", ()))
        return {
            "version": RECORD_VERSION,
            "target": {**self.target, **({"mattr": features} if features else {})},
            "tvm": self.tvm,
            "device": dict(self.device),
        }

    @classmethod
    def from_json(cls, value: Json) -> TargetDescription:
        """Return the description in an `about.json`.

        Raises:
            ValueError: It lacks a field, or one has another type.
        """
        try:
            fields = {name: value[name] for name in cls._fields}
            description = _DESCRIPTION.validate_python(fields)
            if not (description.key and description.text):
                raise ValueError("an empty description")
            return description
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError("it lacks the target, the TVM build or the device") from error


_DESCRIPTION: Final = TypeAdapter(TargetDescription)


def target_key(target: Mapping[str, Json], tvm: str, device: Mapping[str, str]) -> str:
    """Return the name of the folder for trials that may be compared with each other."""
    return TargetDescription(target, tvm, device).key


class WorkloadDescription(NamedTuple):
    """A workload for people, and for the search for related ones. Unknown fields are empty.

    Attributes:
        name: The name of the kernel in the model that was tuned first.
        flops: Arithmetic operations of one call; None when not known.
        buffers: Its parameters, such as `float32[1×3×8×8]`.
        family: The digest that it shares with the same operator in other shapes.
    """

    name: str = ""
    flops: float | None = None
    buffers: tuple[str, ...] = ()
    family: str = ""

    @property
    def text(self) -> str:
        """Name and buffers; empty when nothing is known."""
        return " ".join(field for field in (self.name, ", ".join(self.buffers)) if field)

    def to_json(self) -> Json:
        """Return the known fields; an empty object when nothing is known."""
        fields = {**self._asdict(), "buffers": list(self.buffers)}
        known = {name: value for name, value in fields.items() if value not in ("", None, [])}
        return {"name": self.name, **known} if known else {}

    @classmethod
    def from_json(cls, value: Json) -> WorkloadDescription:
        """Return the fields of an object that have the right type; the others count as unknown."""
        if not isinstance(value, dict):
            return cls()
        name, flops, buffers, family = (value.get(field) for field in cls._fields)
        is_number = isinstance(flops, int | float) and 0 <= flops < float("inf")
        return cls(
            name if isinstance(name, str) else "",
            flops if is_number else None,
            tuple(buffers) if _is_text_list(buffers) else (),
            family if isinstance(family, str) else "",
        )


class Ledger:
    """The trials on one target: a folder with one file for each workload.

    Attributes:
        repairs: A sentence for each damage that was found when the folder was opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repairs: list[str] = []

    @classmethod
    def open(
        cls, root: Path, target: Mapping[str, Json], tvm: str, device: Mapping[str, str]
    ) -> Ledger:
        """Return the ledger under `root` for a target, a TVM build and a class of devices.

        Raises:
            StoreError: The folder cannot be written.
        """
        description = TargetDescription(target, tvm, device)
        folder = root / description.key
        try:
            folder.mkdir(parents=True, exist_ok=True)
            repairs = _put_description_right(folder, description)
        except OSError as error:
            raise unwritable(folder, error) from error
        ledger = cls(folder)
        ledger.repairs += repairs
        return ledger

    def workload(self, key: str) -> WorkloadLedger:
        """Return the trials of one workload, repaired where the file was damaged."""
        return WorkloadLedger(self.folder / f"{key}.jsonl")

    def description(self, key: str) -> WorkloadDescription:
        """Return what is known of a workload."""
        return WorkloadDescription.from_json(_read_json(self._note_path(key, "about")))

    def describe(self, key: str, description: WorkloadDescription, mod: str = "") -> None:
        """Record what a workload is and, where it is known, its saved module.

        The first description stays, unless it came without the module or with another one.

        Raises:
            StoreError: The notes cannot be written.
        """
        is_described = self.description(key) != WorkloadDescription()
        if is_described and (not mod or self.kernel(key) == mod):
            return
        self._write_notes(key, description, mod)

    def adopt_description(self, key: str, description: WorkloadDescription, mod: str) -> None:
        """Take over what another ledger says of a workload, if this one has nothing better.

        Of two descriptions the same one stays in whatever order they come. Whoever uses the
        module makes sure before that it is the workload's.

        Args:
            key: The workload.
            description: What the other ledger says.
            mod: The saved module that came with it; empty when it came without.

        Raises:
            StoreError: The notes cannot be written.
        """
        known = self.description(key)
        if self.kernel(key):
            # Only its name, for people, may differ; what a stranger says otherwise is not believed.
            if mod and description._replace(name=known.name) == known != description:
                self._write_notes(key, min(description, known), "")
            return
        description = description if mod else description._replace(family="")
        is_known = known != WorkloadDescription()
        if mod or not is_known or canonical(description.to_json()) < canonical(known.to_json()):
            self._write_notes(key, description, mod)

    def forget_kernel(self, key: str) -> None:
        """Remove the saved module of a workload, which is that of another one.

        Raises:
            StoreError: The notes cannot be written.
        """
        self._note_path(key, "kernel").unlink(missing_ok=True)
        self._write_notes(key, self.description(key)._replace(family=""), "")

    def _write_notes(self, key: str, description: WorkloadDescription, mod: str) -> None:
        if mod:
            _write(self._note_path(key, "kernel"), mod)
        _write(self._note_path(key, "about"), document(description.to_json()))

    def kernel(self, key: str) -> str:
        """Return the saved module of a workload; an empty string when the ledger lacks it."""
        try:
            return documents.read_file(self._note_path(key, "kernel")).decode()
        except (documents.Unreadable, UnicodeDecodeError):
            return ""

    def related_workloads(self, key: str) -> list[str]:
        """Return the other workloads of the same family, those with the nearest `flops` first."""
        own = self.description(key)
        related = []
        for path in self.folder.glob("*.about.json") if own.family else ():
            other = path.name.removesuffix(".about.json")
            description = self.description(other)
            if other != key and description.family == own.family:
                ratio = max(description.flops or 0.0, 1.0) / max(own.flops or 0.0, 1.0)
                related.append((max(ratio, 1 / ratio), other))
        _log.debug("workload %s has %d related ones", key[:12], len(related))
        return [other for _, other in sorted(related)]

    def _note_path(self, key: str, note: Literal["about", "kernel"]) -> Path:
        return self.folder / f"{key}.{note}.json"


def _put_description_right(folder: Path, description: TargetDescription) -> list[str]:
    """Write the description of a folder, whose name is its digest; return what was wrong.

    A folder that was copied from another target is moved out of the way: its trials are not
    comparable with those of this one.
    """
    path, repairs = folder / "about.json", []
    actual = _read_json(path)
    if actual == description.to_json():
        return []
    try:
        other = TargetDescription.from_json(actual)
    except ValueError:
        repairs = [f"{path}: it was damaged, and was written again"] if path.exists() else []
    else:
        aside = folder.with_name(f"{folder.name}.set-aside-{temporary_name()}")
        folder.rename(aside)
        folder.mkdir()
        repairs = [
            f"{path}: it describes another target ({other.text}); the folder was moved to {aside}"
        ]
    write_atomically(path, document(description.to_json()))
    return repairs


def _is_text_list(value: Json) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _read_json(path: Path) -> Json:
    """Return the content of a note; an empty object when it is missing or damaged."""
    try:
        return documents.read_json(documents.read_file(path))
    except documents.Unreadable:
        return {}


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


class MachineClass(NamedTuple):
    """A TVM build and a class of devices: `kind` (`cpu`, `cuda`, `rpc`) and `class` (its model)."""

    tvm: str
    device: Mapping[str, str]


def this_machine_class() -> MachineClass:
    """Return the class of the trials that this machine's CPU makes with the installed TVM."""
    return MachineClass(
        packages.identity("apache-tvm"), {"kind": "cpu", "class": read_host().model}
    )
