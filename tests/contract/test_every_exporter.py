"""What every exporter in the registry promises."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.support import exports
from tests.support.exports import Exported
from tvmflow import exporters
from tvmflow.exporters import EXPORTERS, bundle
from tvmflow.exporters._base import Asked, Built, Exporter, Joined
from tvmflow.recipe import OF_THE_WHOLE, OUTPUT_NAMES

each_exporter = pytest.mark.parametrize("name", EXPORTERS)
each_of_the_whole = pytest.mark.parametrize("name", exporters.OF_THE_WHOLE)

TRIPLES = (
    "x86_64-linux-gnu",
    "aarch64-linux-musl",
    "arm64-apple-macos13",
    "x86_64-pc-windows-msvc",
    "wasm32-unknown-emscripten",
    "",
)


def asked(triple: str = "x86_64-linux-gnu", kind: str = "llvm") -> Asked:
    return Asked("net-2.0", "1.0", "c", kind, triple)


@pytest.fixture(scope="module")
def built(exported: Exported) -> Built:
    """The digits as the stage hands them to exporters."""
    return exports.built_of(exported, exports.recipe(), exports.target())


def joined(built: Built, folder: Path) -> Joined:
    """Two parts, each with the library of the digits."""
    parts = {"first": built.bundle, "second.2": built.bundle}
    wanted = built.asked._replace(parts=tuple(built.asked._replace(name=name) for name in parts))
    whole, other = folder / "module.tvmflow", folder / "net-first.so"
    bundle.write_joined(built.manifest, built.signature, parts, whole)
    other.write_bytes(b"a library")
    return Joined(wanted, built.signature, built.manifest, whole, {other.name: other})


@each_exporter
def test_it_offers_what_the_contract_asks_for(name: str) -> None:
    """The same functions with the same parameters, each with a sentence about it; a recipe can name it."""
    exporter = EXPORTERS[name]
    assert name in OUTPUT_NAMES and len(OUTPUT_NAMES) == len(EXPORTERS)
    assert (name in exporters.OF_THE_WHOLE) == (name in OF_THE_WHOLE)
    for function in ("why_not", "files", "export"):
        wanted = list(inspect.signature(getattr(Exporter, function)).parameters)[1:]
        offered = getattr(exporter, function)
        assert list(inspect.signature(offered).parameters) == wanted
        assert (offered.__doc__ or "").strip()
    assert all(path.is_file() for path in exporter.SOURCES)


@each_exporter
def test_it_writes_the_files_that_it_announced(name: str, built: Built, tmp_path: Path) -> None:
    """The plan delivers by these names: no more, no fewer, none empty, and nothing is left behind."""
    EXPORTERS[name].export(built, tmp_path)
    written = set(exports.files_below(tmp_path))
    assert written == set(EXPORTERS[name].files(built.asked))
    empty = [each for each in written if not (tmp_path / each).stat().st_size]
    assert empty == []


@each_exporter
def test_the_same_library_gives_the_same_bytes(
    name: str, built: Built, exported: Exported, tmp_path: Path
) -> None:
    """Whenever and wherever it is written, in whatever order its description is, and by the stage too."""
    one, two = tmp_path / "one", tmp_path / "two" / "further down"
    one.mkdir()
    two.mkdir(parents=True)
    EXPORTERS[name].export(built, one)
    elsewhere = tmp_path / f"elsewhere{built.library.suffix}"
    elsewhere.write_bytes(built.library.read_bytes())
    turned = dict(reversed(list(built.manifest.items())))
    objects = tuple(reversed(built.objects))
    forms = dict(reversed(list(built.forms.items())))
    others = dict(reversed(list(built.others.items())))
    again = built._replace(
        library=elsewhere, manifest=turned, objects=objects, forms=forms, others=others
    )
    EXPORTERS[name].export(again, two)
    for file in exports.files_below(one):
        content = (one / file).read_bytes()
        assert content == (two / file).read_bytes() == (exported.dist / file).read_bytes(), file


@each_of_the_whole
def test_it_holds_parts_together(name: str, built: Built, tmp_path: Path) -> None:
    """In the files that it announced, the same for the same parts."""
    made, one, two = joined(built, tmp_path), tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        exporters.OF_THE_WHOLE[name].export(made, folder)
    written = sorted(exports.files_below(one))
    assert written == sorted(EXPORTERS[name].files(made.asked)) == sorted(exports.files_below(two))
    assert all((one / each).read_bytes() == (two / each).read_bytes() for each in written)


@pytest.mark.parametrize("triple", TRIPLES)
def test_no_two_write_the_same_file(triple: str) -> None:
    """Their files stand in one folder, also when a target is called as a form ends."""
    exporters = [each for each in EXPORTERS.values() if not each.why_not(asked(triple))]
    names = [name for exporter in exporters for name in exporter.files(asked(triple))]
    assert len(set(names)) == len(names) >= len(exporters)
    assert not {name for name in names if Path(name).is_absolute() or ".." in Path(name).parts}


@each_exporter
def test_what_it_cannot_be_made_for_is_a_sentence(name: str) -> None:
    """Planning asks: for a GPU, for a system without a name."""
    for each in (asked(kind="cuda"), asked("")):
        why_not = EXPORTERS[name].why_not(each)
        assert why_not == why_not.strip()
        if not why_not:
            assert EXPORTERS[name].files(each)
