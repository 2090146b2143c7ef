"""The content of bundles, alone and in archives, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.provenance import BUNDLE, LIBRARY, bundle_with, describe
from tvmflow.core.documents import Unreadable
from tvmflow.exporters.archives import write_tar_gz, write_zip
from tvmflow.provenance.check import describe_kind, find_bundle, list_model_files
from tvmflow.runtime.bundles import PARTITIONED_FORMAT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.tvmflow"


def test_the_documents_of_a_bundle_are_read(path: Path) -> None:
    path.write_bytes(BUNDLE)
    packed = find_bundle(path)
    assert packed is not None
    bundle = packed.bundle
    assert (bundle.manifest["name"], bundle.problems) == ("net", ())
    assert bundle.signature["inputs"][0]["name"] == "x"
    assert [name for name, _ in list_model_files(bundle)] == ["model.json", "params.safetensors"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"library__so": b"another"},
            "its 'library.so' is not the one that its manifest describes",
        ),
        ({"library__so": None}, "it has no 'library.so', which its manifest names"),
        ({"more__py": b"x"}, "its manifest does not name its 'more.py'"),
    ],
)
def test_files_that_differ_from_the_manifest_are_reported(
    path: Path, changes: Mapping[str, bytes | None], message: str
) -> None:
    packed = find_bundle(bundle_with(path, **changes))
    assert packed is not None and packed.bundle.problems == (message,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"manifest__json": None}, "it has no manifest.json"),
        ({"manifest__json": b"[]"}, "its manifest.json is not an object"),
        ({"manifest__json": b"[" * 100_000}, "its manifest.json: it nests too deeply"),
        ({"manifest__json": b'{"bundle": 99}'}, "it has bundle format 99"),
        ({"manifest__json": b'{"bundle": 4, "parts": [{"file": "x"}]}'}, "it has no part 'x'"),
        ({"signature__json": b"nonsense"}, "its signature.json: it is not JSON"),
        ({"../evil": b"x"}, "an entry that points outside of it: '../evil'"),
        ({"/evil": b"x"}, "an entry that points outside of it"),
        ({"a\\..\\evil": b"x"}, "an entry that points outside of it"),
    ],
)
def test_an_invalid_bundle_is_reported(
    path: Path, changes: Mapping[str, bytes | None], message: str
) -> None:
    with pytest.raises(Unreadable) as raised:
        find_bundle(bundle_with(path, **changes))
    assert message in str(raised.value)


def test_a_zip_bomb_is_not_unpacked(path: Path) -> None:
    """The entries of bundles are not compressed, so they cannot be larger than the file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (100 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(Unreadable, match=r"'manifest\.json' is compressed"):
        find_bundle(path)


def test_overlapping_entries_are_not_read(path: Path) -> None:
    """Many names for one entry would multiply the bytes to read."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", b" " * 1000)
        first = archive.infolist()[0]
        for number in range(20):
            again = copy.copy(first)
            again.filename = f"{number}"
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
    with pytest.raises(Unreadable, match="its entries are larger than"):
        find_bundle(path)


def test_two_entries_with_one_name_are_refused(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("manifest.json", b"{}")
        archive.writestr("manifest.json", b"{}")
    with pytest.raises(Unreadable, match=r"two entries 'manifest\.json'"):
        find_bundle(path)


@pytest.mark.parametrize("where", range(0, len(BUNDLE), 23))
def test_a_flipped_bit_raises_nothing_but_unreadable(path: Path, where: int) -> None:
    content = bytearray(BUNDLE)
    content[where] ^= 0x10
    path.write_bytes(content)
    try:
        bundle = find_bundle(path)
    except Unreadable:
        return
    assert bundle is not None


def test_a_truncated_bundle_is_reported(path: Path) -> None:
    for length in range(0, len(BUNDLE), 37):
        path.write_bytes(BUNDLE[:length])
        with pytest.raises(Unreadable):
            find_bundle(path)


def test_each_part_is_read_and_checked(path: Path, tmp_path: Path) -> None:
    bad = bundle_with(tmp_path / "bad", library__so=b"x").read_bytes()
    files = {"signature.json": b"{}", "parts/a.tvmflow": BUNDLE, "parts/b.tvmflow": bad}
    manifest = {
        "bundle": PARTITIONED_FORMAT,
        "name": "net",
        "parts": [{"name": name, "file": f"parts/{name}.tvmflow"} for name in ("a", "b")],
        "files": describe(files),
    }
    write_zip(path, {"manifest.json": json.dumps(manifest).encode(), **files})
    packed = find_bundle(path)
    assert packed is not None and list(packed.bundle.parts) == ["a", "b"]
    assert packed.bundle.problems == (
        "part 'b': its 'library.so' is not the one that its manifest describes",
    )


def test_a_bundle_is_found_in_a_wheel_and_in_an_archive(tmp_path: Path) -> None:
    wheel, archive = tmp_path / "net-0-py3-none-any.whl", tmp_path / "net.host.tar.gz"
    write_zip(wheel, {"net_model/__init__.py": b"", "net_model/net.tvmflow": BUNDLE})
    write_tar_gz(archive, {"net/net.so": LIBRARY, "net/net.tvmflow": BUNDLE})
    for whole, within in ((wheel, "net_model/net.tvmflow"), (archive, "net/net.tvmflow")):
        packed = find_bundle(whole)
        assert packed is not None
        assert (packed.path_in_archive, packed.bundle.manifest["name"]) == (within, "net")


def test_an_archive_beyond_the_limit_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "net.tar"
    member = tarfile.TarInfo("first")
    member.size = 1 << 40
    path.write_bytes(member.tobuf() + b"\0" * 1024)
    with pytest.raises(Unreadable, match="unpacks to, more than the limit"):
        find_bundle(path)


def test_a_file_that_is_no_archive_has_no_bundle(tmp_path: Path) -> None:
    path = tmp_path / "net.so"
    path.write_bytes(LIBRARY)
    assert find_bundle(path) is None
    assert "ELF" in describe_kind(path)
    path.write_bytes(b"")
    assert (find_bundle(path), describe_kind(path)) == (None, "a file")


def _tar(path: Path, *members: tuple[tarfile.TarInfo, bytes], **options: Any) -> Path:
    with tarfile.open(path, "w:gz", **options) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _linked(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


GOOD = (tarfile.TarInfo("net/net.tvmflow"), BUNDLE)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([GOOD, (tarfile.TarInfo("/etc/evil"), b"x")], "points outside of it: '/etc/evil'"),
        ([GOOD, (tarfile.TarInfo("net/../../evil"), b"x")], "points outside of it"),
        ([GOOD, GOOD], "two entries 'net/net.tvmflow'"),
        ([(_linked("net", "/etc"), b""), GOOD], "its entry 'net' is not a file"),
        ([GOOD, (_linked("a", "b", tarfile.LNKTYPE), b"")], "its entry 'a' is not a file"),
        ([GOOD, (_linked("a", "", tarfile.FIFOTYPE), b"")], "its entry 'a' is not a file"),
    ],
)
def test_an_archive_that_would_write_elsewhere_is_refused(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], message: str
) -> None:
    with pytest.raises(Unreadable) as raised:
        find_bundle(_tar(tmp_path / "net.tar.gz", *members))
    assert message in str(raised.value)


def test_a_large_header_of_a_tar_is_not_read(tmp_path: Path) -> None:
    """It would be held in memory, whatever it unpacks to."""
    member = tarfile.TarInfo("first")
    member.pax_headers = {"comment": "x" * (3 << 20)}
    with pytest.raises(Unreadable, match=r"it has a header of \d+ bytes"):
        find_bundle(_tar(tmp_path / "net.tar.gz", (member, b"x"), GOOD))


def test_the_caller_limits_what_is_unpacked(tmp_path: Path) -> None:
    wheel, bundle = tmp_path / "net.whl", tmp_path / "net.tvmflow"
    write_zip(wheel, {"net/net.tvmflow": BUNDLE})
    bundle.write_bytes(BUNDLE)
    archive = _tar(tmp_path / "net.tar.gz", GOOD)
    for path in (wheel, bundle, archive):
        assert find_bundle(path, len(BUNDLE)) is not None
        with pytest.raises(Unreadable, match=r"larger than|more than the limit"):
            find_bundle(path, len(BUNDLE) - 1)


@pytest.mark.parametrize("pack", [write_tar_gz, write_zip])
def test_a_damaged_archive_raises_nothing_but_unreadable(
    tmp_path: Path, pack: Callable[[Path, dict[str, bytes]], None]
) -> None:
    path = tmp_path / "net.packed"
    pack(path, {"net/net.so": LIBRARY, "net/net.tvmflow": BUNDLE})
    good, rng = path.read_bytes(), random.Random(1)
    for _ in range(100):
        content = bytearray(good)
        for _ in range(rng.choice((1, 2, 8))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])
        with contextlib.suppress(Unreadable):
            find_bundle(path)
