"""What can be said of a file without running it: what it is, what it says of itself, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.locks import SUFFIX, read_lock
from tvmflow.provenance.beside import STATEMENT_SUFFIX
from tvmflow.provenance.checking import Provenance, check_file, read_statements, statements_for
from tvmflow.provenance.contents import BUNDLE, Inside, kind_of, look_inside
from tvmflow.provenance.documents import Unreadable, at, number_at, read_file, read_json
from tvmflow.provenance.statement import Statement
from tvmflow.report import latency_text
from tvmflow.signing import PublicKey
from tvmflow.stores.local import hash_file
from tvmflow.values import Json

_SHORT: Final = 12
_DOCUMENT_SUFFIXES: Final = (".json", ".jsonl")


class NotOurs(Exception):
    """A file that says nothing of itself, and of which no statement is to be found."""


# ---------------------------------------------------------------- looking


def inspect(path: Path, trusted: Sequence[PublicKey], given: Sequence[Path] = ()) -> Json:
    """All that is known of a file, as JSON. Raises NotOurs, and Unreadable for one of ours that is damaged."""
    if path.name.endswith(STATEMENT_SUFFIX):
        return _statements(path, trusted)
    if not path.is_file():
        raise NotOurs(f"{path} is no file")
    about: dict[str, Json] = {
        "path": str(path),
        "kind": kind_of(path),
        "sha256": hash_file(str(path)),
        "bytes": path.stat().st_size,
    }
    if path.name.endswith(SUFFIX):
        about |= _lock(path)
    elif path.suffix in _DOCUMENT_SUFFIXES:
        about |= _document(path)
    else:
        about |= _inside(path)
    places = list(given) or statements_for(path)
    said = [each for place in places for each in read_statements(place, trusted)]
    finding = check_file(path, said)
    provenance = finding.said_by
    if provenance is not None and provenance.statement is not None:
        found = {"good": finding.good, "words": finding.words}
        about["provenance"] = {**found, **_provenance(provenance)}
    elif "says" not in about:
        raise NotOurs(f"{path} is {about['kind']}, and {finding.words}")
    else:
        about["provenance"] = {"good": False, "words": finding.words}
    return about


def _statements(path: Path, trusted: Sequence[PublicKey]) -> Json:
    found = read_statements(path, trusted)
    unusable = [each.problem for each in found if each.statement is None]
    if unusable:
        raise Unreadable(unusable[0])
    statements = [_provenance(each) for each in found]
    return {"path": str(path), "kind": "statements of provenance", "statements": statements}


def _document(path: Path) -> dict[str, Json]:
    """What a JSON file is, if it is one of those that are delivered."""
    try:
        value = read_json(read_file(path))
    except Unreadable as error:
        return {"problems": [str(error)]}
    if at(value, "bomFormat", of=str) == "CycloneDX":
        return _materials(value)
    if "passed" in at(value, of=dict) and "against" in value:
        return {"kind": "a verdict", "says": {"verification": verification(value)}}
    return {"kind": "a JSON file"}


def _lock(path: Path) -> dict[str, Json]:
    """What a lock holds runs to. Raises RecipeError for one that is none."""
    found = read_lock(path).file
    locked = [
        {
            "name": name,
            "version": recipe.version,
            "target": target,
            "tvm": machine.tvm,
            "kernels": len(machine.kernels),
            "tuned": len(machine.choice),
        }
        for name, recipe in found.recipes.items()
        for target, machine in recipe.targets.items()
    ]
    return {"kind": "a lock", "says": {"locked": locked, "tools": found.tools}}


def _materials(value: Json) -> dict[str, Json]:
    component = at(value, "metadata", "component", of=dict)
    every = at(value, "components", of=list)
    return {
        "kind": f"a bill of materials, CycloneDX {at(value, 'specVersion', of=str)}",
        "says": {
            "name": at(component, "name", of=str),
            "version": at(component, "version", of=str),
            "components": [
                {name: at(each, name, of=str) for name in ("type", "name", "version", "purl")}
                for each in every
            ],
        },
    }


def _inside(path: Path) -> dict[str, Json]:
    try:
        inside = look_inside(path)
    except Unreadable as error:
        if path.suffix == BUNDLE:
            raise
        return {"problems": [str(error)]}
    if inside is None:
        return {}
    if path.suffix == BUNDLE:
        kind = "a bundle"
    else:
        kind = f"an archive with the bundle {inside.within}"
    return {"kind": kind, "says": _bundle(inside), "problems": list(inside.problems)}


def _bundle(inside: Inside) -> dict[str, Json]:
    manifest = inside.manifest
    return {
        "name": at(manifest, "name", of=str),
        "version": at(manifest, "version", of=str),
        "target": at(manifest, "target", of=dict),
        "made_with": {name: at(manifest, name, of=str) for name in ("tvm", "tvm_ffi", "tvmflow")},
        "verified_against": at(manifest, "verified_against", of=str),
        "model": at(manifest, "model", of=dict),
        "inputs": at(inside.signature, "inputs", of=list),
        "outputs": at(inside.signature, "outputs", of=list),
        **(
            {"parts": {n: _bundle(part) for n, part in inside.parts.items()}}
            if inside.parts
            else {}
        ),
    }


def _provenance(said: Provenance) -> dict[str, Json]:
    assert said.statement is not None
    found: Statement = said.statement
    return {
        "statement": str(said.path),
        "problem": said.problem,
        "signature": said.signature,
        "signed_by": list(said.named),
        "trusted": [key.id for key in said.trusted],
        "about": found.about,
        "recipe": found.recipe,
        "target": found.target,
        "subjects": dict(found.subjects),
        "sources": [
            {
                "name": at(each, "name", of=str),
                "sha256": at(each, "digest", "sha256", of=str),
                **({"url": at(each, "uri", of=str)} if "uri" in each else {}),
            }
            for each in found.dependencies("source")
        ],
        "tools": {
            at(each, "name", of=str): at(each, "annotations", "version", of=str)
            for each in found.dependencies("tool")
        },
        "kernels": [dict(each) for each in found.kernels],
        "verification": verification(found.verdict),
    }


def verification(verdict: Mapping[str, Json]) -> dict[str, Json]:
    """The part of a verdict that says how good a library is; empty when there is none."""
    if not verdict:
        return {}
    errors = [
        number
        for each in at(verdict, "outputs", of=dict).values()
        if (number := number_at(each, "max_abs_error")) is not None
    ]
    return {
        "passed": at(verdict, "passed", of=bool),
        "against": at(verdict, "reference", of=str) or at(verdict, "against", of=str),
        "accuracy": number_at(verdict, "accuracy"),
        "max_abs_error": max(errors, default=None),
        "seconds": number_at(verdict, "latency", "library", "median"),
        "not_run": at(verdict, "not_run", of=str),
    }


# ---------------------------------------------------------------- lines


def lines(about: Json) -> Iterator[str]:
    """The same for people."""
    if "statements" in about:
        yield f"{about['path']}: {about['kind']}"
        for each in about["statements"]:
            yield from _provenance_lines(each)
            yield from (_line("file", f"{n}  {d}") for n, d in each["subjects"].items())
        return
    yield f"{about['path']}: {about['kind']}, {about['bytes']} bytes"
    yield _line("sha256", about["sha256"])
    if "says" in about:
        yield from _says_lines(about["says"])
    yield from (_line("BAD", problem) for problem in about.get("problems", ()))
    provenance = about["provenance"]
    if "statement" not in provenance:
        yield _line("note", provenance["words"])
        return
    yield from _provenance_lines(provenance)
    yield _line("checked" if provenance["good"] else "BAD", provenance["words"])


def _line(word: str, text: str) -> str:
    return f"  {word:<10} {text}"


def _says_lines(says: Mapping[str, Json], indent: str = "") -> Iterator[str]:
    if "components" in says:
        yield _line("model", f"{says['name']} {says['version']}")
        for each in says["components"]:
            yield _line(each["type"], f"{each['name']} {each['version']}".strip())
        return
    if "verification" in says:
        yield _line("verified", _verified(says["verification"]))
        return
    if "locked" in says:
        for each in says["locked"]:
            yield _line("model", f"{each['name']} {each['version']} for {each['target']}")
            yield _line("target", " ".join(_machine(each["tvm"])))
            yield _line("kernels", f"{each['kernels']}, of which {each['tuned']} are tuned")
        tools = [f"{name} {identity}" for name, identity in says["tools"].items()]
        yield _line("tools", ", ".join(tools))
        return
    on = _machine(at(says["target"], "tvm", of=dict))
    yield _line("model", f"{indent}{says['name']} {says['version']}")
    yield _line("target", " ".join([indent + at(says["target"], "name", of=str), *on]))
    yield _line(
        "made with", indent + ", ".join(f"{n} {v}" for n, v in says["made_with"].items() if v)
    )
    for way in ("inputs", "outputs"):
        yield _line(way, indent + ", ".join(map(_tensor, says[way])))
    for name, digest in says["model"].items():
        yield _line("model", f"{indent}{name} {digest}")
    for name, part in says.get("parts", {}).items():
        yield _line("part", name)
        yield from _says_lines(part, "  ")


def _machine(tvm: Mapping[str, Json]) -> list[str]:
    """The words of TVM's target that tell machines apart."""
    return [str(tvm[word]) for word in ("kind", "mtriple", "mcpu", "arch") if word in tvm]


def _tensor(described: Json) -> str:
    shape = ", ".join(map(str, at(described, "shape", of=list)))
    return f"{at(described, 'name', of=str)} {at(described, 'dtype', of=str)}[{shape}]"


def _provenance_lines(said: Mapping[str, Json]) -> Iterator[str]:
    yield _line("statement", f"{said['statement']}, {said['problem'] or said['signature']}")
    yield _line("about", said["about"])
    for each in said["sources"]:
        yield _line("source", f"{each['name']}  {each['sha256']}  {each.get('url', '')}".rstrip())
    if said["tools"]:
        tools = [f"{name} {version}" for name, version in said["tools"].items()]
        yield _line("tools", ", ".join(tools))
    if said["verification"]:
        yield _line("verified", _verified(said["verification"]))
    tuned = [each for each in said["kernels"] if "record" in each]
    if said["kernels"]:
        yield _line("kernels", f"{len(said['kernels'])}, of which {len(tuned)} are tuned")
    width = max((len(at(each, "name", of=str)) for each in said["kernels"]), default=0)
    for each in said["kernels"]:
        yield f"    {at(each, 'name', of=str):<{min(width, 60)}}  {_schedule(each)}"


def _schedule(kernel: Mapping[str, Json]) -> str:
    record = at(kernel, "record", of=dict)
    words = [f"{at(kernel, 'schedule', of=str):<8}"]
    if record:
        words.append(f"trial {at(record, 'trial', of=str)[:_SHORT]}")
        words.append(_seconds(number_at(record, "seconds")))
        words.append(at(record, "when", of=str)[:19])
        words.append(f"again {_seconds(number_at(record, 'again_seconds'))}")
        words.append(f"untuned {_seconds(number_at(record, 'untuned_seconds'))}")
    return "  ".join(word for word in words if word).rstrip()


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else latency_text(seconds)


def _verified(found: Mapping[str, Json]) -> str:
    words = [f"{'passed' if found['passed'] else 'FAILED'} against {found['against']}"]
    if found["not_run"]:
        words.append(f"not run here: {found['not_run']}")
    if found["accuracy"] is not None:
        words.append(f"accuracy {found['accuracy']:.4f}")
    if found["max_abs_error"] is not None:
        words.append(f"largest error {found['max_abs_error']:.3g}")
    if found["seconds"] is not None:
        words.append(f"{latency_text(found['seconds'])} a call")
    return ", ".join(words)
