"""The README beside delivered files: the same bytes for the same results, and true of each file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.provenance import World, contents
from tvmflow.provenance.check import check_delivered
from tvmflow.provenance.write import describe_purpose


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def readme(world: World) -> str:
    world.deliver()
    return (world.folder / "README.md").read_text()


def test_it_names_files_tensors_and_how_to_use_and_check_them(world: World) -> None:
    text = readme(world)
    assert text.startswith("# net for host\n\nThe model `net`")
    assert "verified against ONNX Runtime 1.0." in text
    assert "| input | `x` | 1 × 3 | float32 |" in text
    assert 'model = tvmflow.load("net.tvmflow")' in text
    assert "outputs = model.run({'x': np.zeros((1, 3), 'float32')})" in text
    assert "`tvmflow verify .`" in text
    rows = [
        line.split("`")[1]
        for line in text.partition("## Files")[2].splitlines()
        if line[:3] == "| `"
    ]
    delivered = {path.name for path in world.folder.iterdir()}
    measured = {"measurements.json", "net.measurements.intoto.jsonl"}
    assert set(rows) == delivered - measured - {"README.md"}


@pytest.mark.parametrize(
    ("libraries", "text"),
    [
        (["libnet.a", "libnet.so"], "cc -Inet-c-library program.c net-c-library/libnet.a -lpthread -lm -o program"),
        (["libnet.a"], "says how the model is called. Link `net-c-library/libnet.a` into the program.\n"),
        (["libnet.a", "net.js", "net.wasm"], "into the program. `net-c-library/net.js` loads it in JavaScript.\n"),
        (["libnet.a", "net-images.h"], " `net-c-library/net-images.h` makes its inputs of pixels, and names its classes. Link"),
        (["net.dll", "net.lib", "net_static.lib"], "Link `net-c-library/net_static.lib` into the program.\n"),
    ],
)  # fmt: skip
def test_the_command_for_c_is_that_of_systems_that_have_it(
    libraries: list[str], text: str, world: World
) -> None:
    """A microcontroller has no threads to link, and an iPhone no compiler named cc."""
    made = contents()
    library = {f"net-c-library/{name}": name.encode() for name in ["net.h", *libraries]}
    made["export"] |= library
    world.make(made)
    [exported] = [one for one in world.plan.deliveries if "net.so" in dict(one.files)]
    more = exported._replace(files=(*exported.files, *((name, name) for name in library)))
    others = [one for one in world.plan.deliveries if one is not exported]
    world.plan = world.plan._replace(deliveries=(more, *others))
    written = readme(world)
    assert text in written and written.count("## C\n") == 1
    assert ("-lpthread" in written) == ("libnet.so" in libraries)


def test_a_version_that_the_recipe_does_not_name_is_not_mentioned(world: World) -> None:
    assert "The model `net`, compiled by tvmflow" in readme(world)


def test_the_statement_is_also_about_it(world: World) -> None:
    readme(world)
    findings = {finding.path.name: finding for finding in check_delivered(world.folder, ())}
    assert findings["README.md"].good
    (world.folder / "README.md").write_text("something else")
    findings = {finding.path.name: finding for finding in check_delivered(world.folder, ())}
    assert not findings["README.md"].good


def test_measurements_do_not_change_it(world: World) -> None:
    before = readme(world)
    measured = {"passed": True, "against": "reference", "accuracy": 0.5}
    world.make(contents(measurements=json.dumps(measured).encode()))
    assert readme(world) == before


def test_names_of_others_cannot_break_its_tables(world: World) -> None:
    tensor = {"name": "a|`b`\n\x1b[31m<i>", "shape": ["n", 3], "dtype": "int8"}
    signature = {"inputs": [tensor] * 4, "outputs": []}
    verdict = json.loads(contents()["verify"]["verdict.json"]) | {"reference": "<b>|*x*"}
    world.make(
        contents(signature=json.dumps(signature).encode(), verdict=json.dumps(verdict).encode())
    )
    text = readme(world)
    name = "<code>a&#124;&#96;b&#96;&#92;n&#92;x1b&#91;31m&#60;i&#62;</code>"
    assert f"| input | {name} | n × 3 | int8 |" in text
    assert "against &lt;b&gt;\\|\\*x\\*." in text
    assert "for tensor in model.inputs}" in text


def test_sizes_that_each_call_chooses_have_names_and_ranges(world: World) -> None:
    """The examples have the smallest ones."""
    signature = {
        "inputs": [
            {"name": "x", "shape": [8, 64, 3], "sizes": ["batch", "seq", 3], "dtype": "float32"}
        ],
        "outputs": [
            {"name": "y", "shape": [8, 127], "sizes": ["batch", "2 * seq - 1"], "dtype": "int8"}
        ],
        "dimensions": [
            {"name": "batch", "min": 1, "max": 8, "multiple_of": 1},
            {"name": "seq", "min": 4, "max": 64, "multiple_of": 4, "tune_at": [16]},
        ],
    }
    world.make(contents(signature=json.dumps(signature).encode()))
    text = readme(world)
    assert "| input | `x` | batch × seq × 3 | float32 |" in text
    assert "- `batch`: 1 to 8\n- `seq`: 4 to 64, multiples of 4" in text
    assert "np.zeros((1, 4, 3), 'float32')" in text


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("net.lean.tvmflow", "without its weights"),
        ("net.tvmflow", "tvmflow.load"),
        ("libnet.a", "your own linker"),
        ("net-c.tar.gz", "in C"),
        ("net.host.tar.gz", "archive"),
        ("net.intoto.jsonl", "statement"),
    ],
)
def test_the_first_pattern_counts(name: str, word: str) -> None:
    assert word in describe_purpose(name)


def test_an_unknown_file_has_no_purpose() -> None:
    assert describe_purpose("something.else") == ""


def test_dynamic_shapes_are_named_with_their_ranges(world: World) -> None:
    """An example has inputs of the smallest sizes."""
    tensor = {"name": "x", "shape": [512, 3], "sizes": ["seq", 3], "dtype": "int8"}
    dimension = {"name": "seq", "min": 8, "max": 512, "multiple_of": 8}
    signature = {"inputs": [tensor], "outputs": [], "dimensions": [dimension]}
    world.make(contents(signature=json.dumps(signature).encode()))
    text = readme(world)
    assert "| input | `x` | seq × 3 | int8 |" in text
    assert "- `seq`: 8 to 512, multiples of 8" in text
    assert "np.zeros((8, 3), 'int8')" in text
