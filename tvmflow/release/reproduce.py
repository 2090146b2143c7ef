"""The reproducibility check: build the content of a lock file twice more, and compare.

Both builds start from an empty store, in folders of different depth, with different hash seeds, time zones, locales,
thread counts and numbers of jobs. They share only downloads, which are identified by digests. Schedules come from the
lock file, because a search is not deterministic.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import EXIT_OK, StageError
from tvmflow.core.formatting import excerpt
from tvmflow.core.processes import module_command
from tvmflow.core.types import Json, Plan, StageSpec
from tvmflow.planning.decisions import PlanState, evaluate_plan
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import copy_snapshots

# ---------------------------------------------------------------- binary diff

_AR_MAGIC: Final = b"!<arch>\n"
_AR_HEADER: Final = 60
_MAX_DEPTH: Final = 5
_SHOWN_CHARACTERS: Final = 60

# The path to a difference, outermost first: archive members, section, symbol, offset.
_Location = tuple[str, ...]
_Finder = Callable[[bytes, bytes, int], _Location | None]


class _Member(NamedTuple):
    name: str
    header: str
    content: bytes


def find_difference(first: bytes, second: bytes, depth: int = 0) -> _Location | None:
    """Return where two contents first differ, or None if they are equal.

    Archives (zip, tar, ar) are compared by member, ELF files by section and symbol, JSON by path, safetensors by
    tensor, text by line, and other content by byte. `depth` is the number of enclosing archives.
    """
    if first == second:
        return None
    for name, (is_format, find) in _FORMATS.items():
        if depth < _MAX_DEPTH and is_format(first) and is_format(second):
            try:
                location = find(first, second, depth)
            except Exception as error:
                # Content that is damaged or in a different format is tried as the next format.
                _log.debug("not compared as %s: %s", name, error)
                continue
            if location is not None:
                return location
    return (_describe_offset(first, second),)


def _describe_offset(first: bytes, second: bytes) -> str:
    sizes = f" ({len(first):,} and {len(second):,} bytes)" if len(first) != len(second) else ""
    offset = _find_offset(first, second)
    if offset == min(len(first), len(second)):
        return f"one ends after {offset:,} bytes{sizes}"
    return f"byte {offset:,}: {first[offset]:#04x} and {second[offset]:#04x}{sizes}"


def _find_offset(first: bytes, second: bytes) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


# ---------------------------------------------------------------- archives


def _archive_difference(
    read: Callable[[bytes], Iterable[_Member]], first: bytes, second: bytes, depth: int
) -> _Location | None:
    members, others = list(read(first)), list(read(second))
    names, other_names = [member.name for member in members], [other.name for other in others]
    if names != other_names:
        unique = [name for name in names + other_names if (name in names) != (name in other_names)]
        return (f"only one has {unique[0]}" if unique else "the order of the members",)
    for member, other in zip(members, others, strict=True):
        if (inner := find_difference(member.content, other.content, depth + 1)) is not None:
            return (member.name, *inner)
        if member.header != other.header:
            return (member.name, f"{member.header} and {other.header}")
    return None


def _read_zip(content: bytes) -> Iterator[_Member]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            header = f"time {info.date_time}, mode {info.external_attr >> 16:o}"
            yield _Member(info.filename, header, archive.read(info))


def _read_tar(content: bytes) -> Iterator[_Member]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for info in archive.getmembers():
            header = f"time {info.mtime}, mode {info.mode:o}, owner {info.uid}:{info.gid}"
            stream = archive.extractfile(info)
            yield _Member(info.name, header, stream.read() if stream else b"")


def _read_ar(content: bytes) -> Iterator[_Member]:
    offset = len(_AR_MAGIC)
    while offset + _AR_HEADER <= len(content):
        header = content[offset : offset + _AR_HEADER].decode("latin-1")
        size = int(header[48:58])
        body = content[offset + _AR_HEADER : offset + _AR_HEADER + size]
        yield _Member(header[:16].strip(), f"header {header[16:48].split()}", body)
        # Members begin at even offsets.
        offset += _AR_HEADER + size + size % 2


# ---------------------------------------------------------------- ELF


class _Section(NamedTuple):
    name: str
    number: int
    data: bytes


def _elf_difference(first: bytes, second: bytes, depth: int) -> _Location | None:
    """Return section, symbol and offset of the first difference, or None."""
    sections, others = _read_sections(first), _read_sections(second)
    # Code and data are compared before tables that depend on them.
    is_table = {name: not name.startswith((".text", ".rodata", ".data")) for name in sections}
    for name in sorted(sections, key=lambda name: (is_table[name], name)):
        if name not in others:
            return (f"only one has the section {name}",)
        section, other = sections[name], others[name]
        if section.data != other.data:
            symbol = _find_symbol(first, section, other)
            steps = (f"symbol {symbol}",) if symbol else ()
            return (f"section {name}", *steps, _describe_offset(section.data, other.data))
    added = [name for name in others if name not in sections]
    return (f"only one has the section {added[0]}",) if added else None


def _read_sections(content: bytes) -> dict[str, _Section]:
    from elftools.elf.elffile import ELFFile

    sections: dict[str, _Section] = {}
    for index, section in enumerate(ELFFile(io.BytesIO(content)).iter_sections()):
        name = section.name if section.name not in sections else f"{section.name}#{index}"
        data = b"" if section["sh_type"] == "SHT_NOBITS" else section.data()
        sections[name] = _Section(name, index, data)
    return sections


def _find_symbol(content: bytes, section: _Section, other: _Section) -> str:
    """Return the symbol of `content` in which two sections first differ, or an empty string."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    offset = _find_offset(section.data, other.data)
    file = ELFFile(io.BytesIO(content))
    base = file.get_section(section.number)["sh_addr"]
    best = (-1, "")
    for table in file.iter_sections():
        for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
            start = symbol["st_value"] - base
            in_section = symbol["st_shndx"] == section.number and symbol.name
            if in_section and best[0] <= start <= offset:
                best = (start, symbol.name)
    return best[1]


# ---------------------------------------------------------------- JSON, tensors and text


def _json_difference(first: bytes, second: bytes, depth: int) -> _Location | None:
    location = _compare_json(json.loads(first), json.loads(second), "$")
    return (location,) if location else None


def _compare_json(first: object, second: object, path: str) -> str:
    if isinstance(first, dict) and isinstance(second, dict):
        for name in first:
            if name not in second:
                return f"only one has {path}.{name}"
            if location := _compare_json(first[name], second[name], f"{path}.{name}"):
                return location
        added = [name for name in second if name not in first]
        return f"only one has {path}.{added[0]}" if added else ""
    if isinstance(first, list) and isinstance(second, list):
        for index, (a, b) in enumerate(zip(first, second, strict=False)):
            if location := _compare_json(a, b, f"{path}[{index}]"):
                return location
        same_length = len(first) == len(second)
        return "" if same_length else f"{path} has {len(first)} and {len(second)} entries"
    return "" if first == second else f"{path}: {_shorten(first)} and {_shorten(second)}"


def _shorten(value: object) -> str:
    return excerpt(json.dumps(value), _SHOWN_CHARACTERS)


def _tensor_difference(first: bytes, second: bytes, depth: int) -> _Location | None:
    (header, values), (other_header, other_values) = map(_split_tensors, (first, second))
    for name, fields in header.items():
        if name not in other_header:
            return (f"only one has the tensor {name}",)
        if fields != other_header[name]:
            return (f"tensor {name}", f"{_shorten(fields)} and {_shorten(other_header[name])}")
        if name != "__metadata__":
            own = slice(*fields["data_offsets"])
            if values[own] != other_values[own]:
                return (f"tensor {name}", _describe_offset(values[own], other_values[own]))
    return None


def _split_tensors(content: bytes) -> tuple[dict[str, Json], bytes]:
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def _text_difference(first: bytes, second: bytes, depth: int) -> _Location | None:
    lines, others = (content.decode().split("\n") for content in (first, second))
    pairs = enumerate(zip(lines, others, strict=False), 1)
    number = next((n for n, (a, b) in pairs if a != b), min(len(lines), len(others)) + 1)
    return (f"line {number}",)


def _is_safetensors(content: bytes) -> bool:
    length = int.from_bytes(content[:8], "little")
    return 2 <= length <= len(content) - 8 and content[8:9] == b"{"


def _is_tar(content: bytes) -> bool:
    return content.startswith(b"\x1f\x8b") or content[257:262] == b"ustar"


_FORMATS: Final[Mapping[str, tuple[Callable[[bytes], bool], _Finder]]] = {
    "ELF": (lambda data: data.startswith(b"\x7fELF"), _elf_difference),
    "zip": (lambda data: data.startswith(b"PK\x03\x04"), partial(_archive_difference, _read_zip)),
    "ar": (lambda data: data.startswith(_AR_MAGIC), partial(_archive_difference, _read_ar)),
    "tar": (_is_tar, partial(_archive_difference, _read_tar)),
    "JSON": (lambda data: data[:1] in (b"{", b"["), _json_difference),
    "safetensors": (_is_safetensors, _tensor_difference),
    "text": (lambda data: b"\0" not in data[:4096], _text_difference),
}

_log = logging.getLogger(__name__)


class BuildEnvironment(NamedTuple):
    """Conditions of a build that must not affect its results."""

    folder: str
    jobs: int
    variables: dict[str, str]


# Before 3.12, Python does not start in the C locale if a .pth file contains a non-ASCII folder.
_PLAIN_LOCALE: Final = "C" if f"{sys.prefix}{__file__}".isascii() else "C.UTF-8"
ENVIRONMENTS: Final = tuple(
    BuildEnvironment(
        folder,
        threads,
        {
            "PYTHONHASHSEED": seed,
            "TZ": zone,
            "LC_ALL": locale,
            "OMP_NUM_THREADS": str(threads),
        },
    )
    for folder, threads, seed, zone, locale in (
        ("one", 1, "1", "Pacific/Kiritimati", _PLAIN_LOCALE),
        ("two/in a deeper folder/with a longer name", 2, "4242", "America/Caracas", "C.UTF-8"),
    )
)

_NOT_FAILED: Final = ("ran", "hit", "skipped")


class FirstDifference(NamedTuple):
    """The first difference of a build: stage, file, position in the file, and the build's name."""

    stage_id: str
    file: str
    where: str
    build: str


class ReproducibilityReport(NamedTuple):
    """The result of the check; `difference` is None if both builds reproduced all locked files."""

    seconds: tuple[float, ...]
    stages: int
    files: int
    difference: FirstDifference | None


def build_again(
    arguments: Sequence[str],
    lock: Path,
    plan: Plan,
    store: LocalStore,
    folder: Path,
    on_build: Callable[[int], None],
) -> ReproducibilityReport:
    """Build a plan that is up to date in `store` in each of `ENVIRONMENTS`, and compare files.

    `on_build` gets the number of each build before it starts. Raises StageError if a build fails for another reason
    than a different file.
    """
    plan_state = evaluate_plan(plan, store)
    compared = [spec for spec in plan.stages if spec.traits.is_locked and not spec.traits.searches]
    specs = {spec.id: spec for spec in compared}
    seconds: list[float] = []
    for number, environment in enumerate(ENVIRONMENTS, 1):
        on_build(number)
        name = f"build {number} of {len(ENVIRONMENTS)}"
        built_store = LocalStore(str(folder / environment.folder / "cache"))
        duration, failures = _run_build(arguments, lock, store, built_store, folder, environment)
        seconds.append(duration)
        for failed in failures:
            spec = specs.get(failed["stage_id"])
            difference = spec and _find_difference(spec, plan_state, store, built_store, name)
            if difference is None:
                raise StageError(
                    f"{name} failed: {failed['stage_id']}: {failed['message']}", fix=failed["fix"]
                )
            return ReproducibilityReport(tuple(seconds), len(compared), 0, difference)
    files = sum(len(plan_state.artifacts[spec.id].files) for spec in compared)
    return ReproducibilityReport(tuple(seconds), len(compared), files, None)


def _run_build(
    arguments: Sequence[str],
    lock: Path,
    store: LocalStore,
    built_store: LocalStore,
    folder: Path,
    environment: BuildEnvironment,
) -> tuple[float, list[Json]]:
    work = folder / environment.folder
    work.mkdir(parents=True)
    built_store.create()
    if Path(store.downloads).is_dir():
        downloads = Path(store.downloads).absolute()
        Path(built_store.downloads).symlink_to(downloads, target_is_directory=True)
    copy_snapshots(store, built_store)
    command = module_command("tvmflow", "run", *arguments)
    command += ["--locked", "--lock", str(lock), "--json", "--jobs", str(environment.jobs)]
    command += ["--store", built_store.root, "--dist", str(work / "dist")]
    inherited = {k: value for k, value in os.environ.items() if not k.startswith("TVMFLOW_")}
    _log.debug("building in %s: %s", work, command)
    variables = {**inherited, **environment.variables}
    process = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return _read_build(work.name, process)


def _read_build(name: str, process: subprocess.CompletedProcess[str]) -> tuple[float, list[Json]]:
    """Return seconds and failed stages from the last event of a build."""
    last_line = process.stdout.strip().rpartition("\n")[2]
    event: Json = json.loads(last_line) if last_line.startswith("{") else {}
    errors = process.stderr.strip()
    if event.get("event") != "run_finished":
        raise StageError(
            f"{name}: the build ended with exit code {process.returncode} and without a report: "
            f"{errors or 'no message'}"
        )
    if process.returncode != EXIT_OK and not any(stage["message"] for stage in event["stages"]):
        raise StageError(f"{name}: the build ended with exit code {process.returncode}: {errors}")
    failures = [stage for stage in event["stages"] if stage["outcome"] not in _NOT_FAILED]
    return float(event["seconds"]), failures


def _find_difference(
    spec: StageSpec, plan_state: PlanState, store: LocalStore, built_store: LocalStore, build: str
) -> FirstDifference | None:
    """Return where the new result of a stage differs, or None if it is missing or equal."""
    reference = plan_state.artifacts[spec.id]
    built = built_store.find(reference.key)
    if built is None:
        return None
    digests = built.digests(())
    for file in reference.files:
        if file.name not in digests:
            return FirstDifference(spec.id, file.name, "the build has no such file", build)
        if digests[file.name] != file.digest:
            difference = find_difference(
                Path(store.blobs.verified_path(file.digest)).read_bytes(),
                Path(built_store.blobs.verified_path(digests[file.name])).read_bytes(),
            )
            return FirstDifference(spec.id, file.name, ", ".join(difference or ()), build)
    return None
