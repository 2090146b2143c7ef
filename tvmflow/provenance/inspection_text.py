"""Formats the result of an inspection for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tvmflow.core.documents import get_field, get_number
from tvmflow.core.formatting import count_text, latency_text, names_text
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Json, shape_text

_SHORT_ID: Final = 12
_MAX_NAME_WIDTH: Final = 60
_SCHEDULE_WIDTH: Final = 14
_SHOWN_LABELS: Final = 5
# The words of TVM's target that tell machines apart.
_TARGET_FIELDS: Final = ("kind", "mtriple", "mcpu", "arch")


def format_inspection(about: Json) -> Iterator[str]:
    """Yield the lines for the result of `inspect_file`."""
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
        yield _line("target", " ".join(_target_words(entry["tvm"])))
        yield _line("kernels", f"{entry['kernels']}, of which {entry['tuned']} are tuned")
    tools = [f"{name} {identity}" for name, identity in content["tools"].items()]
    yield _line("tools", ", ".join(tools))


def _bundle_lines(content: Mapping[str, Json], indent: str = "") -> Iterator[str]:
    words = _target_words(get_field(content["target"], "tvm", of=dict))
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
        yield _line("labels", indent + _labels_text(content["labels"]))
    for file, digest in content["model"].items():
        yield _line("model", f"{indent}{file} {digest}")
    for part, part_content in content.get("parts", {}).items():
        yield _line("part", part)
        yield from _bundle_lines(part_content, "  ")


def _target_words(tvm: Mapping[str, Json]) -> list[str]:
    return [str(tvm[field]) for field in _TARGET_FIELDS if field in tvm]


def _tensor_text(tensor: Json) -> str:
    get_field(tensor, "shape", of=list)
    text = f"{get_field(tensor, 'name', of=str)} {get_field(tensor, 'dtype', of=str)}"
    return f"{text}{shape_text(tensor)}"


def _size_text(image: Mapping[str, Json]) -> str:
    """Return how the size of an image changes."""
    resize, crop, pad = (image.get(field) for field in ("resize", "crop", "pad"))
    steps = []
    if isinstance(resize, int):
        steps.append(f"resized to {resize} on the shorter side ({image['interpolation']})")
    elif resize:
        bars = f", with bars of level {pad}" if pad is not None else ""
        steps.append(f"resized to {_by(resize)} ({image['interpolation']}){bars}")
    if crop:
        steps.append(f"the middle {_by(crop)} of it")
    return ", ".join(steps)


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _scaling_text(image: Mapping[str, Json]) -> str:
    """Return how the levels of an image become numbers."""
    scale = image["scale"]
    text = "level / 255" if scale == 1 / 255 else "level" if scale == 1 else f"level * {scale:g}"
    if any(image["mean"]):
        text += f" - {_numbers_text(image['mean'])}"
    if set(image["std"]) != {1}:
        text = f"{text if ' ' not in text else f'({text})'} / {_numbers_text(image['std'])}"
    return text


def _numbers_text(numbers: Sequence[float]) -> str:
    """Return a number for each channel, or the one that all have."""
    texts = [f"{number:g}" for number in numbers]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


def _labels_text(labels: Mapping[str, Json]) -> str:
    names = labels["names"]
    return f"{count_text(len(names), 'class', 'classes')}: {names_text(names, _SHOWN_LABELS)}"


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
    yield _line("kernels", f"{len(kernels)}, of which {tuned} are tuned")
    names = [get_field(kernel, "name", of=str) for kernel in kernels]
    width = min(max(map(len, names)), _MAX_NAME_WIDTH)
    for name, kernel in zip(names, kernels, strict=True):
        yield f"    {name:<{width}}  {_schedule_text(kernel)}"


def _schedule_text(kernel: Mapping[str, Json]) -> str:
    fields = [f"{get_field(kernel, 'schedule', of=str):<{_SCHEDULE_WIDTH}}"]
    record = get_field(kernel, "record", of=dict)
    if record:
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
        fields.append(f"{latency_text(verification['seconds'])} a call")
    return ", ".join(fields)
