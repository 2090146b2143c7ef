"""Check and inspection of delivered files by statements, signatures and content, without running them."""

from __future__ import annotations

import contextlib
import functools
import logging
import lzma
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from tvmflow.core.documents import Unreadable, get_field, get_number, quote, read_file, read_json
from tvmflow.core.file_kinds import recognize
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, last_line, latency_text, names_text
from tvmflow.core.project import shortest_path
from tvmflow.core.signing import PublicKey
from tvmflow.core.types import STATEMENT_SUFFIX, Json, TensorSpec, shape_text
from tvmflow.recipe.lock_file import SUFFIX, read_lock
from tvmflow.runtime.bundles import (
    DEFAULT_MAX_BYTES,
    ZIP_ERRORS,
    Bundle,
    check_entries,
    check_name,
    check_zip_end,
    read_content,
)
from tvmflow.runtime.images import read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.runtime.statements import (
    Finding,
    SignedStatement,
    Statement,
    compare_file,
    find_statements,
    read_statements,
)
from tvmflow.targets.tvm_target import target_words

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- files


def check_file(
    path: Path, statements: Sequence[SignedStatement], max_bytes: int = DEFAULT_MAX_BYTES
) -> Finding:
    """Compare a file with statements; compare a bundle of up to `max_bytes` also with its manifest."""
    if path.is_symlink() or not path.is_file():
        return Finding(path, False, "it is not a regular file, and nothing else was delivered")
    try:
        digest = hash_file(str(path))
    except OSError as error:
        return Finding(path, False, f"it cannot be read: {error.strerror}")
    finding = compare_file(path, digest, statements)
    problems = list(_bundle_problems(path, finding, max_bytes)) if finding.good else []
    return finding._replace(good=False, message=problems[0]) if problems else finding


def _bundle_problems(path: Path, finding: Finding, max_bytes: int) -> Iterator[str]:
    try:
        content = find_bundle(path, max_bytes) if path.suffix == BUNDLE else None
    except Unreadable as error:
        yield str(error)
        return
    if content is None:
        return
    yield from content.bundle.problems
    assert finding.source is not None and finding.source.statement is not None
    if finding.source.statement.is_of_measurements:
        return
    results = finding.source.statement.dependencies("result")
    names = [get_field(entry, "name", of=str).rpartition("/")[2] for entry in results]
    digests = [get_field(entry, "digest", "sha256", of=str) for entry in results]
    used = set(zip(names, digests, strict=True))
    for bundle in (content.bundle, *content.bundle.parts.values()):
        for name, digest in list_model_files(bundle):
            if (name, digest) not in used:
                yield f"its manifest names another {name} than {finding.source.path.name} does"


# ---------------------------------------------------------------- folders


def check_delivered(
    path: Path,
    trusted: Sequence[PublicKey],
    statements: Sequence[Path] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[Finding]:
    """Yield a finding for a file, or for every present or missing file of a folder.

    A trusted key must have signed each statement; without trusted keys, no signature is required. By default,
    statements are searched beside each file and in the folders above.
    """
    read_once = functools.cache(functools.partial(read_statements, trusted=tuple(trusted)))
    files = list(_list_files(path)) if path.is_dir() else [path]
    if not files:
        yield Finding(path, False, "the folder is empty")
    for file in files:
        if file.name.endswith(STATEMENT_SUFFIX):
            yield from _check_statements(file, trusted)
        else:
            sources = statements or find_statements(file)
            signed = [statement for source in sources for statement in read_once(source)]
            yield check_file(file, signed, max_bytes)


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield all files and links in a folder; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders.sort()
        yield from (Path(parent, name) for name in sorted([*names, *links]))


def _check_statements(path: Path, trusted: Sequence[PublicKey]) -> Iterator[Finding]:
    """Yield a finding for each untrusted statement in a file, and for missing files of trusted statements."""
    for signed in read_statements(path, trusted):
        if signed.problem or signed.statement is None:
            _log.debug("%s: %s", path, signed.problem)
            yield Finding(path, False, signed.problem, signed)
            continue
        subjects = signed.statement.subjects
        message = f"{count_text(len(subjects), 'file')}, {signed.signature}"
        yield Finding(path, True, message, signed)
        for name in subjects:
            file = path.parent / name
            if not file.is_file():
                yield Finding(file, False, f"it is missing, but {path.name} names it", signed)


# ---------------------------------------------------------------- descriptions in files

BUNDLE: Final = ".tvmflow"
_CHUNK: Final = 1 << 20
_MAX_ENTRIES: Final = 10_000
_MAX_HEADER_BYTES: Final = 1 << 20
_ZIP_MAGIC: Final = b"PK\x03\x04"
_GZIP_MAGIC: Final = b"\x1f\x8b"

# Errors of archive readers for damaged or malicious archives.
_ARCHIVE_ERRORS: Final = (*ZIP_ERRORS, tarfile.TarError, zlib.error, lzma.LZMAError)


class FoundBundle(NamedTuple):
    """A bundle, and its path inside an archive or wheel; empty if the bundle is a file itself."""

    bundle: Bundle
    path_in_archive: str = ""


def list_model_files(bundle: Bundle) -> Iterator[tuple[str, str]]:
    """Yield name and sha256 of the model and the weights that a library was built from."""
    for field, name in (("ir_sha256", "model.json"), ("weights_sha256", "params.safetensors")):
        if digest := get_field(bundle.manifest, "model", field, of=str):
            yield name, digest


def describe_kind(path: Path) -> str:
    """Return the kind of a file for messages, such as `a bundle`."""
    kind = recognize(path)
    return kind.text.removeprefix("is ") if kind and kind.text.startswith("is ") else "a file"


def find_bundle(path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> FoundBundle | None:
    """Return the bundle that a file is or contains, or None.

    `max_bytes` limits the bundle, and the unpacked size of an archive.

    Raises:
        Unreadable: If the bundle or archive is damaged or too large.
    """
    with path.open("rb") as stream, _archive_errors():
        start = stream.read(4)
        stream.seek(0)
        if path.suffix == BUNDLE:
            if path.stat().st_size > max_bytes:
                raise _too_large(max_bytes)
            return FoundBundle(read_content(stream, with_libraries=False))
        if start == _ZIP_MAGIC:
            return _find_in_zip(stream, max_bytes)
        if start[:2] == _GZIP_MAGIC or tarfile.is_tarfile(stream):
            stream.seek(0)
            return _find_in_tar(stream, max_bytes)
    return None


def _too_large(max_bytes: int) -> Unreadable:
    return Unreadable(f"it has, or unpacks to, more than the limit of {max_bytes} bytes")


@contextlib.contextmanager
def _archive_errors() -> Iterator[None]:
    try:
        yield
    except Unreadable:
        raise
    except _ARCHIVE_ERRORS as error:
        raise Unreadable(f"it is damaged ({quote(str(error))[1:-1]})") from error


# ---------------------------------------------------------------- archives and wheels


def _find_in_zip(stream: IO[bytes], max_bytes: int) -> FoundBundle | None:
    check_zip_end(stream)
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        name = next((entry.filename for entry in entries if entry.filename.endswith(BUNDLE)), "")
        if not name:
            return None
        check_entries(entries, max_bytes)
        with archive.open(name) as inner:
            return _read_packed(inner, name, max_bytes)


class _Member(tarfile.TarInfo):
    """A tar member with a size limit for extended headers, which tarfile reads into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        is_header = member.type not in tarfile.SUPPORTED_TYPES or member.type in _HEADER_TYPES
        if is_header and member.size > _MAX_HEADER_BYTES:
            raise Unreadable(f"it has a header of {member.size} bytes")
        return member


_HEADER_TYPES: Final = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def _find_in_tar(stream: IO[bytes], max_bytes: int) -> FoundBundle | None:
    first: FoundBundle | None = None
    problems: list[str] = []
    names: set[str] = set()
    unpacked = 0
    # Stream mode reads the archive once from the beginning, so that unpacked bytes can be counted.
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Member) as archive:
        for count, member in enumerate(archive):
            unpacked += member.size
            if unpacked > max_bytes or count > _MAX_ENTRIES:
                raise _too_large(max_bytes)
            try:
                check_name(member.name, names)
            except Unreadable as error:
                problems.append(str(error))
            names.add(member.name)
            if not member.isreg() or member.issparse():
                problems.append(f"its entry {quote(member.name)} is not a file")
            elif member.name.endswith(BUNDLE) and not first:
                inner = archive.extractfile(member)
                assert inner is not None
                first = _read_packed(inner, member.name, max_bytes)
    # Problems matter only in archives with a bundle; other archives may have any content.
    if first and problems:
        raise Unreadable(problems[0])
    return first


def _read_packed(inner: IO[bytes], name: str, max_bytes: int) -> FoundBundle:
    """Read a bundle in an archive through a temporary file."""
    with tempfile.TemporaryFile() as copy:
        while chunk := inner.read(_CHUNK):
            copy.write(chunk)
            if copy.tell() > max_bytes:
                raise _too_large(max_bytes)
        copy.seek(0)
        return FoundBundle(read_content(copy, with_libraries=False), name)


# ---------------------------------------------------------------- inspection

_DOCUMENT_SUFFIXES: Final = (".json", ".jsonl")


class UnknownFile(Exception):
    """A file without a statement, of a kind that tvmflow does not deliver."""


def inspect_file(
    path: Path,
    trusted: Sequence[PublicKey],
    statements: Sequence[Path] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Json:
    """Return all known facts of a file, from its content and statements (see `check_delivered`).

    Raises:
        UnknownFile: If nothing is known about the file.
        Unreadable: If a file of a delivered kind is damaged.
        OSError: If the file cannot be read.
    """
    if path.name.endswith(STATEMENT_SUFFIX):
        return _inspect_statements(path, trusted)
    if not path.is_file():
        raise UnknownFile(f"{path} is not a file")
    about: dict[str, Json] = {
        "path": str(path),
        "kind": describe_kind(path),
        "sha256": hash_file(str(path)),
        "bytes": path.stat().st_size,
        **_inspect_content(path, max_bytes),
    }
    files = list(statements) or find_statements(path)
    signed = [statement for file in files for statement in read_statements(file, trusted)]
    finding = check_file(path, signed, max_bytes)
    about["provenance"] = {"good": finding.good, "message": finding.message}
    if finding.source is not None and finding.source.statement is not None:
        about["provenance"] |= _statement_json(finding.source)
        about["provenance"] |= _find_measurements(signed, finding.source.statement)
    elif "content" not in about:
        raise UnknownFile(f"{path} is {about['kind']}, and {finding.message}")
    return about


def _find_measurements(
    statements: Sequence[SignedStatement], described: Statement
) -> dict[str, Json]:
    """Return the measurements of a statement's files; empty if no statement has them."""
    for signed in statements:
        measured = signed.statement
        if measured is None or signed.problem or not measured.is_of_measurements:
            continue
        digests = [
            get_field(entry, "digest", "sha256", of=str)
            for entry in measured.dependencies("statement")
        ]
        if described.text_digest in digests:
            return {
                "measurements": str(signed.path),
                "kernels": [dict(kernel) for kernel in measured.kernels],
                "verification": _verification(measured.verdict),
            }
    return {}


def _inspect_statements(path: Path, trusted: Sequence[PublicKey]) -> Json:
    signed = read_statements(path, trusted)
    for statement in signed:
        if statement.statement is None:
            raise Unreadable(statement.problem)
    statements = [_statement_json(statement) for statement in signed]
    return {"path": str(path), "kind": "statements of provenance", "statements": statements}


def _statement_json(signed: SignedStatement) -> dict[str, Json]:
    assert signed.statement is not None
    statement = signed.statement
    return {
        "statement": str(signed.path),
        "problem": signed.problem,
        "signature": signed.signature,
        "signed_by": list(signed.key_ids),
        "trusted": [key.id for key in signed.trusted],
        "about": statement.about,
        "recipe": statement.recipe,
        "target": statement.target,
        "subjects": dict(statement.subjects),
        "sources": [
            {
                "name": get_field(entry, "name", of=str),
                "sha256": get_field(entry, "digest", "sha256", of=str),
                **({"url": get_field(entry, "uri", of=str)} if "uri" in entry else {}),
            }
            for entry in statement.dependencies("source")
        ],
        "tools": {
            get_field(entry, "name", of=str): get_field(entry, "annotations", "version", of=str)
            for entry in statement.dependencies("tool")
        },
        "kernels": [dict(kernel) for kernel in statement.kernels],
        "verification": _verification(statement.verdict),
    }


def _verification(verdict: Mapping[str, Json]) -> dict[str, Json]:
    """Return result, accuracy, errors and latency of a verdict; empty for an empty verdict."""
    if not verdict:
        return {}
    outputs = [
        output
        for kind in ("outputs", "index_inputs")
        for output in get_field(verdict, kind, of=dict).values()
    ]
    errors = [get_number(output, "max_abs_error") for output in outputs]
    return {
        "passed": get_field(verdict, "passed", of=bool),
        "against": get_field(verdict, "reference", of=str) or get_field(verdict, "against", of=str),
        "accuracy": get_number(verdict, "accuracy"),
        "max_abs_error": max((error for error in errors if error is not None), default=None),
        "seconds": get_number(verdict, "latency", "library", "median"),
        "not_run": get_field(verdict, "not_run", of=str),
    }


# ---------------------------------------------------------------- content by kind


def _inspect_content(path: Path, max_bytes: int) -> dict[str, Json]:
    """Return `kind`, `content` and `problems` of a file; each only if the file has it."""
    if path.name.endswith(SUFFIX):
        return _inspect_lock(path)
    if path.suffix in _DOCUMENT_SUFFIXES:
        return _inspect_document(path)
    return _inspect_bundle(path, max_bytes)


def _inspect_lock(path: Path) -> dict[str, Json]:
    lock = read_lock(path).file
    locked = [
        {
            "name": name,
            "version": recipe.version,
            "target": target,
            "tvm": entry.tvm,
            "kernels": len(entry.kernels),
            "tuned": len(entry.choice),
        }
        for name, recipe in lock.recipes.items()
        for target, entry in recipe.targets.items()
    ]
    return {"kind": "a lock file", "content": {"locked": locked, "tools": lock.tools}}


def _inspect_document(path: Path) -> dict[str, Json]:
    """Return kind and content of a JSON file; only the kind if tvmflow does not deliver it."""
    try:
        value = read_json(read_file(path))
    except Unreadable as error:
        return {"problems": [str(error)]}
    if get_field(value, "bomFormat", of=str) == "CycloneDX":
        return _inspect_bom(value)
    if "passed" in get_field(value, of=dict) and "against" in value:
        return {"kind": "a verdict", "content": {"verification": _verification(value)}}
    return {"kind": "a JSON file"}


def _inspect_bom(value: Json) -> dict[str, Json]:
    model = get_field(value, "metadata", "component", of=dict)
    components = get_field(value, "components", of=list)
    return {
        "kind": f"a bill of materials, CycloneDX {get_field(value, 'specVersion', of=str)}",
        "content": {
            **_text_fields(model, "name", "version"),
            "components": [
                _text_fields(entry, "type", "name", "version", "purl") for entry in components
            ],
        },
    }


def _text_fields(value: Json, *names: str) -> dict[str, str]:
    return {name: get_field(value, name, of=str) for name in names}


def _inspect_bundle(path: Path, max_bytes: int) -> dict[str, Json]:
    """Return the content of the bundle that a file is or contains; Unreadable for a damaged bundle."""
    try:
        packed = find_bundle(path, max_bytes)
    except Unreadable as error:
        if path.suffix == BUNDLE:
            raise
        return {"problems": [str(error)]}
    if packed is None:
        return {}
    is_bundle = path.suffix == BUNDLE
    kind = "a bundle" if is_bundle else f"an archive with the bundle {packed.path_in_archive}"
    return {
        "kind": kind,
        "content": _bundle_json(packed.bundle),
        "problems": [*packed.bundle.problems, *_read_images(packed.bundle)[1]],
    }


def _bundle_json(bundle: Bundle) -> dict[str, Json]:
    manifest = bundle.manifest
    parts = {name: _bundle_json(part) for name, part in bundle.parts.items()}
    return {
        **_text_fields(manifest, "name", "version"),
        "target": get_field(manifest, "target", of=dict),
        "made_with": _text_fields(manifest, "tvm", "tvm_ffi", "tvmflow"),
        "verified_against": get_field(manifest, "verified_against", of=str),
        "model": get_field(manifest, "model", of=dict),
        "inputs": get_field(bundle.signature, "inputs", of=list),
        "outputs": get_field(bundle.signature, "outputs", of=list),
        **_read_images(bundle)[0],
        **({"parts": parts} if parts else {"runtime": get_field(manifest, "runtime", of=str)}),
    }


def _read_images(bundle: Bundle) -> tuple[dict[str, Json], list[str]]:
    """Return the preprocessing and labels of a bundle, and their problems."""
    manifest = bundle.manifest
    if not manifest.keys() & {"images", "labels"}:
        return {}, []
    try:
        inputs = map(TensorSpec.from_json, get_field(bundle.signature, "inputs", of=list))
        images, labels = read_preprocessing(manifest, inputs), read_labels(manifest)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return {}, [f"its preprocessing or its labels are damaged: {last_line(error)}"]
    about: dict[str, Json] = {"images": {name: image.to_json() for name, image in images.items()}}
    return (about | {"labels": labels.to_json()} if labels else about), []


# ---------------------------------------------------------------- inspection text

_SHORT_ID: Final = 12
_MAX_NAME_WIDTH: Final = 60
_SCHEDULE_WIDTH: Final = 14
_SHOWN_LABELS: Final = 5


def format_inspection(about: Json) -> Iterator[str]:
    """Yield the result of `inspect_file` as lines of text."""
    if "statements" in about:
        yield f"{shortest_path(about['path'])}: {about['kind']}"
        for statement in about["statements"]:
            yield from _statement_lines(statement)
            for name, digest in statement["subjects"].items():
                yield _line("file", f"{name}  {digest}")
        return
    yield f"{shortest_path(about['path'])}: {about['kind']}, {about['bytes']} bytes"
    yield _line("sha256", about["sha256"])
    if "content" in about:
        yield from _content_lines(about["content"])
    yield from (_line("BAD", problem) for problem in about.get("problems", ()))
    provenance = about["provenance"]
    if "statement" not in provenance:
        yield _line("note", provenance["message"])
        return
    yield from _statement_lines(provenance)
    yield _line("checked" if provenance["good"] else "BAD", provenance["message"])


def _line(label: str, text: str) -> str:
    return f"  {label:<10} {text}"


# ---------------------------------------------------------------- content


def _content_lines(content: Mapping[str, Json]) -> Iterator[str]:
    if "components" in content:
        yield _line("model", f"{content['name']} {content['version']}")
        for component in content["components"]:
            text = f"{component['name']} {component['version']}".strip()
            yield _line(component["type"], text)
    elif "verification" in content:
        yield _line("verified", _verification_text(content["verification"]))
    elif "locked" in content:
        yield from _lock_lines(content)
    else:
        yield from _bundle_lines(content)


def _lock_lines(content: Mapping[str, Json]) -> Iterator[str]:
    for entry in content["locked"]:
        yield _line("model", f"{entry['name']} {entry['version']} for {entry['target']}")
        yield _line("target", " ".join(target_words(entry["tvm"])))
        yield _line("kernels", f"{entry['kernels']} ({entry['tuned']} tuned)")
    tools = [f"{name} {identity}" for name, identity in content["tools"].items()]
    yield _line("tools", ", ".join(tools))


def _bundle_lines(content: Mapping[str, Json], indent: str = "") -> Iterator[str]:
    words = target_words(get_field(content["target"], "tvm", of=dict))
    name = get_field(content["target"], "name", of=str)
    versions = [f"{tool} {version}" for tool, version in content["made_with"].items() if version]
    yield _line("model", f"{indent}{content['name']} {content['version']}")
    yield _line("target", " ".join([indent + name, *words]))
    if "runtime" in content:
        yield _line("runtime", f"{indent}{content['runtime']}")
    yield _line("made with", indent + ", ".join(versions))
    for side in ("inputs", "outputs"):
        yield _line(side, indent + ", ".join(map(_tensor_text, content[side])))
    for name, image in content.get("images", {}).items():
        yield _line(
            "image", f"{indent}{name}: {_size_text(image)}, {image['colour']} in {image['layout']}"
        )
        yield _line("image", f"{indent}{name}: {_scaling_text(image)}")
    if "labels" in content:
        names = content["labels"]["names"]
        count = count_text(len(names), "class", "classes")
        yield _line("labels", f"{indent}{count}: {names_text(names, _SHOWN_LABELS)}")
    for file, digest in content["model"].items():
        yield _line("model", f"{indent}{file} {digest}")
    for part, part_content in content.get("parts", {}).items():
        yield _line("part", part)
        yield from _bundle_lines(part_content, "  ")


def _tensor_text(tensor: Json) -> str:
    get_field(tensor, "shape", of=list)
    text = f"{get_field(tensor, 'name', of=str)} {get_field(tensor, 'dtype', of=str)}"
    return f"{text}{shape_text(tensor)}"


def _size_text(image: Mapping[str, Json]) -> str:
    resize, crop, pad = (image.get(field) for field in ("resize", "crop", "pad"))
    steps = []
    if isinstance(resize, int):
        steps.append(f"shorter side resized to {resize} ({image['interpolation']})")
    elif resize:
        bars = f", with bars of level {pad}" if pad is not None else ""
        steps.append(f"resized to {'x'.join(map(str, resize))} ({image['interpolation']}){bars}")
    if crop:
        steps.append(f"center crop {'x'.join(map(str, crop))}")
    return ", ".join(steps)


def _scaling_text(image: Mapping[str, Json]) -> str:
    scale = image["scale"]
    text = "level / 255" if scale == 1 / 255 else "level" if scale == 1 else f"level * {scale:g}"
    if any(image["mean"]):
        text += f" - {_numbers_text(image['mean'])}"
    if set(image["std"]) != {1}:
        text = f"{text if ' ' not in text else f'({text})'} / {_numbers_text(image['std'])}"
    return text


def _numbers_text(numbers: Sequence[float]) -> str:
    texts = [f"{number:g}" for number in numbers]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


# ---------------------------------------------------------------- provenance


def _statement_lines(statement: Mapping[str, Json]) -> Iterator[str]:
    signature = statement["problem"] or statement["signature"]
    yield _line("statement", f"{shortest_path(statement['statement'])}, {signature}")
    yield _line("about", statement["about"])
    for source in statement["sources"]:
        text = f"{source['name']}  {source['sha256']}  {source.get('url', '')}"
        yield _line("source", text.rstrip())
    if statement["tools"]:
        tools = [f"{name} {version}" for name, version in statement["tools"].items()]
        yield _line("tools", ", ".join(tools))
    if statement["verification"]:
        yield _line("verified", _verification_text(statement["verification"]))
    yield from _kernel_lines(statement["kernels"])


def _kernel_lines(kernels: list[Mapping[str, Json]]) -> Iterator[str]:
    if not kernels:
        return
    tuned = sum(1 for kernel in kernels if "record" in kernel)
    yield _line("kernels", f"{len(kernels)} ({tuned} tuned)")
    names = [get_field(kernel, "name", of=str) for kernel in kernels]
    width = min(max(map(len, names)), _MAX_NAME_WIDTH)
    for name, kernel in zip(names, kernels, strict=True):
        yield f"    {name:<{width}}  {_schedule_text(kernel)}"


def _schedule_text(kernel: Mapping[str, Json]) -> str:
    fields = [f"{get_field(kernel, 'schedule', of=str):<{_SCHEDULE_WIDTH}}"]
    if record := get_field(kernel, "record", of=dict):
        fields += [
            f"trial {get_field(record, 'trial', of=str)[:_SHORT_ID]}",
            _seconds_text(get_number(record, "seconds")),
            get_field(record, "when", of=str)[:19],
            f"again {_seconds_text(get_number(record, 'again_seconds'))}",
            f"untuned {_seconds_text(get_number(record, 'untuned_seconds'))}",
        ]
    return "  ".join(field for field in fields if field).rstrip()


def _seconds_text(seconds: float | None) -> str:
    return "?" if seconds is None else latency_text(seconds)


def _verification_text(verification: Mapping[str, Json]) -> str:
    fields = [
        f"{'passed' if verification['passed'] else 'FAILED'} against {verification['against']}"
    ]
    if verification["not_run"]:
        fields.append(f"not run on this machine: {verification['not_run']}")
    if verification["accuracy"] is not None:
        fields.append(f"accuracy {verification['accuracy']:.4f}")
    if verification["max_abs_error"] is not None:
        fields.append(f"largest error {verification['max_abs_error']:.3g}")
    if verification["seconds"] is not None:
        fields.append(f"{latency_text(verification['seconds'])} per call")
    return ", ".join(fields)
