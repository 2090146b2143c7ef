"""Writer of the sidecar files of deliveries and releases, which are signed if a key is set.

Functions raise DamagedBlob for a damaged result, and StoreError for a file that cannot be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from tvmflow.core import signing
from tvmflow.core.bill_of_materials import (
    digest_fields,
    encode_bom,
    file_component,
    stated_license_fields,
)
from tvmflow.core.canonical_json import canonical
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.documents import Unreadable, get_field, read_file, read_json
from tvmflow.core.files import hash_file, write_atomically
from tvmflow.core.generated_text import (
    markdown_block,
    markdown_code,
    markdown_text,
    python_string,
    shell_word,
)
from tvmflow.core.project import shortest_path
from tvmflow.core.types import STATEMENT_SUFFIX, Artifact, Dimension, Json, Plan, shape_text
from tvmflow.core.version import VERSION
from tvmflow.exporters.exporter import UNVERSIONED
from tvmflow.provenance import statement
from tvmflow.provenance.delivered import (
    BOM_SUFFIX,
    MEASUREMENTS_SUFFIX,
    DeliveredTarget,
    SidecarPaths,
    SourceState,
    list_sidecars,
    read_note,
    read_source_state,
    recipe_path,
    write_note,
)
from tvmflow.provenance.statement import (
    Lineage,
    Source,
    Tool,
    find_license,
    load_lineage,
    wheel_digest,
)
from tvmflow.runtime.statements import MEASUREMENTS_TYPE, PAYLOAD_TYPE, parse_statement
from tvmflow.stages import import_model
from tvmflow.stages.images import LABELS
from tvmflow.store.local import LocalStore
from tvmflow.targets.form_names import C_LIBRARY

RELEASE_STATEMENT: Final = f"release{STATEMENT_SUFFIX}"
"""The name of the statement about the folder of a release."""
MEASUREMENTS_STATEMENT: Final = f"measurements{STATEMENT_SUFFIX}"
"""The name of the statement about the measurements of a release."""

_log = logging.getLogger(__name__)


def write_sidecars(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Write missing and outdated sidecar files; return the paths of all sidecar files."""
    paths: list[str] = []
    for delivered, is_current in list_sidecars(plan, artifacts, store, dist):
        written = delivered.sidecar_paths(dist)
        paths += written
        if not is_current:
            _warn_of_replaced_recipe(store, delivered, written)
            write_target_sidecars(delivered, store, written)
            write_note(store, delivered, written)
    return paths


def _warn_of_replaced_recipe(
    store: LocalStore, delivered: DeliveredTarget, paths: SidecarPaths
) -> None:
    """Log a warning if the folder has the files of another recipe with the same name."""
    other, own = read_note(store, paths).get("recipe"), recipe_path(delivered)
    # Do not warn about moved recipes, or recipes of `tvmflow build`, which are in the store.
    if not isinstance(other, str) or other == own or not Path(other).is_file():
        return
    if not Path(other).is_relative_to(store.root):
        _log.warning(
            "%s had the files of %s, which has the same name as %s: they were replaced; "
            "to keep both, give one of the recipes another name",
            Path(paths.statement).parent,
            *map(shortest_path, (other, own)),
        )


def write_target_sidecars(
    delivered: DeliveredTarget, store: LocalStore, paths: SidecarPaths
) -> None:
    """Write the sidecar files of a target; keep existing signatures of an unchanged statement."""
    lineage = load_lineage(delivered, store)
    sources = read_source_state(delivered.origin) if delivered.origin else None
    text = _write_reproducible(lineage, delivered, sources, paths)
    # A statement must have a subject, even if nothing was measured.
    measured = dict(delivered.measured_files or delivered.files)
    measurements = statement.make_measurement_statement(lineage, measured, text, sources)
    _write_statement(Path(paths.measurements), measurements)


def _write_reproducible(
    lineage: Lineage, delivered: DeliveredTarget, sources: SourceState | None, paths: SidecarPaths
) -> bytes:
    """Write statement, bill of materials and README; return the statement's text."""
    reproducible = lineage._replace(files=delivered.reproducible_files)
    others = [Path(path).name for path in (paths.statement, paths.bom)]
    documents = {
        Path(paths.bom): make_bom(reproducible),
        Path(paths.readme): make_readme(reproducible, others),
    }
    digests = {path.name: hashlib.sha256(text).hexdigest() for path, text in documents.items()}
    subjects = {**dict(reproducible.files), **digests}
    text = statement.make_statement(reproducible, subjects, sources)
    for path, content in documents.items():
        write_if_changed(path, content)
    _write_statement(Path(paths.statement), text)
    return text


def write_release_targets(
    folder: Path, targets: Sequence[DeliveredTarget], store: LocalStore
) -> None:
    """Write statement, bill of materials and README of every target in a release."""
    for delivered in targets:
        sources = read_source_state(delivered.origin) if delivered.origin else None
        paths = delivered.sidecar_paths(str(folder))
        _write_reproducible(load_lineage(delivered, store), delivered, sources, paths)


def write_release_statements(
    folder: Path, name: str, version: str, measured: Sequence[str]
) -> None:
    """Write two statements: about the reproducible files of a release, and about the measured files."""
    statements = sorted(folder.rglob(f"*{STATEMENT_SUFFIX}"))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in statements)
    digests = {path.relative_to(folder).as_posix(): hash_file(path) for path in files}
    text = statement.make_release_statement(
        name,
        version,
        {path: digest for path, digest in digests.items() if path not in measured},
        {path.relative_to(folder).as_posix(): text_digest(path) for path in statements},
        measured=measured,
    )
    _write_statement(folder / RELEASE_STATEMENT, text)
    measurements = statement.make_release_statement(
        name,
        version,
        {path: digests[path] for path in measured},
        {RELEASE_STATEMENT: hashlib.sha256(text).hexdigest()},
        build_type=MEASUREMENTS_TYPE,
    )
    _write_statement(folder / MEASUREMENTS_STATEMENT, measurements)


def _write_statement(path: Path, text: bytes) -> None:
    """Write a statement with the user's signature and existing signatures of the same text."""
    key = signing.load_signing_key()
    envelope = _keep_signatures(text, path)
    if key is not None:
        envelope = _add_signature(envelope, key)
    write_if_changed(path, _line(envelope))


def text_digest(path: Path) -> str:
    """Return the sha256 (hex) of a statement's text, without its signatures.

    Raises:
        Unreadable: If the file cannot be read, or does not have exactly one statement.
        InvalidEnvelope: If the file is not the envelope of a statement.
    """
    text = signing.open_envelope(read_json(read_file(path)), PAYLOAD_TYPE)
    return hashlib.sha256(text).hexdigest()


def sign_statements(path: Path, key: signing.PrivateKey) -> None:
    """Add a signature to every statement in a file, or to none if any is invalid.

    Raises:
        Unreadable: If the file or a statement in it cannot be read.
        InvalidEnvelope: If a line is not an envelope of a statement.
    """
    envelopes = [read_json(line) for line in read_file(path).splitlines() if line.strip()]
    if not envelopes:
        raise Unreadable("it is empty")
    for envelope in envelopes:
        parse_statement(signing.open_envelope(envelope, PAYLOAD_TYPE))
    write_if_changed(path, b"".join(_line(_add_signature(entry, key)) for entry in envelopes))


def _line(envelope: Json) -> bytes:
    return canonical(envelope) + b"\n"


def _add_signature(envelope: Mapping[str, Json], key: signing.PrivateKey) -> Json:
    """Return the envelope with a signature of `key`, which replaces its earlier signature."""
    text = signing.open_envelope(envelope, PAYLOAD_TYPE)
    signed = signing.sign_envelope(PAYLOAD_TYPE, text, [key])
    others = [entry for entry in envelope["signatures"] if entry["keyid"] != key.public.id]
    signatures = sorted([*others, *signed["signatures"]], key=lambda entry: str(entry["keyid"]))
    return {**signed, "signatures": signatures}


def _keep_signatures(text: bytes, path: Path) -> Json:
    """Return an envelope of the text with the signatures of the same text in the existing file."""
    unsigned = signing.sign_envelope(PAYLOAD_TYPE, text, [])
    with contextlib.suppress(Unreadable, signing.InvalidEnvelope):
        present = read_json(read_file(path))
        if signing.open_envelope(present, PAYLOAD_TYPE) == text:
            signatures = [
                {name: get_field(entry, name, of=str) for name in ("keyid", "sig")}
                for entry in get_field(present, "signatures", of=list)
            ]
            return {**unsigned, "signatures": signatures}
    return unsigned


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it already has this content."""
    with contextlib.suppress(Unreadable):
        if not path.is_symlink() and read_file(path) == content:
            return
    _log.debug("writing %s", path)
    with disk_errors(str(path)):
        write_atomically(path, content)


# ---------------------------------------------------------------- bill of materials
# CycloneDX 1.6 with the model, its files, its weights, and its libraries. Equal results give equal bytes, so there
# are no times and measurements, and the serial number is a digest of the content.

_MODEL: Final = "model"
_WEIGHTS: Final = "weights"

# Scopes of packages for `tvmflow.load`, and for a library that needs TVM's runtime. Others are build tools.
_LOADER: Final = {"numpy": "optional"}
_RUNTIME: Final = {**_LOADER, "apache-tvm": "required", "apache-tvm-ffi": "required"}
_MADE_WITH: Final = "excluded"
# The role of test data; all other files are sources of the model.
_DATASET: Final = "data"


def make_bom(lineage: Lineage) -> bytes:
    """Return the bill of materials of one recipe's files for one target as canonical JSON."""
    scopes = _RUNTIME if _needs_tvm(lineage) else _LOADER
    libraries = [_library(tool, scopes) for tool in lineage.tools()]
    sources = [_source(source) for source in lineage.sources()]
    source_refs = [source["bom-ref"] for source in sources]
    weights = list(_weights(lineage))
    required = [library["bom-ref"] for library in libraries if library["scope"] == "required"]
    tvmflow = {"type": "application", "name": "tvmflow", "version": VERSION}
    return encode_bom(
        {
            "metadata": {"component": _model(lineage), "tools": {"components": [tvmflow]}},
            "components": [*weights, *sources, *libraries],
            "dependencies": [
                {"ref": _MODEL, "dependsOn": required + [entry["bom-ref"] for entry in weights]},
                *({"ref": entry["bom-ref"], "dependsOn": source_refs} for entry in weights),
            ],
        }
    )


def _needs_tvm(lineage: Lineage) -> bool:
    builds = lineage.find_stages("build")
    files = [file.name.split("/") for stage in builds for file in stage.artifact.files]
    return {folders[0] for folders in files if len(folders) > 1} != {C_LIBRARY}


def _model(lineage: Lineage) -> Json:
    version = lineage.version
    settings = [stage.settings for stage in lineage.find_stages("build")]
    triples = dict.fromkeys(get_field(entry, "target", "mtriple", of=str) for entry in settings)
    return {
        "bom-ref": _MODEL,
        "type": "machine-learning-model",
        "name": lineage.recipe,
        **({"version": version} if version else {}),
        **stated_license_fields(lineage.license()),
        "components": [file_component(name, digest) for name, digest in lineage.files],
        "modelCard": _model_card(lineage),
        "properties": [
            {"name": "tvmflow:target", "value": lineage.target},
            *({"name": "tvmflow:triple", "value": triple} for triple in triples if triple),
        ],
    }


def _model_card(lineage: Lineage) -> Json:
    """Return the CycloneDX model card; task and training are unknown."""
    signature = lineage.signature()
    imports = lineage.find_stages("import")
    kinds = [get_field(stage.settings, "model", "kind", of=str) for stage in imports]
    return {
        "modelParameters": {
            side: [
                {"format": f"{tensor['name']}: {tensor['dtype']}{shape_text(tensor)}"}
                for tensor in signature[side]
            ]
            for side in ("inputs", "outputs")
        },
        "properties": [{"name": "tvmflow:source", "value": kind} for kind in kinds if kind],
    }


def _weights(lineage: Lineage) -> Iterator[dict[str, Json]]:
    for stage in lineage.find_stages("import"):
        if digest := stage.artifact.digests(()).get(import_model.PARAMS):
            yield {
                "bom-ref": _WEIGHTS,
                "type": "data",
                "name": import_model.PARAMS,
                "hashes": digest_fields(digest),
                "data": [{"type": "other", "name": import_model.PARAMS}],
            }


def _source(source: Source) -> dict[str, Json]:
    references = [{"type": "distribution", "url": source.url}] if source.url else []
    kind: dict[str, Json] = (
        {"type": "data", "data": [{"type": "dataset", "name": source.role}]}
        if source.role.partition("/")[0] == _DATASET
        else {"type": "file"}
    )
    return {
        "bom-ref": f"source:{source.role}:{source.sha256}",
        "name": source.role,
        "hashes": digest_fields(source.sha256),
        **kind,
        **({"externalReferences": references} if references else {}),
    }


def _library(tool: Tool, scopes: Mapping[str, str]) -> dict[str, Json]:
    wheel = wheel_digest(tool)
    return {
        "bom-ref": tool.purl,
        "type": "library",
        "name": tool.name,
        "version": tool.version,
        "purl": tool.purl,
        "scope": scopes.get(tool.name, _MADE_WITH),
        **find_license(tool),
        **({"hashes": digest_fields(wheel)} if wheel else {}),
        "properties": [{"name": "tvmflow:record", "value": tool.record}],
    }


# ---------------------------------------------------------------- README

_PURPOSES: Final = (
    ("*.lean.tvmflow", "the model without its weights, for Python: `tvmflow.load(FILE, params=…)`"),
    ("*.tvmflow", "the model for Python with tvmflow: `tvmflow.load`"),
    ("*.whl", "the model as a Python package: `pip install`"),
    ("*-web", "the model for browsers: an ES module with types, and a page that shows it"),
    ("*-cpp", "the model for C++17: a CMake project with a README of its own"),
    ("*-c-library-weights", "the model as a C library, with its weights in a file of their own"),
    (
        "*-c-library",
        "the model as a C library: a header, a static library and, where programs of the target load one, a shared library",
    ),
    ("*-c.tar.gz", "the model in C, to be compiled for its target"),
    ("*.tar.gz", "all other forms of the model in one archive"),
    ("*.tar", "object files, which TVM links when it loads them"),
    ("*-system.*", "a static library for programs with TVM's runtime, and its header"),
    ("*.lean.*", "a library without its weights, for TVM's runtime"),
    ("*.safetensors", "the weights of the library without weights"),
    ("*.params", "the same weights as TVM reads them"),
    ("lib*.a", "object code for your own linker, into a shared library for TVM's runtime"),
    ("*.lib", "object code for your own linker, into a shared library for TVM's runtime"),
    ("*roofline.svg", "the speed of each kernel against what the machine can do, as a picture"),
    ("verify.json", "what the library was compared with, and the verdict"),
    (f"*{STATEMENT_SUFFIX}", "a statement of what these files were made from, which may be signed"),
    (f"*{BOM_SUFFIX}", "a bill of materials in CycloneDX"),
    ("*.so", "a library for TVM's runtime"),
    ("*.dylib", "a library for TVM's runtime"),
    ("*.dll", "a library for TVM's runtime"),
    ("*.wasm", "a library for TVM's runtime"),
)
"""(pattern of file names, purpose); the first matching pattern counts."""

_CHECK: Final = """\
## Check

`tvmflow verify .` in this folder compares every file with its statement; `--trusted KEY.pub` asks for a signature \
as well. `tvmflow inspect FILE` shows what a file was made from."""
# With more inputs than this, an example creates them in a loop.
_FEW_INPUTS: Final = 3


def make_readme(lineage: Lineage, sidecars: Iterable[str]) -> bytes:
    """Return the README of a delivered target."""
    names = sorted({name.partition("/")[0] for name, _ in lineage.files} | set(sidecars))
    signature = lineage.signature()
    sections = [
        f"# {lineage.recipe} for {lineage.target}",
        _describe(lineage),
        _describe_tensors(signature),
        _describe_dimensions(signature),
        _describe_files(names, lineage.recipe),
        *_list_examples(names, lineage, signature),
        _CHECK,
    ]
    return ("\n\n".join(filter(None, sections)) + "\n").encode()


def describe_purpose(name: str) -> str:
    """Return the purpose of a delivered file or folder; empty for an unknown name."""
    return next((text for pattern, text in _PURPOSES if fnmatchcase(name, pattern)), "")


def _describe(lineage: Lineage) -> str:
    version = f" {lineage.version}" if lineage.version not in ("", UNVERSIONED) else ""
    verdict, _ = lineage.verdict()
    reference = (verdict or {}).get("reference", "")
    text = f"The model {markdown_code(lineage.recipe)}{version}, compiled by tvmflow"
    checked = (
        f", and verified against {markdown_text(reference)}" if reference else ", and not verified"
    )
    license_name = lineage.license()
    terms = f" Its license: {markdown_text(license_name)}." if license_name else ""
    return f"{text}{checked}.{terms}"


def _describe_tensors(signature: Mapping[str, Json]) -> str:
    rows = [
        f"| {kind} | {markdown_code(tensor['name'])} | {_shape(tensor)} | {tensor['dtype']} |"
        for kind in ("input", "output")
        for tensor in signature[f"{kind}s"]
    ]
    return "\n".join(["| | name | shape | type |", "|---|---|---|---|", *rows]) if rows else ""


def _describe_files(names: Sequence[str], recipe: str) -> str:
    rows = (f"| {markdown_code(name)} | {describe_purpose(name)} |\n" for name in names)
    return (
        f"## Files\n\n| file | purpose |\n|---|---|\n{''.join(rows)}\n"
        f"`measurements.json` and `{recipe}{MEASUREMENTS_SUFFIX}`, where they are beside these: latencies, "
        "errors and what measured them. They differ from run to run; all other files are the same whenever they are built."
    )


# ---------------------------------------------------------------- examples


def _list_examples(
    names: Sequence[str], lineage: Lineage, signature: Mapping[str, Json]
) -> Iterator[str]:
    recipe = lineage.recipe
    call = _image_call(lineage)
    numpy = "" if call else "numpy as np, "
    call = call or f"outputs = model.run({_feed(signature)})"
    if f"{recipe}.tvmflow" in names:
        load = f'model = tvmflow.load("{recipe}.tvmflow")'
        yield _example("Python", "python", [f"import {numpy}tvmflow", "", load, call])
    for name in names:
        if name.endswith(".whl"):
            module = name.partition("-")[0]
            yield _example("As a Python package", "sh", [f"pip install {shell_word(name)}"])
            code = [f"import {numpy}{module}", "", f"model = {module}.load()", call]
            yield markdown_block("python", code)
    if f"{recipe}-cpp" in names:
        link = f"target_link_libraries(program PRIVATE {recipe}::{recipe})"
        code = [f"add_subdirectory({recipe}-cpp)", link]
        yield _example("C++", "cmake", code, f"`{recipe}-cpp/README.md` has a program.\n")
    for folder in (name for name in names if name.endswith("-c-library")):
        paths = [name for name, _ in lineage.files if name.startswith(f"{folder}/")]
        static = next((path for path in paths if path.endswith((".a", "_static.lib"))), "")
        header = f"{folder}/{folder.removesuffix('-c-library')}"
        text = f"`{header}.h` says how the model is called."
        if f"{header}-images.h" in paths:
            text += f" `{header}-images.h` makes its inputs of pixels, and names its classes."
        if static and any(path.endswith((".so", ".dylib")) for path in paths):
            code = [f"cc -I{folder} program.c {static} -lpthread -lm -o program"]
            yield _example("C", "sh", code, f"{text}\n")
        elif static:
            # Boards, phones, WebAssembly and Windows have their own linkers and options.
            script = next((path for path in paths if path.endswith(".js")), "")
            loader = f" `{script}` loads it in JavaScript." if script else ""
            yield f"## C\n\n{text} Link `{static}` into the program.{loader}"


def _example(title: str, language: str, code: Sequence[str], text: str = "") -> str:
    return "\n".join([f"## {title}", "", *filter(None, [text]), markdown_block(language, code)])


def _image_call(lineage: Lineage) -> str:
    """Return example code that runs the model on an image file; empty for other inputs."""
    exported = next(iter(lineage.exports), None)
    has_image = exported is not None and bool(exported.settings.get("inputs"))
    if exported is None or not has_image or len(lineage.signature()["inputs"]) != 1:
        return ""
    call = 'outputs = model.run(model.preprocess("image.png"))'
    if any(file.role == LABELS for file in exported.spec.files):
        call = 'classes = model.classify("image.png")'
    return f"{call}  # needs Pillow; an array of uint8 will do, too"


def _feed(signature: Mapping[str, Json]) -> str:
    """Return an expression for inputs of zeros; dynamic dimensions have their minimum."""
    inputs, dimensions = signature["inputs"], signature.get("dimensions", ())
    if len(inputs) > _FEW_INPUTS and not dimensions:
        return "{tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in model.inputs}"
    least = {entry["name"]: entry["min"] for entry in dimensions}
    entries = []
    for tensor in inputs:
        sizes = [least.get(size, size) for size in tensor.get("sizes") or tensor["shape"]]
        # Expressions of dimensions, which are not evaluated here, become 1.
        shape = tuple(size if isinstance(size, int) else 1 for size in sizes)
        entries.append(f"{python_string(tensor['name'])}: np.zeros({shape}, {tensor['dtype']!r})")
    return f"{{{', '.join(entries)}}}"


def _describe_dimensions(signature: Mapping[str, Json]) -> str:
    lines = [
        f"- {markdown_code(entry.name)}: {entry.range_text}"
        for entry in Dimension.list_of(signature)
    ]
    return "\n".join(["Each call chooses the sizes:", "", *lines]) if lines else ""


def _shape(tensor: Mapping[str, Json]) -> str:
    extents = [markdown_text(str(extent)) for extent in tensor.get("sizes") or tensor["shape"]]
    if (axis := tensor.get("bounded_axis")) is not None:
        extents[axis] = f"at most {extents[axis]}"
    return " × ".join(extents) or "a single value"
