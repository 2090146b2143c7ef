"""What planning reads of an archive without PyTorch, and which files are refused, and where."""

from __future__ import annotations

import contextlib
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.pytorch_archives import LEAF, container, graph, write_archive, write_zip
from tests.support.recipes import model_problems
from tvmflow.core.errors import ImportFailed
from tvmflow.core.file_kinds import EXPORT_LINES, recognize
from tvmflow.frontends.base import ModelInput, NotAModel
from tvmflow.frontends.inputs import find_input_problems
from tvmflow.frontends.pytorch._archive import Archive, check_graph, copy_for_pytorch, read_archive

TWO_INPUTS: Any = {"image": ("float32", ["s0", 3, 8]), "ids": ("int64", ["s0", "s1"])}


pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.parametrize("name", ["net/models/model.json", "serialized_exported_program.json"])
def test_the_facts_of_an_archive(name: str) -> None:
    """In the layouts of PyTorch 2.8 and later, and of older versions."""
    write_archive(Path("net.pt2"), graph(TWO_INPUTS), name)
    assert read_archive(Path("net.pt2")) == Archive(
        torch_version="2.13.0+cpu",
        inputs=(
            ModelInput("image", "float32", ("s0", 3, 8), limits={"s0": (4, 64)}),
            ModelInput("ids", "int64", ("s0", "s1"), limits={"s0": (4, 64), "s1": (None, None)}),
        ),
        outputs=("output",),
        output_types=((None, None),),
        buffers={},
        containers={},
    )


def call(operator: str, operand: str, *results: str) -> dict[str, Any]:
    """Return a node of an operator."""
    [arg, *outputs] = [{"as_tensor": {"name": name}} for name in (operand, *results)]
    target = f"torch.ops.aten.{operator}.default"
    return {"target": target, "inputs": [{"name": "self", "arg": arg}], "outputs": outputs}


def test_changed_buffers_are_the_last_inputs_and_outputs() -> None:
    """Those that an operator writes to, also through views, and constants; a name that is taken gets a number."""
    nodes = [
        *(
            call("copy_", "b_x", "copy_"),
            call("slice", "b_view", "part"),
            call("to", "part", "turned"),
        ),
        *(call("__ior__", "turned"), call("__or__", "b_kept"), call("clone", "b_kept", "copy")),
        *(call("add_", "copy", "sum"), call("mul_", "x", "product")),
        call("index_copy_", "c_lifted", "index_copy_"),
    ]
    document = graph(nodes=nodes)
    module = document["graph_module"]
    tensor = module["graph"]["tensor_values"]["x"]
    for name in ("x", "view", "kept", "new"):
        buffer = {"arg": {"name": f"b_{name}"}, "buffer_name": name, "persistent": True}
        module["signature"]["input_specs"].insert(0, {"buffer": buffer})
        module["graph"]["tensor_values"][f"b_{name}"] = tensor
    constant = {"arg": {"name": "c_lifted"}, "tensor_constant_name": "cache.lifted"}
    module["signature"]["input_specs"].insert(4, {"tensor_constant": constant})
    module["graph"]["tensor_values"]["c_lifted"] = tensor
    written = {"arg": {"name": "sum"}, "buffer_name": "new"}
    module["signature"]["output_specs"].insert(0, {"buffer_mutation": written})
    write_archive(Path("net.pt2"), document)
    archive = read_archive(Path("net.pt2"))
    assert [value.name for value in archive.inputs] == [
        *("x", "new", "view", "x_2", "cache.lifted")
    ]
    assert archive.outputs[1:] == ("new.next", "view.next", "x_2.next", "cache.lifted.next")
    assert archive.output_types[1:] == (("float32", (1, 3)),) * 4
    assert archive.buffers == {
        **{"new": "new", "view": "view", "x_2": "x"},
        "cache.lifted": "cache.lifted",
    }


PAIR = container("builtins.tuple", None, LEAF, LEAF)
BERT = "transformers.modeling_outputs.BaseModelOutput"


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (LEAF, ("output",)),
        (PAIR, ("output_0", "output_1")),
        (container("builtins.list", None, LEAF), ("output_0",)),
        (container("builtins.dict", ["scores", "boxes"], LEAF, LEAF), ("scores", "boxes")),
        (
            container("builtins.dict", ["scores", "inner"], LEAF, PAIR),
            ("scores", "inner_0", "inner_1"),
        ),
        (container("builtins.tuple", None, LEAF, PAIR), ("output_0", "output_1_0", "output_1_1")),
        (container(BERT, ["last_hidden_state"], LEAF), ("last_hidden_state",)),
        (container("mine.Pair", [["left", "right"], ["none"]], LEAF, LEAF), ("left", "right")),
        (container("collections.namedtuple", "mine.Point", LEAF, LEAF), ("px", "py")),
        (container("builtins.dict", ["x"], LEAF), ("output_x",)),
        (
            container("builtins.dict", ["a_0", "a"], LEAF, PAIR),
            ("output_0", "output_1", "output_2"),
        ),
    ],
)
def test_outputs_are_named_by_the_keys_of_the_model(
    spec: dict[str, Any], names: tuple[str, ...]
) -> None:
    """By position in tuples; never like an input, or like each other."""
    fields = {"mine.Point": {"field_names": ["px", "py"]}}
    write_archive(Path("net.pt2"), graph(out_spec=spec, fields=fields))
    assert read_archive(Path("net.pt2")).outputs == names


def test_values_that_are_no_tensors_are_no_outputs() -> None:
    """The others keep the numbers of their positions."""
    document = graph(out_spec=container("builtins.tuple", None, LEAF, LEAF, LEAF))
    outputs = document["graph_module"]["signature"]["output_specs"]
    outputs[1] = {"user_output": {"arg": {"as_none": True}}}
    outputs.append({"buffer_mutation": {"arg": {"name": "b"}, "buffer_name": "b"}})
    write_archive(Path("net.pt2"), document)
    assert read_archive(Path("net.pt2")).outputs == ("output_0", "output_2")


def test_types_of_other_packages_are_listed() -> None:
    """Named tuples with their fields, so that stand-ins can be made."""
    inner = container("collections.namedtuple", "mine.Point", LEAF, LEAF)
    spec = container(BERT, ["states"], container("builtins.list", None, inner))
    fields = {"mine.Point": {"field_names": ["px", "py"]}}
    write_archive(Path("net.pt2"), graph(out_spec=spec, fields=fields))
    assert read_archive(Path("net.pt2")).containers == {BERT: (), "mine.Point": ["px", "py"]}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("{image: {shape: [4, 3, 8]}, ids: {shape: [4, 7], dtype: int64}}", []),
        (
            "{imag: {shape: [4, 3, 8]}, ids: {shape: [4, 7], dtype: int64}}",
            [
                "r.yaml:4:16: inputs.imag: the model has no input 'imag'; did you mean 'image'? (its inputs are image, ids)",
                "r.yaml:4:9: inputs: the model has dynamic dimensions; write this in the recipe, with a number for each SIZE:\n\n"
                "inputs:\n  image: {shape: [SIZE, 3, 8]}  # float32, [s0, 3, 8]\n"
                "  ids: {shape: [4, 7], dtype: int64}  # int64, [s0, s1]",
            ],
        ),
        (
            "{image: {shape: [4, 3, 9]}, ids: {shape: [4, 7], dtype: int32}}",
            [
                "r.yaml:4:25: inputs.image.shape: input 'image' has shape ['s0', 3, 8], which [4, 3, 9] does not fit",
                "r.yaml:4:65: inputs.ids.dtype: input 'ids' has dtype int64, not int32",
            ],
        ),
        (
            "{image: {shape: [65, 3, 8]}, ids: {shape: [8, 7], dtype: int64}}",
            [
                "r.yaml:4:25: inputs.image.shape: dimension 0 ('s0') of input 'image' is 65, and the model was exported for a size of at most 64",
                "r.yaml:4:51: inputs.ids.shape: dimension 0 ('s0') of input 'ids' is 8, and that of input 'image' is 65: they are one dimension",
            ],
        ),
        (
            "{image: {shape: [3, 3, 8]}, ids: {shape: [3, 1], dtype: int64}}",
            [
                "r.yaml:4:25: inputs.image.shape: dimension 0 ('s0') of input 'image' is 3, and the model was exported for a size of at least 4",
                "r.yaml:4:50: inputs.ids.shape: dimension 0 ('s0') of input 'ids' is 3, and the model was exported for a size of at least 4",
            ],
        ),
    ],
)
def test_inputs_that_do_not_fit_have_their_position(inputs: str, expected: list[str]) -> None:
    """Names, dtypes, fixed sizes, limits of free ones, and those that two inputs share."""
    write_archive(Path("net.pt2"), graph(TWO_INPUTS))
    assert model_problems(f"model: {{pytorch: net.pt2}}\ninputs: {inputs}\n") == expected


def test_only_free_dimensions_need_a_shape() -> None:
    """An input that has a dtype which NumPy lacks cannot be given."""
    write_archive(Path("net.pt2"), graph())
    assert model_problems("model: {pytorch: net.pt2}\n") == []
    write_archive(Path("net.pt2"), graph({"x": ("float32", ["s0", 3])}))
    [problem] = model_problems("model: {pytorch: net.pt2}\n")
    assert problem.endswith(
        "\n\ninputs:\n  x: {shape: [SIZE, 3]}  # float32, [s0, 3]\n\nor, to let one library serve all sizes, write this:\n\n"
        "dimensions:\n  s0: {min: 4, max: 64}\ninputs:\n  x: {shape: [s0, 3]}  # float32, [s0, 3]"
    )
    dimensions = "dimensions: {{n: {{min: {}, max: {}}}}}\ninputs: {{x: {{shape: [n, 3]}}}}\n"
    text = "model: {{pytorch: net.pt2}}\n" + dimensions
    assert model_problems(text.format(4, 64)) == []
    assert model_problems(text.format(4, 65)) == [
        "r.yaml:5:21: inputs.x.shape: dimension 0 ('s0') of input 'x' is n (4 to 65), and the model was exported for a "
        "size of at most 64"
    ]
    assert model_problems(text.format(1, 64)) == [
        "r.yaml:5:21: inputs.x.shape: dimension 0 ('s0') of input 'x' is n (1 to 64), and the model was exported for a "
        "size of at least 4"
    ]
    write_archive(Path("net.pt2"), graph({"x": ("bfloat16", [1])}))
    [problem] = model_problems("model: {pytorch: net.pt2}\n")
    assert "has dtype bfloat16, which no input of a library can have" in problem


def write_foreign_file(name: str, path: Path) -> None:
    """Write a file that people take for an archive."""
    if name == "pickle":
        path.write_bytes(b"\x80\x02}q\x00.")
    elif name == "safetensors":
        path.write_bytes((2).to_bytes(8, "little") + b'{"w":{}}')
    else:
        inside = {
            "saved": "net/data.pkl",
            "torchscript": "net/constants.pkl",
            "compiled": "net/data/aotinductor/model/x.so",
        }
        write_zip(path, {inside[name]: ""})


@pytest.mark.parametrize("field", ["pytorch", "onnx"])
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("pickle", "is a pickle of PyTorch (torch.save), which is code and not a model"),
        ("saved", "is a pickle of PyTorch (torch.save), which is code and not a model"),
        ("torchscript", "is TorchScript, which has no graph of torch.export"),
        ("compiled", "is a package of AOTInductor: compiled code for one machine"),
        ("safetensors", "has weights without a network (safetensors)"),
    ],
)
def test_files_without_a_graph_are_refused_with_the_lines_that_export_it(
    field: str, kind: str, sentence: str
) -> None:
    """A pickle is code, and never loaded; the name of the file does not matter."""
    write_foreign_file(kind, Path("net.pth"))
    text, fix = model_problems(f"model: {{{field}: net.pth}}\n")
    assert text.startswith(f"r.yaml:3:{9 + len(field) + 2}: model.{field}: net.pth {sentence}")
    assert all(line in fix for line in EXPORT_LINES)
    assert "`pytorch: model.pt2`" in fix


def test_an_archive_that_is_named_as_onnx_belongs_to_another_field() -> None:
    """The message names the field."""
    write_archive(Path("net.pt2"), graph())
    assert model_problems("model: {onnx: net.pt2}\n") == [
        "r.yaml:3:15: model.onnx: net.pt2 is an archive of torch.export",
        "name it with `pytorch:`",
    ]


def training(operator: str, **arguments: Any) -> list[dict[str, Any]]:
    inputs = [{"name": name, "arg": argument} for name, argument in arguments.items()]
    return [{"target": f"torch.ops.aten.{operator}.default", "inputs": inputs}]


TRUE, FALSE = {"as_bool": True}, {"as_bool": False}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("{", "its graph is not a JSON document, or is damaged"),
        ("[1]", "its graph does not have the format of torch.export (TypeError)"),
        ({"graph_module": {}}, "its graph does not have the format of torch.export (KeyError)"),
        (
            graph(device="cuda"),
            "it was exported on the device cuda: export `model.cpu()` with inputs on the CPU",
        ),
        (
            graph(nodes=training("batch_norm", training=TRUE)),
            "it was exported in training mode (batch_norm): call `model.eval()` before torch.export.export",
        ),
        (
            graph(nodes=training("dropout", p={"as_float": 0.1}, train=TRUE)),
            "it was exported in training mode (dropout): call `model.eval()` before torch.export.export",
        ),
    ],
)
def test_archives_that_cannot_be_imported(document: Any, sentence: str) -> None:
    """Damaged ones, and those of models that were on a GPU or being trained."""
    write_archive(Path("net.pt2"), document)
    text = f"r.yaml:3:18: model.pytorch: net.pt2 cannot be imported: {sentence}"
    assert model_problems("model: {pytorch: net.pt2}\n") == [text]


def test_operators_of_training_that_change_nothing_are_imported() -> None:
    """Dropout of nothing, and statistics of the batch in a model that never learns any."""
    none = {"as_none": True}
    nodes = [
        *training("dropout", p={"as_float": 0.0}, train=TRUE),
        *training("dropout", p={"as_float": 0.5}, train=FALSE),
        *training("batch_norm", running_mean=none, training=TRUE),
    ]
    write_archive(Path("net.pt2"), graph(nodes=nodes))
    assert model_problems("model: {pytorch: net.pt2}\n") == []


def test_files_that_are_no_archives() -> None:
    """Cut short, of another kind, with several models, or with the digests of further files."""
    start = "r.yaml:3:18: model.pytorch: net.pt2"
    recipe = "model: {pytorch: net.pt2}\n"
    write_archive(Path("net.pt2"), graph())
    whole = Path("net.pt2").read_bytes()
    Path("net.pt2").write_bytes(whole[: len(whole) // 2])
    assert model_problems(recipe) == [
        f"{start} is a damaged archive: its list of files, at the end, is missing or wrong",
        "copy or download the file again, and compare its size",
    ]
    Path("net.pt2").write_text("hello")
    assert model_problems(recipe) == [
        f"{start} cannot be imported: it is not a zip file, as archives of torch.export are, or a damaged one"
    ]
    write_zip(Path("net.pt2"), {"net/models/a.json": "{}", "net/models/b.json": "{}"})
    assert model_problems(recipe) == [
        f"{start} cannot be imported: it has several models, and none is named 'model': a, b"
    ]
    write_zip(Path("net.pt2"), {"readme.txt": ""})
    assert model_problems(recipe) == [
        f"{start} cannot be imported: it has no graph of torch.export"
    ]
    pinned = f"model:\n  pytorch: net.pt2\n  files: {{a: {'a' * 64}}}\n"
    assert model_problems(pinned) == [
        "r.yaml:5:10: model.files: a PyTorch archive is one file; its digest is `sha256`"
    ]


def test_a_missing_archive_has_the_nearest_name() -> None:
    """As for other models."""
    write_archive(Path("net.pt2"), graph())
    assert model_problems("model: {pytorch: nett.pt2}\n") == [
        "r.yaml:3:18: model.pytorch: there is no file nett.pt2; did you mean 'net.pt2'?"
    ]


def damage(node: Any, draw: random.Random) -> None:
    """Replace one value of a document, wherever it is nested."""
    while True:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            node[key] = draw.choice([None, 1, -5, "x", [], {}, [1], {"a": 1}, True, 1e9, "[1]"])
            return
        node = inner


CODE = "__import__('os').system('touch trace')"
CALL = {"inputs": [], "outputs": [{"as_tensor": {"name": "y"}}], "metadata": {}}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (graph({"x": ("float32", [1, f"s0', x={CODE}"])}), "has the size"),
        (graph(range_constraints={CODE: {"min_val": 2, "max_val": 4}}), "has the name"),
        (graph(nodes=[{**CALL, "target": "torch.os.system"}]), "calls 'torch.os.system'"),
        (graph(nodes=[{**CALL, "target": "torch.ops.load_library.__call__"}]), "calls"),
        (graph(nodes=[{**CALL, "target": "torch.ops.aten.__init__.__globals__"}]), "calls"),
        (graph(nodes=[{**CALL, "target": "torch.ops.aten.from_file.default"}]), "calls"),
        (graph(nodes=[{**CALL, "target": "torch.ops.higher_order.aoti_call_delegate"}]), "calls"),
        (graph(nodes=[{**CALL, "target": "_operator.methodcaller"}]), "calls"),
        (graph({f"x = {CODE}; y": ("float32", [1])}), "has a value with the name"),
        (
            graph(
                out_spec=container(
                    "collections.defaultdict",
                    {"default_factory_module": "antigravity", "dict_context": "[]"},
                    LEAF,
                )
            ),
            "name a class that PyTorch would import",
        ),
        (
            graph(
                out_spec=container(
                    "builtins.dict", ' [{"\\u005f_enum__": true, "fqn": "a:B"}]', LEAF
                )
            ),
            "name a class that PyTorch would import",
        ),
    ],
)
def test_a_graph_that_holds_code_is_refused(document: Any, reason: str) -> None:
    """PyTorch evaluates formulas, calls what a target names, and imports what a container names."""
    write_archive(Path("net.pt2"), document)
    with pytest.raises(NotAModel, match=reason):
        read_archive(Path("net.pt2"))


@pytest.mark.parametrize(
    "formula",
    [
        "s0",
        "2*s77 + 1",
        "Mul(Integer(2), Symbol('s77', positive=True, integer=True))",
        "FloatPow(ToFloat(FloorDiv(Symbol('s53'), Integer(2))), Float('0.5', precision=53))",
        "(s0//2) % 3 >= -1",
        "Max(1, s0) != u0",
        "Pow(s0, Rational(1, 2)) + s1**(-1) + (s0 + s1 + 1)**3",
        "Piecewise((s0, s0 > 1), (1, True)) & ~Eq(s0, 2)",
        "-2**62 + 9223372036854775807",
        "*".join(f"({'(' * 9}s{n}{' - 1)//2 + 2' * 9})" for n in range(3)),
        "((((s0 - 1)//2 + 1) - 1)//2 + 1)*((s1 - 1)//2 + 1)",
    ],
)
def test_formulas_of_sizes_are_accepted(formula: str) -> None:
    """As PyTorch 2.6 to 2.13 write them."""
    document = graph(
        nodes=[{**CALL, "target": "_operator.mul", "inputs": [{"name": "a", "arg": {}}]}]
    )
    document["graph_module"]["graph"]["sym_int_values"] = {
        "s": {"as_expr": {"expr_str": formula, "hint": None}}
    }
    write_archive(Path("net.pt2"), document)
    assert read_archive(Path("net.pt2")).inputs


@pytest.mark.parametrize(
    "formula",
    [
        CODE,
        "exec('x')",
        "Max(exec, 1)(1)",
        "s0.__class__",
        "[c for c in s0]",
        "lambda: s0",
        "Symbol('x')('y')",
        "ｅｘｅｃ(1)",
        "s0!",
        "s0\n",
        "a" * 50_000 + "$",
    ],
)
def test_other_formulas_are_refused(formula: str) -> None:
    """Nothing but known functions is called, and nothing has attributes; long ones take no time."""
    document = graph()
    document["graph_module"]["graph"]["sym_int_values"] = {"s": {"as_expr": {"expr_str": formula}}}
    write_archive(Path("net.pt2"), document)
    with pytest.raises(NotAModel, match="which is not a formula"):
        read_archive(Path("net.pt2"))


@pytest.mark.parametrize(
    "formula",
    [
        "9**9**9**9",
        "Pow(10, Pow(10, 9))",
        "Pow(Integer('10'), Integer('1000000000'))",
        "((((2**64)**64)**64)**64)",
        "2**s0",
        "PowByNatural(s0, 65)",
        "LShift(1, 1000000)",
        "RoundDecimal(s0, 1000000)",
        "1e999999",
        "Float('1e9999')",
        "Float('0.5', precision=1000000000)",
        "Float('0.5', 1000000000)",
        "9" * 2000,
        "(s0 + s1 + s2 + s3)**20",
        "(s0 + s1)*(s0 + s2)**10*(s1 + s3)**10",
        "Mul(" + ", ".join(["2**60"] * 99) + ")",
        "Max(" + ", ".join(f"s{n}" for n in range(2000)) + ")",
    ],
)
def test_formulas_that_sympy_would_not_end_are_refused(formula: str) -> None:
    """Exponents, results, and sums that products become are limited when a formula is read."""
    with pytest.raises(NotAModel, match=r"which (takes too long to compute|is not a formula)"):
        check_graph({"expr_str": formula})


@pytest.mark.parametrize("part", ["(", "-", "s0**", "[", "Abs(", "~", "9", "'", "1e", "not "])
def test_hostile_formulas_end_reading(part: str) -> None:
    """Nested deeply, or long."""
    for count in (1500, 3000, 100_000):
        with pytest.raises(NotAModel):
            check_graph({"expr_str": part * count + "1"})


def test_pytorch_gets_a_copy_with_tensors_alone(tmp_path: Path) -> None:
    """Guards, which are code, pickled objects, compiled libraries and other graphs are not in it."""
    document = graph(guards_code=[CODE])
    kept = {
        "net/models/model.json": json.dumps(document),
        "net/archive_format": "pt2",
        "net/data/weights/weight_0": "w",
        "net/data/weights/model_weights_config.json": "{}",
        "net/data/constants/tensor_0": "c",
        "net/data/constants/model_constants_config.json": "{}",
        "net/data/sample_inputs/model.pt": "s",
    }
    left_out = {
        "net/models/other.json": json.dumps(document),
        "net/models/other.txt": json.dumps(document),
        "net/data/constants/opaque_obj_0": "pickle",
        "net/data/constants/custom_obj_0.pt": "pickle",
        "net/data/aotinductor/m/x.so": "ELF",
        "net/data/weights/../constants/opaque_obj_1": "pickle",
        "net/extra/x": "text",
    }
    write_zip(Path("net.pt2"), {**left_out, **kept})
    copy = copy_for_pytorch(Path("net.pt2"), tmp_path)
    with zipfile.ZipFile(copy) as archive:
        content = {name: archive.read(name).decode() for name in archive.namelist()}
    assert content == {
        **kept,
        "net/models/model.json": json.dumps({**document, "guards_code": []}),
    }


def test_an_archive_with_damaged_weights_is_not_copied(tmp_path: Path) -> None:
    """Its graph can be read: the file that is damaged is named."""
    path = Path("net.pt2")
    weights = "net/data/weights/weight_0"
    write_zip(path, {"net/models/model.json": json.dumps(graph()), weights: "0123456789"})
    path.write_bytes(path.read_bytes().replace(b"0123456789", b"0123456780"))
    with pytest.raises(ImportFailed, match=rf"damaged \(Bad CRC-32 for file '{weights}'\)"):
        copy_for_pytorch(path, tmp_path)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_archives_are_read_or_refused(seed: int) -> None:
    """Whatever stands in the graph, and whichever bytes have changed."""
    draw, path = random.Random(seed), Path("net.pt2")
    for attempt in range(40):
        document = graph(TWO_INPUTS, nodes=training("dropout", p={"as_float": 0.0}, train=TRUE))
        damage(document, draw)
        write_archive(path, document)
        if attempt % 2:
            content = bytearray(path.read_bytes())
            for _ in range(3):
                content[draw.randrange(len(content))] = draw.randrange(256)
            path.write_bytes(content)
        with contextlib.suppress(NotAModel):
            recognize(path)
            archive = read_archive(path)
            list(find_input_problems(archive.inputs, []))
            json.dumps([archive.outputs, archive.containers])
