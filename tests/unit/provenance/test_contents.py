"""What bundles say of themselves, alone and packed in something else, and what is refused."""

from __future__ import annotations

import copy
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.provenance import BUNDLE, LIBRARY, bundle_with
from tvmflow.exporters._archives import write_tar_gz, write_zip
from tvmflow.provenance.contents import kind_of, look_inside
from tvmflow.provenance.documents import Unreadable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.tvmflow"


def test_a_bundle_says_what_it_is(path: Path) -> None:
    path.write_bytes(BUNDLE)
    inside = look_inside(path)
    assert inside is not None
    assert (inside.manifest["name"], inside.problems) == ("net", ())
    assert inside.signature["inputs"][0]["name"] == "x"
    assert [name for name, _ in inside.models()] == ["model.json", "params.safetensors"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"library__so": b"another"},
            "its 'library.so' is not the one that its manifest describes",
        ),
        ({"library__so": None}, "it has no 'library.so', of which its manifest speaks"),
        ({"more__py": b"x"}, "its manifest does not know its 'more.py'"),
    ],
)
def test_what_the_manifest_does_not_describe_is_told(
    path: Path, changes: Mapping[str, bytes | None], words: str
) -> None:
    inside = look_inside(bundle_with(path, **changes))
    assert inside is not None and inside.problems == (words,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"manifest__json": None}, "it has no manifest.json"),
        ({"manifest__json": b"[]"}, "its manifest.json is no object"),
        ({"manifest__json": b"[" * 100_000}, "its manifest.json: it nests too deeply"),
        ({"manifest__json": b'{"bundle": 99}'}, "it has bundle format 99"),
        ({"manifest__json": b'{"bundle": 2, "parts": [{"file": "x"}]}'}, "it has no part 'x'"),
        ({"signature__json": b"nonsense"}, "its signature.json: it is no JSON"),
        ({"../evil": b"x"}, "an entry that points out of it: '../evil'"),
        ({"/evil": b"x"}, "an entry that points out of it"),
        ({"a\\..\\evil": b"x"}, "an entry that points out of it"),
    ],
)
def test_a_bundle_that_is_none_of_ours_is_a_sentence(
    path: Path, changes: Mapping[str, bytes | None], words: str
) -> None:
    with pytest.raises(Unreadable) as raised:
        look_inside(bundle_with(path, **changes))
    assert words in str(raised.value)


def test_a_bomb_is_not_unpacked(path: Path) -> None:
    """Ours are not compressed, so that no bundle is larger inside than outside."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (100 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(Unreadable, match=r"'manifest\.json' is compressed"):
        look_inside(path)


def test_entries_that_lie_over_each_other_are_not_read(path: Path) -> None:
    """A name more in the index for each of many lies about how much there is to read."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", b" " * 1000)
        first = archive.infolist()[0]
        for number in range(20):
            again = copy.copy(first)
            again.filename = f"{number}"
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
    with pytest.raises(Unreadable, match="larger inside than outside"):
        look_inside(path)


def test_a_name_cannot_stand_for_two_entries(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("manifest.json", b"{}")
        archive.writestr("manifest.json", b"{}")
    with pytest.raises(Unreadable, match=r"two entries 'manifest\.json'"):
        look_inside(path)


@pytest.mark.parametrize("where", range(0, len(BUNDLE), 23))
def test_no_flipped_bit_ends_in_anything_but_a_sentence(path: Path, where: int) -> None:
    content = bytearray(BUNDLE)
    content[where] ^= 0x10
    path.write_bytes(content)
    try:
        inside = look_inside(path)
    except Unreadable:
        return
    assert inside is not None


def test_a_torn_bundle_is_a_sentence(path: Path) -> None:
    for length in range(0, len(BUNDLE), 37):
        path.write_bytes(BUNDLE[:length])
        with pytest.raises(Unreadable):
            look_inside(path)


def test_parts_are_read_and_checked_each(path: Path, tmp_path: Path) -> None:
    manifest = {
        "bundle": 2,
        "name": "net",
        "parts": [{"name": name, "file": f"parts/{name}.tvmflow"} for name in ("a", "b")],
    }
    bad = bundle_with(tmp_path / "bad", library__so=b"x").read_bytes()
    entries = {
        "manifest.json": json.dumps(manifest).encode(),
        "signature.json": b"{}",
        "parts/a.tvmflow": BUNDLE,
        "parts/b.tvmflow": bad,
    }
    write_zip(path, entries)
    inside = look_inside(path)
    assert inside is not None and list(inside.parts) == ["a", "b"]
    assert inside.problems == (
        "part 'b': its 'library.so' is not the one that its manifest describes",
    )


def test_a_bundle_is_found_in_a_wheel_and_in_an_archive(tmp_path: Path) -> None:
    wheel, archive = tmp_path / "net-0-py3-none-any.whl", tmp_path / "net.host.tar.gz"
    write_zip(wheel, {"net_model/__init__.py": b"", "net_model/net.tvmflow": BUNDLE})
    write_tar_gz(archive, {"net/net.so": LIBRARY, "net/net.tvmflow": BUNDLE})
    for packed, within in ((wheel, "net_model/net.tvmflow"), (archive, "net/net.tvmflow")):
        inside = look_inside(packed)
        assert inside is not None
        assert (inside.within, inside.manifest["name"]) == (within, "net")


def test_an_archive_that_unpacks_to_more_than_anybody_has_is_left(tmp_path: Path) -> None:
    path = tmp_path / "net.tar"
    member = tarfile.TarInfo("first")
    member.size = 1 << 40
    path.write_bytes(member.tobuf() + b"\0" * 1024)
    with pytest.raises(Unreadable, match="more is packed in it"):
        look_inside(path)


def test_what_is_no_archive_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "net.so"
    path.write_bytes(LIBRARY)
    assert look_inside(path) is None
    assert "ELF" in kind_of(path)
    path.write_bytes(b"")
    assert (look_inside(path), kind_of(path)) == (None, "a file")
