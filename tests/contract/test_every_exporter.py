"""The promises of every exporter in the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import exports
from tests.support.exports import Exported
from tests.support.umask import umask
from tvmflow import exporters
from tvmflow.exporters import EXPORTERS, bundle
from tvmflow.exporters.exporter import BuiltModel, Exporter, ExportRequest, PartitionedModel
from tvmflow.provenance.write import describe_purpose
from tvmflow.recipe import OUTPUT_NAMES

# these build libraries for several architectures
_SLOW = ("android", "xcframework")
every_exporter = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in EXPORTERS],
)
# the fixture `exported` compiles the programs of each project, which takes half of the time
NO_ERRORS: tuple[str, Callable[..., list[str]]] = (
    "tvmflow.exporters.cpp._find_errors",
    lambda *_: [],
)
every_partitioned_exporter = pytest.mark.parametrize("name", exporters.PARTITIONED_EXPORTERS)

TRIPLES = (
    "x86_64-linux-gnu",
    "aarch64-linux-musl",
    "arm64-apple-macos13",
    "x86_64-pc-windows-msvc",
    "wasm32-unknown-emscripten",
    "",
)


def request(triple: str = "x86_64-linux-gnu", kind: str = "llvm") -> ExportRequest:
    return ExportRequest("net-2.0", "1.0", "c", kind, triple)


@pytest.fixture(scope="module")
def built(exported: Exported) -> BuiltModel:
    """The digits as the stage hands them to exporters."""
    return exports.built_of(exported, exports.recipe(), exports.target())


def joined(built: BuiltModel, folder: Path) -> PartitionedModel:
    """Two parts, each with the library of the digits."""
    parts = {name: folder / f"{name}.tvmflow" for name in ("first", "second.2")}
    for name, path in parts.items():
        manifest = {**built.manifest, "name": f"{built.name}-{name}"}
        bundle.write(built._replace(manifest=manifest), path)
    parts_request = built.request._replace(
        parts=tuple(built.request._replace(name=name) for name in parts)
    )
    whole, other = folder / "module.tvmflow", folder / "net-first.so"
    bundle.write_partitioned(built.manifest, built.signature, parts, whole)
    other.write_bytes(b"a library")
    return PartitionedModel(
        parts_request, built.signature, built.manifest, whole, {other.name: other}
    )


@every_exporter
def test_it_has_the_functions_of_the_protocol(name: str) -> None:
    """The same functions with the same parameters and a docstring; a recipe can name it."""
    exporter = EXPORTERS[name]
    assert name in OUTPUT_NAMES and len(OUTPUT_NAMES) == len(EXPORTERS)
    for function in ("unsupported_reason", "files", "export"):
        expected = list(inspect.signature(getattr(Exporter, function)).parameters)[1:]
        offered = getattr(exporter, function)
        assert list(inspect.signature(offered).parameters) == expected
        assert (offered.__doc__ or "").strip()
    assert all(path.is_file() for path in exporter.SOURCES)


@every_exporter
def test_it_writes_the_files_that_it_announced(
    name: str, built: BuiltModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan delivers by these names: no more, no fewer, none empty, and nothing is left behind."""
    monkeypatch.setattr(*NO_ERRORS)
    EXPORTERS[name].export(built, tmp_path)
    written = set(exports.files_below(tmp_path))
    assert written == set(EXPORTERS[name].files(built.request))
    empty = [file for file in written if not (tmp_path / file).stat().st_size]
    assert empty == []


@every_exporter
def test_the_same_library_gives_the_same_bytes(
    name: str,
    built: BuiltModel,
    exported: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whenever and wherever it is written, in whatever order its description is, and by the stage too.

    No file has a time, so that SOURCE_DATE_EPOCH changes none.
    """
    monkeypatch.setattr(*NO_ERRORS)
    one, two = tmp_path / "one", tmp_path / "two" / "further down"
    one.mkdir()
    two.mkdir(parents=True)
    EXPORTERS[name].export(built, one)
    copied_library = tmp_path / f"copied_library{built.library.suffix}"
    copied_library.write_bytes(built.library.read_bytes())
    turned = dict(reversed(list(built.manifest.items())))
    forms = dict(reversed(list(built.forms.items())))
    others = dict(reversed(list(built.exported_files.items())))
    again = built._replace(
        library=copied_library, manifest=turned, forms=forms, exported_files=others
    )
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    # the permissions in an archive are not those of the files that it was made from
    with umask(0o077):
        EXPORTERS[name].export(again, two)
    for file in exports.files_below(one):
        content = (one / file).read_bytes()
        assert content == (two / file).read_bytes() == (exported.dist / file).read_bytes(), file


@every_partitioned_exporter
def test_it_holds_parts_together(
    name: str, built: BuiltModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the files that it announced, the same for the same parts."""
    made, one, two = joined(built, tmp_path), tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        exporters.PARTITIONED_EXPORTERS[name].export(made, folder)
        monkeypatch.setattr(*NO_ERRORS)
    written = sorted(exports.files_below(one))
    assert (
        written == sorted(EXPORTERS[name].files(made.request)) == sorted(exports.files_below(two))
    )
    assert all((one / file).read_bytes() == (two / file).read_bytes() for file in written)


@pytest.mark.parametrize("triple", TRIPLES)
def test_no_two_write_the_same_file(triple: str) -> None:
    """Their files stand in one folder, also when a target is called as a form ends."""
    exporters = [
        exporter
        for exporter in EXPORTERS.values()
        if not exporter.unsupported_reason(request(triple))
    ]
    names = [name for exporter in exporters for name in exporter.files(request(triple))]
    assert len(set(names)) == len(names) >= len(exporters)
    assert not {name for name in names if Path(name).is_absolute() or ".." in Path(name).parts}


@every_exporter
@pytest.mark.parametrize("triple", TRIPLES)
def test_the_readme_says_what_its_files_are_for(name: str, triple: str) -> None:
    """On every system: of a file, or of the folder that it is in."""
    if not EXPORTERS[name].unsupported_reason(request(triple)):
        files = EXPORTERS[name].files(request(triple))
        assert [file for file in files if not describe_purpose(file.partition("/")[0])] == []


@every_exporter
def test_an_unsupported_target_has_a_reason(name: str) -> None:
    """When a run is planned: for a GPU, for a system without a name."""
    for target in (request(kind="cuda"), request("")):
        reason = EXPORTERS[name].unsupported_reason(target)
        assert reason == reason.strip()
        if not reason:
            assert EXPORTERS[name].files(target)
