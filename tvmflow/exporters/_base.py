"""What an exporter is: object code and what is known of it, in a form that its users load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tvmflow.stores.local import hash_file
from tvmflow.targets.platforms import Platform, platform_of


class Asked(NamedTuple):
    """What a recipe asks for, for one target: all that the names of the files depend on.

    `kind` and `triple` are those of TVM's target; `mixed` says whether weights become float16.
    Of a model in parts, `parts` has the same for each, in order, with the part's name as `name`,
    and `triple` is empty where they are for several systems.
    """

    name: str
    version: str
    target: str
    kind: str
    triple: str
    mixed: bool = False
    parts: tuple[Asked, ...] = ()

    @property
    def platform(self) -> Platform:
        """The system that the files are for."""
        return platform_of(self.triple)


class Built(NamedTuple):
    """A linked library, what it was linked from, and its description.

    `forms` has the files of what `build` compiled besides (form -> file's name -> path).
    `manifest` is what a loader checks before it loads: target, CPU features, TVM's version,
    digests, and how the library is verified. `bundle` is what `tvmflow.load` opens. `others` are
    the files that the exporters before this one wrote, by their names in `dist`.
    """

    asked: Asked
    library: Path
    objects: tuple[Path, ...]
    forms: Mapping[str, Mapping[str, Path]]
    signature: Mapping[str, Any]
    manifest: Mapping[str, Any]
    bundle: Path
    others: Mapping[str, Path]

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.asked.name

    def of(self, library: Path, objects: Sequence[Path], **facts: Any) -> Built:
        """The same for another library and its objects, with their digests and further facts in the manifest."""
        digests = {f"library{self.asked.platform.shared_suffix}": hash_file(str(library))}
        digests.update({path.name: hash_file(str(path)) for path in objects})
        manifest = {**self.manifest, **facts, "sha256": digests}
        return self._replace(library=library, objects=tuple(objects), manifest=manifest)


class Joined(NamedTuple):
    """The same of a model in parts, of which there are several libraries and one bundle."""

    asked: Asked
    signature: Mapping[str, Any]
    manifest: Mapping[str, Any]
    bundle: Path
    others: Mapping[str, Path]

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.asked.name


class Exporter(Protocol):
    """One module in this folder."""

    @property
    def FORM(self) -> str:
        """What `build` compiles for it besides the usual (see `stages/_forms.py`); empty: nothing."""

    @property
    def SOURCES(self) -> tuple[Path, ...]:
        """Files of this package that it copies: their content is in the key."""

    def why_not(self, asked: Asked) -> str:
        """Why it cannot be made for this target, or empty. Pure: asked when planning."""
        ...

    def files(self, asked: Asked) -> tuple[str, ...]:
        """The names in `dist` of all that `export` writes. Pure: asked when planning."""
        ...

    def export(self, built: Built, folder: Path) -> None:
        """Write them into `folder`: the same bytes for the same input, anywhere."""
        ...


class JoinedExporter(Exporter, Protocol):
    """One whose form also holds the parts of a model together."""

    def export(self, built: Built | Joined, folder: Path) -> None: ...


def json_bytes(value: Any) -> bytes:
    """A JSON document for people and programs, the same for equal values."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def cpu_only(asked: Asked) -> str:
    """`why_not` of a form that consists of code for a CPU, that of all parts for one process."""
    for part in asked.parts:
        if part.kind != "llvm":
            return f"the kind of its part '{part.name}' is {part.kind}, not llvm"
    if asked.parts and not asked.triple:
        systems = ", ".join(f"'{part.name}' is for {part.triple}" for part in asked.parts)
        return f"its parts would have to run in one process: {systems}"
    return "" if asked.kind == "llvm" else f"its kind is {asked.kind}, not llvm"


def any_target(asked: Asked) -> str:
    """`why_not` of a form that there is for every target."""
    return ""


def identifier(name: str) -> str:
    """A recipe's name as C and Python take it.

    >>> identifier("res-net.2"), identifier("3d")
    ('res_net_2', 'm3d')
    """
    plain = "".join(sign if sign.isalnum() else "_" for sign in name)
    return f"m{plain}" if plain[0].isdigit() else plain
