"""Mistakes in what a recipe says of one target or one variant: each with its place, and what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project import Project
from tests.support.recipes import edited, lay_out, problems_in, write
from tvmflow.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the recipe names, which is also the current one."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def target(fields: str) -> str:
    """The recipe with these fields in its one target, a preset."""
    return edited(("- host", f"- {{name: a, preset: x86-64-v3, {fields}}}"))


def variants(text: str) -> str:
    """The recipe with these variants, from line 7 on."""
    return edited(("targets:\n", f"variants: {text}\ntargets:\n"))


TARGETS = {
    "outputs: [bundel]": "8:44: targets.0.outputs.0: 'bundel' is not an output; did you mean 'bundle'? ",
    "outputs: bundle": "8:43: targets.0.outputs: must be a list, such as [shared-library, bundle], not the string 'bundle'",
    "outputs: []": "8:43: targets.0.outputs: must be a list with at least one item, such as [shared-library, bundle], not an empty list",
    "outputs: [bundle, bundle]": "8:52: targets.0.outputs.1: 'bundle' is listed twice",
    "output: [bundle]": "8:34: targets.0.output: unknown field; did you mean 'outputs'?",
    "tune: 5": "8:40: targets.0.tune: must be a mapping, such as {trials: 1000}, not the number 5",
    "tune: {trails: 5}": "8:41: targets.0.tune.trails: unknown field; did you mean 'trials'?",
    "tune: {trials: -1}": "8:49: targets.0.tune.trials: must be at least 0",
    "tune: {trials: many}": "8:49: targets.0.tune.trials: must be an integer, not the string 'many'",
    "tune: {strategy: ga}": "8:51: targets.0.tune.strategy: 'ga' is called evolutionary in tvmflow",
    "tune: {rtol: 1}": "8:41: targets.0.tune.rtol: belongs under verify",
    "tune: {trials: 0, min_speedup: 2}": "8:65: targets.0.tune.min_speedup: needs trials; without a search nothing is tuned",
    "verify: {agains: none}": "8:43: targets.0.verify.agains: unknown field; did you mean 'against'?",
    "verify: {against: nothing}": "8:52: targets.0.verify.against: must be one of reference, none, not the string 'nothing'",
    "verify: {rtol: -1}": "8:49: targets.0.verify.rtol: must be at least 0",
    "verify: {data: date.npz}": "8:49: targets.0.verify.data: there is no file date.npz; did you mean 'data.npz'?",
    "verify: {data: 'https://example.org/d.npz'}": "8:49: targets.0.verify.data: must be a file, not a URL",
    "verify: {min_accuracy: 0.5, data: ~}": "8:57: targets.0.verify.min_accuracy: needs labelled data; set verify.data",
    "trials: 5": "8:34: targets.0.trials: belongs under tune",
    "toolchain: g++": "8:45: targets.0.toolchain: must be a mapping, such as {linker: aarch64-linux-gnu-g++}, not the string 'g++'",
    "toolchain: {}": "8:45: targets.0.toolchain.linker: is missing; write `linker: aarch64-linux-gnu-g++`",
    "toolchain: {linker: 3}": "8:54: targets.0.toolchain.linker: must be a string, such as aarch64-linux-gnu-g++, not the number 3",
    "toolchain: {linker: g++ -O2}": "8:54: targets.0.toolchain.linker: must be a program without arguments; put arguments into flags",
    "toolchain: {linker: bin/g++}": "8:54: targets.0.toolchain.linker: must be a name on PATH, or an absolute path",
    "toolchain: {linker: ''}": "8:54: targets.0.toolchain.linker: must not be empty",
    "toolchain: {linker: g++, flags: -s}": "8:66: targets.0.toolchain.flags: must be a list, such as [-shared, -s], not the string '-s'",
    "toolchain: {linker: g++, flag: [-s]}": "8:59: targets.0.toolchain.flag: unknown field; did you mean 'flags'?",
    "tvm: {kind: cuda}": "8:46: targets.0.tvm.kind: the preset x86-64-v3 has the kind llvm",
    'tvm: {mtriple: "x86_64-linux-gnu\\nexecute_process()"}': "8:39: targets.0.tvm: 'x86_64-linux-gnu\\nexecute_process()' is not an mtriple, such as aarch64-linux-gnu",
    "tvm: 5": "8:39: targets.0.tvm: must be a mapping, such as {kind: llvm, mtriple: aarch64-linux-gnu, mcpu: cortex-a72}, not the number 5",
}
VARIANTS = {
    "[b1, b8]": "7:11: variants: must be a mapping, such as {b8: {inputs: {data: {shape: [8, 3, 224, 224]}}}}, not a list",
    "{b1: [1, 3]}": "7:16: variants.b1: must be a mapping, such as {inputs: {data: {shape: [8, 3, 224, 224]}}}, not a list",
    "{b1: }": "7:15: variants.b1: must be a mapping, such as {inputs: {data: {shape: [8, 3, 224, 224]}}}, but is empty",
    "{B1: {}}": "7:16: variants.B1: must start with a lowercase letter or digit, contain only lowercase letters, digits and . _ -, and have at most 50 characters",
    "{aux: {}}": "7:17: variants.aux: no folder can have the name 'aux' on Windows; choose another one",
    "{../b: {}}": "7:18: variants.../b: must start with a lowercase letter or digit, contain only lowercase letters, digits and . _ -, and have at most 50 characters",
    "{b8: {input: {}}}": "7:17: variants.b8.input: unknown field; did you mean 'inputs'?",
    "{b8: {inputs: {data: [8, 3, 8, 8]}}}": "7:32: variants.b8.inputs.data: must be a mapping, such as {shape: [8, 3, 224, 224]}, not a list",
    "{b8: {inputs: {data: {shape: [0]}}}}": "7:41: variants.b8.inputs.data.shape.0: must be at least 1",
    "{b8: {inputs: {data: {shape: [8], dtype: int}}}}": "7:52: variants.b8.inputs.data.dtype: 'int' is not a dtype; did you mean 'int8'? ",
    "{b8: {inputs: {data: {shape: [8], value: [1, 2]}}}}": "7:52: variants.b8.inputs.data.value: has the shape [2], and `shape` is [8]",
    "{b8: {inputs: {data: {value: 0, range: [0, 1]}}}}": "7:50: variants.b8.inputs.data.range: is for random inputs, and the input has a value",
    "{b8: {kernels: mixed}}": "7:26: variants.b8.kernels: must be a mapping, such as {precision: mixed}, not the string 'mixed'",
    "{b8: {kernel: {}}}": "7:17: variants.b8.kernel: unknown field; did you mean 'kernels'?",
    "{b8: {kernels: {precision: mixd}}}": "7:38: variants.b8.kernels.precision: must be one of model, mixed, float16, bfloat16, not the string 'mixd'; did you mean 'mixed'?",
    "{b8: {kernels: {precison: mixed}}}": "7:27: variants.b8.kernels.precison: unknown field; did you mean 'precision'?",
    "{b8: {kernels: {vector_bits: 300}}}": "7:40: variants.b8.kernels.vector_bits: must be one of 128, 256, 512, not the number 300",
    "{b8: {kernels: {plain: [conv]}}}": "7:35: variants.b8.kernels.plain.0: 'conv' is not an operator with a blocked layout",
    "{b8: {precision: mixed}}": "7:17: variants.b8.precision: belongs under kernels",
    "{b8: {verify: {rtol: -1}}}": "7:32: variants.b8.verify.rtol: must be at least 0",
    "{b8: {verify: {data: date.npz}}}": "7:32: variants.b8.verify.data: there is no file date.npz; did you mean 'data.npz'?",
    "{b8: {verify: {min_accuracy: 0.5, data: ~}}}": "7:40: variants.b8.verify.min_accuracy: needs labelled data; set verify.data",
    "{b8: {tune: {trials: 5}}}": "7:17: variants.b8.tune: belongs at the top level or under targets",
}


@pytest.mark.parametrize(("fields", "problem"), TARGETS.items())
def test_wrong_overrides_of_a_target(fields: str, problem: str) -> None:
    """One mistake is one problem, with a position in the target."""
    [actual] = problems_in(write(Path("r.yaml"), target(fields)))
    assert actual.startswith(problem)


@pytest.mark.parametrize(("text", "problem"), VARIANTS.items())
def test_wrong_variants(text: str, problem: str) -> None:
    """One mistake is one problem, with a position in the variant."""
    [actual] = problems_in(write(Path("r.yaml"), variants(text)))
    assert actual.startswith(problem)


def test_all_wrong_names_of_variants_are_problems(folder: Path) -> None:
    """Each with its position, not the first one alone."""
    problems = problems_in(write(Path("r.yaml"), variants('{A: {}, b: {}, "c d": {}, "": {}}')))
    assert [problem.split(": ")[0] for problem in problems] == ["7:15", "7:33", "7:41"]


def test_a_target_that_contradicts_one_variant(folder: Path) -> None:
    """Each is right by itself, and so is the recipe."""
    text = target("verify: {data: ~}").replace(
        "targets:\n", "variants: {b1: {}, b8: {verify: {min_accuracy: 0.5}}}\ntargets:\n"
    )
    [actual] = problems_in(write(Path("r.yaml"), text))
    assert "targets.0.verify.min_accuracy: needs labelled data; set verify.data" in actual


def test_a_missing_linker_is_reported_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its position and a fix; `plan` finds it too."""
    project = Project(folder)
    project.write_recipe(targets=["{name: a, preset: x86-64-v3, toolchain: {linker: no-such-g++}}"])
    assert main.main(["plan", "--store", "cache", "tiny.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "tvmflow: tiny.yaml:9:54: targets.0.toolchain.linker: there is no program 'no-such-g++' on PATH; "
        "install it, or leave `toolchain` out: tvmflow has a linker of its own\n"
    )
    assert captured.out == ""


def test_a_run_does_not_end_with_a_stage_that_others_bring_along(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("r.yaml"), variants("{b1: {}, b8: {}}"))
    assert main.main(["plan", "--store", "cache", "r.yaml", "--until", "lower"]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("tvmflow: --until lower: a pipeline does not list this stage")
    assert "name one that does: extract_tasks" in captured


def test_an_unknown_variant_on_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message suggests the nearest name."""
    write(Path("r.yaml"), variants("{b1: {}, b8: {}}"))
    assert main.main(["plan", "--store", "cache", "r.yaml", "--variant", "b9"]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("tvmflow: --variant b9: there is no such name")
    assert "there are: b1, b8" in captured
