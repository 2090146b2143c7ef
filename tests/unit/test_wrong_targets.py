"""Mistakes in what a recipe says of one target or one variant: each with its place, and what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project import Project
from tests.support.recipes import edited, lay_out, problems_in, write
from tvmflow import cli


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
    "outputs: bundle": "8:43: targets.0.outputs: must be a list, such as [shared-library, bundle], not the text 'bundle'",
    "outputs: []": "8:43: targets.0.outputs: must be a list of at least one, such as [shared-library, bundle], not an empty list",
    "outputs: [bundle, bundle]": "8:52: targets.0.outputs.1: 'bundle' stands twice",
    "output: [bundle]": "8:34: targets.0.output: there is no such field; did you mean 'outputs'?",
    "tune: 5": "8:40: targets.0.tune: must be fields, such as {trials: 1000}, not the number 5",
    "tune: {trails: 5}": "8:41: targets.0.tune.trails: there is no such field; did you mean 'trials'?",
    "tune: {trials: -1}": "8:49: targets.0.tune.trials: must be at least 0",
    "tune: {trials: many}": "8:49: targets.0.tune.trials: must be a whole number, not the text 'many'",
    "tune: {strategy: ga}": "8:51: targets.0.tune.strategy: 'ga' is called evolutionary here",
    "tune: {rtol: 1}": "8:41: targets.0.tune.rtol: belongs under verify",
    "tune: {trials: 0, min_speedup: 2}": "8:65: targets.0.tune.min_speedup: needs trials; without a search nothing is tuned",
    "verify: {agains: none}": "8:43: targets.0.verify.agains: there is no such field; did you mean 'against'?",
    "verify: {against: nothing}": "8:52: targets.0.verify.against: must be one of reference, none, not the text 'nothing'",
    "verify: {rtol: -1}": "8:49: targets.0.verify.rtol: must be at least 0",
    "verify: {data: date.npz}": "8:49: targets.0.verify.data: there is no file date.npz; did you mean 'data.npz'?",
    "verify: {data: 'https://example.org/d.npz'}": "8:49: targets.0.verify.data: data is not downloaded; name a file",
    "verify: {min_accuracy: 0.5, data: ~}": "8:57: targets.0.verify.min_accuracy: needs data with labels; name it with verify.data",
    "trials: 5": "8:34: targets.0.trials: belongs under tune",
    "toolchain: g++": "8:45: targets.0.toolchain: must be fields, such as {linker: aarch64-linux-gnu-g++}, not the text 'g++'",
    "toolchain: {}": "8:45: targets.0.toolchain.linker: is missing; write `linker: aarch64-linux-gnu-g++`",
    "toolchain: {linker: 3}": "8:54: targets.0.toolchain.linker: must be text, such as aarch64-linux-gnu-g++, not the number 3",
    "toolchain: {linker: g++ -O2}": "8:54: targets.0.toolchain.linker: must be one program; its arguments go into flags",
    "toolchain: {linker: bin/g++}": "8:54: targets.0.toolchain.linker: must be a name on PATH, or an absolute path",
    "toolchain: {linker: ''}": "8:54: targets.0.toolchain.linker: must not be empty",
    "toolchain: {linker: g++, flags: -s}": "8:66: targets.0.toolchain.flags: must be a list, such as [-shared, -s], not the text '-s'",
    "toolchain: {linker: g++, flag: [-s]}": "8:59: targets.0.toolchain.flag: there is no such field; did you mean 'flags'?",
    "tvm: {kind: cuda}": "8:46: targets.0.tvm.kind: the preset x86-64-v3 is of the kind llvm",
    "tvm: 5": "8:39: targets.0.tvm: must be fields, such as {kind: llvm, mtriple: aarch64-linux-gnu, mcpu: cortex-a72}, not the number 5",
}
VARIANTS = {
    "[b1, b8]": "7:11: variants: must be fields, such as {b8: {inputs: {data: {shape: [8, 3, 224, 224]}}}}, not a list",
    "{b1: [1, 3]}": "7:16: variants.b1: must be fields, such as {inputs: {data: {shape: [8, 3, 224, 224]}}}, not a list",
    "{b1: }": "7:15: variants.b1: must be fields, such as {inputs: {data: {shape: [8, 3, 224, 224]}}}, but is empty",
    "{B1: {}}": "7:16: variants.B1: must begin with a small letter or digit, hold only those and . _ - and have at most 50 characters",
    "{../b: {}}": "7:18: variants.../b: must begin with a small letter or digit, hold only those and . _ - and have at most 50 characters",
    "{b8: {input: {}}}": "7:17: variants.b8.input: there is no such field; did you mean 'inputs'?",
    "{b8: {inputs: {dato: {shape: [8, 3, 8, 8]}}}}": "7:32: variants.b8.inputs.dato: the model has no input 'dato'; did you mean 'data'? (there are data)",
    "{b8: {inputs: {data: [8, 3, 8, 8]}}}": "7:32: variants.b8.inputs.data: must be fields, such as {shape: [8, 3, 224, 224]}, not a list",
    "{b8: {inputs: {data: {shape: [0]}}}}": "7:41: variants.b8.inputs.data.shape.0: must be at least 1",
    "{b8: {inputs: {data: {shape: [8], dtype: int}}}}": "7:52: variants.b8.inputs.data.dtype: 'int' is not a dtype; did you mean 'int8'? ",
    "{b8: {inputs: {data: {dtype: int8}}}}": "7:32: variants.b8.inputs.data.shape: is missing; write `shape: [1, 3, 224, 224]`",
    "{b8: {tune: {trials: 5}}}": "7:17: variants.b8.tune: belongs at the top or under targets",
}


@pytest.mark.parametrize(("fields", "problem"), TARGETS.items())
def test_of_one_target(fields: str, problem: str) -> None:
    """One mistake is one problem, placed in the target."""
    [found] = problems_in(write(Path("r.yaml"), target(fields)))
    assert found.startswith(problem)


@pytest.mark.parametrize(("text", "problem"), VARIANTS.items())
def test_of_one_variant(text: str, problem: str) -> None:
    """One mistake is one problem, placed in the variant."""
    [found] = problems_in(write(Path("r.yaml"), variants(text)))
    assert found.startswith(problem)


def test_a_missing_linker_is_told_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its place, and what to do; `plan` finds it too."""
    project = Project(folder)
    project.write_recipe(targets=["{name: a, preset: x86-64-v3, toolchain: {linker: no-such-g++}}"])
    assert cli.main(["plan", "--store", "cache", "tiny.yaml"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "tvmflow: tiny.yaml:9:54: targets.0.toolchain.linker: there is no program 'no-such-g++' on PATH; "
        "install it, or leave `toolchain` out: tvmflow links by itself\n"
    )
    assert said.out == ""


def test_a_variant_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, with the nearest name."""
    write(Path("r.yaml"), variants("{b1: {}, b8: {}}"))
    assert cli.main(["plan", "--store", "cache", "r.yaml", "--variant", "b9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tvmflow: --variant b9: there is no such name")
    assert "there are: b1, b8" in said
