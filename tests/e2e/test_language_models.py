"""A language model from training to tokens: in Python, C and a browser, as PyTorch generates them with its own cache."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tvmflow
from tests.support.browser import run_script
from tests.support.pages import ROOT, blocks
from tests.support.project import Project
from tests.support.shared import folder_made_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.pytorch,
    *(
        pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"needs the package {name}")
        for name in ("torch", "tokenizers")
    ),
]

COUNT = 200
PROMPT = "The import statement"
PAGE = Path("docs/howto/language-models.md")

GENERATE = """
import json, sys
import torch
from make_model import empty, make

tokenizer, model = make()
prompt = tokenizer.encode(sys.argv[1]).ids
tokens, past, length, written = prompt, empty(), 0, []
with torch.no_grad():
    while len(written) < int(sys.argv[2]):
        places = torch.arange(length, length + len(tokens))[None]
        ones = torch.ones(1, length + len(tokens))
        logits, *past = model(torch.tensor([tokens]), ones, places, *past)
        length += len(tokens)
        tokens = [int(logits[0, -1].argmax())]
        written += tokens
print(json.dumps([prompt, written]))
"""


class Trained(Project):
    """The model of the documentation, and the tokens that PyTorch generates: `prompt`, then `expected`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self.folder / "models").mkdir()
        for block in blocks(PAGE):
            if block.marker == "file":
                (self.folder / block.value).write_text(block.text)
        made = subprocess.run(
            [sys.executable, "-c", GENERATE, PROMPT, str(COUNT)],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        self.prompt, self.expected = json.loads(made.stdout)

    def build(self, *edits: tuple[str, str]) -> Path:
        """Run the recipe of the documentation with some edits; return the folder of its only target."""
        recipe = (self.folder / "manual.yaml").read_text()
        for old, new in edits:
            assert old in recipe
            recipe = recipe.replace(old, new)
        (self.folder / "tiny.yaml").write_text(recipe)
        done = self.run()
        assert done.code == 0, done.out + done.err
        [folder] = (self.folder / "dist/manual").iterdir()
        return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def test_python_and_c_generate_the_tokens_of_pytorch(trained: Trained, tmp_path: Path) -> None:
    """The same 200, greedily, after a prompt; the program in C needs no other library."""
    made = trained.build()
    assert len(set(trained.expected)) > 8
    session = tvmflow.load(made / "manual.tvmflow").session()
    assert list(session.generate(trained.prompt, max_tokens=COUNT)) == trained.expected
    library = made / "manual-c-library"
    program = tmp_path / "generate"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-O1", "-Wall", "-Werror", f"-I{library}"]
    sources = [str(ROOT / "tests/support/c_programs/generate.c"), str(library / "libmanual.a")]
    subprocess.run([*compiler, *sources, "-lm", "-lpthread", "-o", str(program)], check=True)
    words = [str(program), *map(str, (COUNT, *trained.prompt))]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert [*map(int, ran.stdout.split())] == trained.expected


SCRIPT = """
const { load } = await import("./manual.js");
const model = await load();
const written = [];
for (let tokens = %s; written.length < %d; ) {
  const { length } = model;
  model.setDimensions({ seq: tokens.length });
  const { logits } = model.step({
    input_ids: BigInt64Array.from(tokens, BigInt),
    attention_mask: new Float32Array(length + tokens.length).fill(1),
    position_ids: BigInt64Array.from(tokens, (_, place) => BigInt(length + place)),
  });
  const last = logits.subarray(logits.length - 512);
  tokens = [last.indexOf(Math.max(...last))];
  written.push(tokens[0]);
}
return written;
"""


def test_a_browser_generates_the_tokens_of_pytorch(trained: Trained) -> None:
    """As WebAssembly, in Chromium."""
    shutil.rmtree(trained.folder / "dist", ignore_errors=True)
    made = trained.build(
        ("[host]", "[wasm32-wasi]"),
        ("[bundle, c-library]", "[c-library]\nverify: {against: none}"),
    )
    found = run_script(made / "manual-c-library", SCRIPT % (trained.prompt, COUNT))
    assert found == trained.expected


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_made_by(tmp_path_factory, "tests.e2e.make_language_models")


FIXED = """\
recipe: 1
name: net
model: {%s}
inputs:
  input_ids: {shape: [1, 1], range: [0, 96]}
%s
targets: [host]
tune: {trials: 0}
outputs: [bundle]
"""


@pytest.mark.parametrize(
    ("name", "model", "fields"),
    [
        ("mamba", "onnx: mamba.onnx", "state: {past_*: present_*}"),
        ("mamba", "pytorch: mamba.pt2", ""),
        ("static", "pytorch: static.pt2", "  position: {shape: [1], range: [0, 63]}"),
    ],
)
def test_models_whose_states_do_not_grow(
    project: Project, made: Path, name: str, model: str, fields: str
) -> None:
    """A selective state space and a static cache generate the tokens of PyTorch, also after a reset."""
    for path in made.iterdir():
        shutil.copy(path, project.folder)
    (project.folder / "tiny.yaml").write_text(FIXED % (model, fields))
    done = project.run()
    assert done.code == 0, done.out + done.err
    prompt, expected = json.loads((made / "tokens.json").read_text())[name]
    assert len(set(expected)) > 8
    session = tvmflow.load(project.folder / "dist/net/host/net.tvmflow").session()
    start = 0 if name == "static" else None
    for _ in range(2):
        tokens = session.generate(prompt, max_tokens=len(expected), position=start)
        assert [*tokens] == expected
        for length in (0, 3):
            with pytest.raises(tvmflow.TvmflowError, match="cannot be shortened: reset it"):
                session.truncate(length)
        with pytest.raises(tvmflow.TvmflowError, match="cannot be shortened: reset it"):
            session.drop(1)
        session.reset()
    if name == "static":
        with pytest.raises(tvmflow.TvmflowError, match="position of the first token is needed"):
            session.generate(prompt)
