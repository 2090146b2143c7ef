"""Everything that writes text in another language, with hostile names: a parser of the language finds the same as
with plain names."""

from __future__ import annotations

import email
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from tests.conftest import Count
from tests.support.hostile_names import draw_names, draw_texts
from tvmflow.cli import ci_messages
from tvmflow.cli.ci_messages import junit_xml, markdown_summary
from tvmflow.cli.report import _format_markdown
from tvmflow.core.generated_text import element, lines
from tvmflow.core.types import Json
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.stage_graph import Node, PlanGraph, to_dot, to_mermaid, to_svg
from tvmflow.exporters import c_library, cpp, tvm_libraries, web, wheel
from tvmflow.exporters.cpp import Library
from tvmflow.exporters.exporter import BuiltModel, ExportRequest
from tvmflow.frontends.base import ModelInput
from tvmflow.frontends.inputs import find_input_problems
from tvmflow.pages.content import Change
from tvmflow.planning.new_recipe import Choices, Model, write_recipe
from tvmflow.provenance import write as written
from tvmflow.recipe.yaml_files import parse_yaml
from tvmflow.release.comparison import Comparison, Figure
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel
from tvmflow.targets.host import read_host
from tvmflow.targets.linking.zig import find_program_errors
from tvmflow.tuning.roofline import MeasuredKernel, render_roofline

Names = Sequence[str]

BATCH: Final = 500
NAMES: Final = 10_000
_MARKDOWN: Final = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_HEAD: Final = b"tvmflow weights\n" + bytes(48)


# ---------------------------------------------------------------- what writes text


def tensor(name: str) -> Json:
    return {"name": name, "shape": [1, 3], "dtype": "float32"}


def described(names: Names, **fields: Any) -> DescribedModel:
    """A model of which every second name is that of an output."""
    signature = {
        "inputs": list(map(tensor, names[::2])),
        "outputs": list(map(tensor, names[1::2])),
    }
    return DescribedModel("net", signature, (), "x86_64-linux-gnu")._replace(**fields)


def with_image(names: Names) -> tuple[DescribedModel, dict[str, Json]]:
    """A model of images with these classes, and its manifest."""
    spec = {"name": names[0], "shape": [1, 3, 8, 8], "dtype": "float32"}
    labels = {"names": list(names), "activation": "", "sha256": ""}
    signature = {"inputs": [spec], "outputs": [tensor("scores")]}
    model = DescribedModel("net", signature, (), "x86_64-linux-gnu")
    return model, {"images": {names[0]: {}}, "labels": labels}


def built(names: Names) -> Any:
    model = described(names)
    request = ExportRequest("net", "1.0", "host", "llvm", model.triple)
    manifest = {"images": {}, "labels": {}, "tvm": "0.27.0"}
    return SimpleNamespace(
        name="net", signature=model.signature, request=request, manifest=manifest
    )


def write_tensor_tables(names: Names) -> str:
    """The part of a library's C code that names tensors, as a program of its own."""
    model = described(names)
    sizes = [
        f"#define TF_{direction.upper()}_BYTES{index} 12"
        for direction, tensors in model.signature.items()
        for index in range(len(tensors))
    ]
    tables = [
        line
        for direction, tensors in model.signature.items()
        for line in c_runtime._write_tensors(direction, tensors)
    ]
    head = ["#define TF(name) net_##name", "typedef net_tensor tf_tensor;"]
    return "\n".join([c_runtime.write_header(model), *head, *sizes, *tables])


def write_cpp_readme(names: Names) -> str:
    model, manifest = with_image(names)
    model = model._replace(signature=described(names).signature)
    request = ExportRequest("net", "1.0", "host", "llvm", model.triple)
    values = cpp._describe(model, [Library(model)], request)
    images = cpp.describe_images(with_image(names)[0], manifest)
    return cpp.render_template("README.md", values | images)


def write_web_readme(names: Names) -> str:
    model, manifest = with_image(names)
    request = ExportRequest("net", "1.0", "browser", "llvm", "wasm32-wasi")
    signature = {**model.signature, "inputs": list(map(tensor, names))}
    made = BuiltModel(request, Path(), {}, signature, manifest, Path(), {})
    return web.write_readme(made, {"wasm": web.FetchedFile("net.wasm", "", 1)})


def write_cmake(names: Names) -> str:
    model = described(["x"])
    request = ExportRequest("net", "1.0", "host", "llvm", model.triple)
    texts = []
    for name in names:
        # the check of recipes takes no such triple
        odd = model._replace(triple=f"x86_64-linux-gnu {name}")
        values = cpp._describe(odd, [Library(model)], request)
        texts.append(cpp.render_template("config.cmake", values))
    return "\n".join(texts)


def write_delivered_readme(names: Names) -> str:
    tensors = written._describe_tensors(described(names).signature)
    feeds = [written._feed({"inputs": [tensor(name)]}) for name in names]
    return f"{tensors}\n\n{written._example('Python', 'python', feeds)}\n"


def reports(texts: Names) -> RunReport:
    stages = (
        StageReport("net:build/host", "failed", text, 1.0, {}, message=text, fix=text, log=text)
        for text in texts
    )
    return RunReport(tuple(stages), (), (), 1.0)


def write_comparison(texts: Names) -> str:
    figures = tuple(Figure(text, text, 1, 2, text) for text in texts)
    changes = tuple(Change(text, text, text) for text in texts)
    comparison = Comparison(texts[0], texts[1], figures, changes)
    return "\n".join(_format_markdown(comparison, list(figures)))


def graph(texts: Names) -> PlanGraph:
    nodes = tuple(
        Node(f"{text}:x", text, text, text, text, "up to date", "hit", reason=text)
        for text in texts
    )
    edges = tuple((one.stage_id, two.stage_id) for one, two in itertools.pairwise(nodes))
    return PlanGraph(nodes, edges)


def write_roofline(texts: Names) -> str:
    kernels = (MeasuredKernel(text, 1, untuned_us=1.0, tuned_us=1.0, flops=10) for text in texts)
    return "\n".join(render_roofline([kernel], 1.0) for kernel in kernels)


def write_page(texts: Names) -> str:
    return "".join(element("p", text, lines(text), title=text) for text in texts)


def write_problems(texts: Names, capsys: pytest.CaptureFixture[str]) -> str:
    for text in texts:
        ci_messages._annotate({"title": text, "file": text}, text)
    return capsys.readouterr().err


def write_new_recipe(names: Names) -> str:
    inputs = tuple(ModelInput(name, "float32", (1, name, 3)) for name in names)
    source = {"onnx": f"{names[0]}.onnx"}
    return write_recipe(Model("net", "onnx", source, inputs, 1), Choices()).text


def suggest_recipe(names: Names) -> str:
    inputs = [ModelInput(name, "float32", (1, name, 3)) for name in names]
    (problem,) = find_input_problems(inputs, [])
    # after it, another one with the names of dimensions
    return problem.text.split("\n\n")[1] + "\n"


def suggest_dynamic_recipe(names: Names) -> str:
    inputs = [ModelInput(name, "float32", (1, name, 3)) for name in names]
    (problem,) = find_input_problems(inputs, [])
    return problem.text.split("\n\n")[3] + "\n"


# ---------------------------------------------------------------- what reads it


def markdown_structure(text: str) -> Iterator[tuple[str, ...]]:
    """The blocks of a document, and what in their lines is neither text nor code."""
    for token in _MARKDOWN.parse(text):
        kinds = (child.type for child in token.children or ())
        yield (
            token.type,
            token.info,
            *(kind for kind in kinds if not kind.startswith(("text", "code", "html"))),
            *(
                child.content
                for child in token.children or ()
                if child.type == "html_inline" and child.content not in ("<code>", "</code>")
            ),
            *(re.sub(">[^<]*<", "><", token.content) if token.type == "html_block" else ""),
        )


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}",))

    def handle_comment(self, data: str) -> None:
        self.tags.append(("comment",))


def html_structure(text: str) -> list[tuple[str, ...]]:
    parser = _Tags()
    parser.feed(text)
    parser.close()
    return parser.tags


def xml_structure(text: str) -> list[tuple[str, ...]]:
    root = ElementTree.fromstring(f"<all>{re.sub('<[?].*?[?]>', '', text)}</all>")
    return [(part.tag, *part.attrib) for part in root.iter()]


def dot_structure(text: str) -> str:
    """A document without the content of its strings."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)


def mermaid_structure(text: str) -> str:
    return re.sub(r'"[^"\n]*"', '""', text)


def cmake_structure(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("# ")]


def metadata_structure(text: str) -> list[Any]:
    message = email.message_from_string(text)
    body = str(message.get_payload())
    return [*message.keys(), [line[:4] == "    " for line in body.split("\n")]]


def commands_structure(text: str) -> list[str]:
    """The command in each line, without the values of its properties."""
    return [re.sub("=[^,]*", "=", line.split("::", 2)[1]) for line in text.splitlines()]


TEXTS_OF: Final[dict[str, tuple[Callable[[Names], str], Callable[[str], Any], str]]] = {
    "README of a C++ project": (write_cpp_readme, markdown_structure, "names"),
    "README of a package for browsers": (write_web_readme, markdown_structure, "names"),
    "README of a delivery": (write_delivered_readme, markdown_structure, "names"),
    "CMake": (write_cmake, cmake_structure, "names"),
    "METADATA of a wheel": (
        lambda n: wheel._metadata(built(n), False),
        metadata_structure,
        "names",
    ),
    "summary of a CI job": (lambda n: markdown_summary(reports(n)), markdown_structure, "texts"),
    "comparison": (write_comparison, markdown_structure, "texts"),
    "Mermaid": (lambda n: to_mermaid(graph(n)), mermaid_structure, "texts"),
    "DOT": (lambda n: to_dot(graph(n)), dot_structure, "texts"),
    "SVG of a graph": (lambda n: to_svg(graph(n)), xml_structure, "texts"),
    "SVG of a roofline": (write_roofline, xml_structure, "texts"),
    "JUnit": (lambda n: junit_xml(reports(n)).decode(), xml_structure, "texts"),
    "HTML": (write_page, html_structure, "texts"),
}
"""What writes a document, its structure without the texts of others, and what these are."""

PROGRAMS: Final[dict[str, Callable[[Names], str]]] = {
    "header of a C library": lambda n: c_runtime.write_header(described(n)),
    "header without weights": lambda n: c_runtime.write_header(described(n, weights_head=_HEAD)),
    "tables of a C library": write_tensor_tables,
    "header of a system library": lambda n: tvm_libraries.write_system_header(built(n)),
}
"""What writes C."""

RECIPES: Final[dict[str, Callable[[Names], str]]] = {
    "recipe of init": write_new_recipe,
    "suggested inputs": suggest_recipe,
    "suggested dimensions": suggest_dynamic_recipe,
}
"""What writes YAML."""

_ALL: Final = [
    pytest.param(seed, BATCH, marks=pytest.mark.fuzz) for seed in range(1, NAMES // BATCH + 1)
]
batches = pytest.mark.parametrize(("seed", "size"), [pytest.param(0, 100, id="a few"), *_ALL])
slow_batches = pytest.mark.parametrize(
    ("seed", "size"), [pytest.param(0, 100, marks=pytest.mark.slow, id="a few"), *_ALL]
)


@batches
def test_documents_have_the_structure_that_they_have_with_plain_names(
    seed: int, size: int, count: Count
) -> None:
    """Blocks, elements, edges and fields are the same; a name adds none and hides none."""
    drawn = {"names": draw_names(seed, size), "texts": draw_texts(seed, size)}
    plain = [f"name{index}" for index in range(size)]
    for what, (write, structure, kind) in TEXTS_OF.items():
        made, expected = (list(structure(write(names))) for names in (drawn[kind], plain))
        assert made == expected, what
        count(f"hostile names: {what}", size)


@batches
def test_programs_compile(seed: int, size: int, tmp_path: Path, count: Count) -> None:
    """As C11 with trigraphs and as C++17, without a warning."""
    names = draw_names(seed, size)
    for what, write in PROGRAMS.items():
        (tmp_path / "made.h").write_text(write(names), encoding="utf-8")
        program = "#include <made.h>\nint main(void) { return 0; }\n"
        programs = {"made.c": program, "made.cpp": program}
        assert find_program_errors(programs, [tmp_path], read_host().triple) == [], what
        count(f"hostile names: {what}", size)


@slow_batches
def test_headers_of_cpp_compile(seed: int, size: int, tmp_path: Path, count: Count) -> None:
    """That of a model, and that of its images with names of classes."""
    names = draw_names(seed, size)
    image_model, manifest = with_image(names)
    for folder, model in (("plain", described(names)), ("images", image_model)):
        (tmp_path / folder).mkdir()
        headers = {
            "net.h": c_runtime.write_header(model),
            "net.hpp": cpp.write_header(model, [Library(model)]),
        }
        if folder == "images":
            headers["net-images.h"] = c_library.write_image_header(model, manifest)
            headers["net-images.hpp"] = cpp.write_images_header(model, manifest)
        for name, text in headers.items():
            (tmp_path / folder / name).write_text(text, encoding="utf-8")
        main = "".join(f"#include <{name}>\n" for name in headers) + "int main() { return 0; }\n"
        errors = find_program_errors({"main.cpp": main}, [tmp_path / folder], read_host().triple)
        assert errors == []
    count("hostile names: headers of C++", size)
    count("hostile names: names of classes", size)


@batches
def test_the_loader_of_webassembly_is_javascript(seed: int, size: int, count: Count) -> None:
    """Where Node is installed."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    names = draw_names(seed, size)
    program = c_runtime.write_loader(described(names, triple="wasm32-wasi"))
    check = f"{program}\nconsole.log(typeof load);\n"
    command = [node, "--input-type=module", "-"]
    done = subprocess.run(command, input=check, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("function\n", "")
    count("hostile names: loader in JavaScript", size)


@batches
def test_recipes_have_the_names(seed: int, size: int, count: Count) -> None:
    """As YAML reads them; sizes that are dynamic are found by their lines."""
    names = draw_names(seed, size)
    for what, write in RECIPES.items():
        document = parse_yaml(Path("recipe"), write(names))
        assert document.problems == () and list(document.value["inputs"]) == names, what
        chosen = {"SIZE", 1, *document.value.get("dimensions", ())}
        assert {spec["shape"][1] for spec in document.value["inputs"].values()} <= chosen
        count(f"hostile names: {what}", size)


@batches
def test_commands_for_ci_are_one_line_each(
    seed: int, size: int, count: Count, capsys: pytest.CaptureFixture[str]
) -> None:
    """No text of others is another command."""
    made = write_problems(draw_texts(seed, size), capsys)
    plain = write_problems([f"name{index}" for index in range(size)], capsys)
    assert commands_structure(made) == commands_structure(plain)
    count("hostile names: commands of GitHub Actions", size)
