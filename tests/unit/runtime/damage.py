"""Damaged and hostile bundles: seeded changes of a good one, each with a name."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

Entries = dict[str, bytes]


class Damage(NamedTuple):
    """A change of a bundle: its name, for the test's id, and the changed file."""

    name: str
    content: bytes


def read_entries(bundle: bytes) -> Entries:
    """Return the files in a bundle."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_entries(
    entries: Entries, change: Callable[[zipfile.ZipInfo], None] | None = None
) -> bytes:
    """Return a bundle of files; `change` edits the headers of all but the manifest."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in entries.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o644 << 16
            if change and name != "manifest.json":
                change(entry)
            archive.writestr(entry, content)
    return stream.getvalue()


def described(entries: Entries) -> Entries:
    """Return the files with a manifest that has their sizes and digests: as somebody would who means harm."""
    manifest = json.loads(entries["manifest.json"])
    manifest["files"] = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in entries.items()
        if name != "manifest.json"
    }
    return {**entries, "manifest.json": json.dumps(manifest).encode()}


# ---------------------------------------------------------------- bytes


def _flip(bundle: bytes, rng: random.Random) -> bytes:
    where = rng.randrange(len(bundle))
    return bundle[:where] + bytes([bundle[where] ^ (1 << rng.randrange(8))]) + bundle[where + 1 :]


def _flip_near_the_end(bundle: bytes, rng: random.Random) -> bytes:
    start = len(bundle) - 300
    return bundle[:start] + _flip(bundle[start:], rng)


def _cut(bundle: bytes, rng: random.Random) -> bytes:
    return bundle[: rng.randrange(len(bundle))]


def _cut_the_beginning(bundle: bytes, rng: random.Random) -> bytes:
    return bundle[rng.randrange(1, len(bundle)) :]


def _remove(bundle: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(bundle))
    return bundle[:start] + bundle[start + rng.randrange(1, 4096) :]


def _insert(bundle: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(bundle))
    return bundle[:start] + rng.randbytes(rng.randrange(1, 200)) + bundle[start:]


def _overwrite(bundle: bytes, rng: random.Random) -> bytes:
    start, count = rng.randrange(len(bundle)), rng.randrange(1, 4096)
    return (bundle[:start] + bytes(count) + bundle[start + count :])[: len(bundle)]


def _repeat(bundle: bytes, _: random.Random) -> bytes:
    return bundle + bundle


# ---------------------------------------------------------------- files in the bundle

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1 << 70, 1e308, "", "x", "\0", "../x", "/x", "𝄞" * 100),
    *(
        [],
        {},
        [[]],
        [{}],
        {"": None},
        ["x"] * 3,
        [{"name": "x", "shape": [1 << 40], "dtype": "int8"}],
    ),
    *([{"name": "x", "shape": [-1], "dtype": "object"}], {"tvm": "x"}, {"tvm": {"host": "x"}}),
)


def _edit_json(entries: Entries, name: str, rng: random.Random) -> Entries:
    """Return the files with one value of a document, however deep, changed or gone."""
    document = json.loads(entries[name])
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(document)
    holder, key = rng.choice(places)
    if rng.random() < 0.25:
        del holder[key]
    else:
        holder[key] = rng.choice(_VALUES)
    return {**entries, name: json.dumps(document).encode()}


def _edit_manifest(bundle: bytes, rng: random.Random) -> bytes:
    return write_entries(_edit_json(read_entries(bundle), "manifest.json", rng))


def _edit_signature(bundle: bytes, rng: random.Random) -> bytes:
    return write_entries(_edit_json(read_entries(bundle), "signature.json", rng))


def _edit_signature_and_describe_it(bundle: bytes, rng: random.Random) -> bytes:
    return write_entries(described(_edit_json(read_entries(bundle), "signature.json", rng)))


def _replace_a_document(bundle: bytes, rng: random.Random) -> bytes:
    texts = (b"", b"[]", b"null", b"\xff", b"[" * 200_000, b'{"a": NaN}', b'{"a": 1, "a": 2}', b"{")
    name = rng.choice(("manifest.json", "signature.json"))
    return write_entries({**read_entries(bundle), name: rng.choice(texts)})


def _damage_a_file(bundle: bytes, rng: random.Random) -> bytes:
    entries = read_entries(bundle)
    name = rng.choice([name for name in entries if name != "manifest.json"])
    change = rng.choice((_flip, _cut, _remove, _insert))
    return write_entries({**entries, name: change(entries[name], rng)})


def _make_the_library_nonsense(bundle: bytes, rng: random.Random) -> bytes:
    """Everything is as described, but no loader takes it."""
    entries = read_entries(bundle)
    name = list(entries)[-1]
    return write_entries(described({**entries, name: rng.randbytes(rng.randrange(500))}))


def _leave_out_a_file(bundle: bytes, rng: random.Random) -> bytes:
    entries = read_entries(bundle)
    del entries[rng.choice(list(entries))]
    return write_entries(entries)


def _add_a_file(bundle: bytes, rng: random.Random) -> bytes:
    names = ("more.py", "../evil", "/evil", "a\\..\\evil", "C:evil", "a/../../evil", "folder/", "")
    entries = {**read_entries(bundle), rng.choice(names): b"x"}
    return write_entries(described(entries) if rng.random() < 0.5 else entries)


def _name_another_library(bundle: bytes, rng: random.Random) -> bytes:
    entries = read_entries(bundle)
    name = rng.choice(("library.tar", "library.o", "../library.so", "/bin/sh", "manifest.json"))
    manifest = {**json.loads(entries["manifest.json"]), "library": name}
    entries["manifest.json"] = json.dumps(manifest).encode()
    return write_entries(described({**entries, name: entries.get(name, b"x")}))


def _repeat_a_file(bundle: bytes, rng: random.Random) -> bytes:
    """Two entries have one name: readers differ in which of them they take."""
    entries = read_entries(bundle)
    name = rng.choice(list(entries))
    twin = f"{name[:-1]}~"
    content = write_entries({**entries, twin: rng.randbytes(10)})
    return content.replace(twin.encode(), name.encode())


def _compress(bundle: bytes, _: random.Random) -> bytes:
    def change(entry: zipfile.ZipInfo) -> None:
        entry.compress_type = zipfile.ZIP_DEFLATED

    return write_entries(read_entries(bundle), change)


def _link(bundle: bytes, _: random.Random) -> bytes:
    def change(entry: zipfile.ZipInfo) -> None:
        entry.external_attr = 0o120777 << 16

    return write_entries(read_entries(bundle), change)


def _encrypt(bundle: bytes, rng: random.Random) -> bytes:
    """Entries say that they are encrypted."""
    content = bytearray(write_entries(read_entries(bundle)))
    position = content.find(b"PK\1\2")
    while position >= 0:
        content[position + 8] |= 1
        position = content.find(b"PK\1\2", position + 1)
    return bytes(content)


_CHANGES: Final = (
    *(_flip, _flip_near_the_end, _cut, _cut_the_beginning, _remove, _insert, _overwrite, _repeat),
    *(_edit_manifest, _edit_signature, _edit_signature_and_describe_it, _replace_a_document),
    *(_damage_a_file, _make_the_library_nonsense, _leave_out_a_file, _add_a_file),
    *(_name_another_library, _repeat_a_file, _compress, _link, _encrypt),
)


def damages(bundle: bytes, count: int, seed: int) -> Iterator[Damage]:
    """Yield changed copies of a bundle, kind after kind."""
    for number in range(count):
        change = _CHANGES[number % len(_CHANGES)]
        rng = random.Random(f"{seed} {number}")
        yield Damage(f"{number}: {change.__name__.strip('_')}", change(bundle, rng))


def rewritten(bundle: Path, target: Path, /, **changes: Any) -> Path:
    """The bundle with other manifest fields."""
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "manifest.json":
                content = json.dumps({**json.loads(content), **changes}).encode()
            new.writestr(name, content)
    return target
