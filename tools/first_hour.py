"""Goes through two first hours with tvmflow as new users do, and keeps all of them in docs/: `make first-hour`.

One user has a trained classifier and its data (docs/first-hour.md), the other one writes three models: a
detector, a classifier that returns an index, and one that changes (docs/first-hour-models.md). The script builds the wheel of
this checkout and installs it into a new virtual environment, whose other packages are those of the environment that
runs it. Everything else is fresh: folder, home, variables.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
_MODELS: Final = ROOT / "recipes" / "models"
_LONGEST_STEP_S: Final = 600
_COLUMNS: Final = 100


class Step(NamedTuple):
    """A chapter of the hour.

    Attributes:
        title: Its heading.
        text: What it is about.
        commands: What the user types.
        exit_code: The exit code of the last command.
        files: Files that the user writes before, with their content.
    """

    title: str
    text: str
    commands: tuple[str, ...]
    exit_code: int = 0
    files: tuple[tuple[str, str], ...] = ()


class Hour(NamedTuple):
    """What one user does.

    Attributes:
        page: The name of the page in docs/ that has all of it.
        title: The heading of the page.
        about: What the user has and wants.
        steps: The chapters.
        models: The files of recipes/models that lie in the folder.
    """

    page: str
    title: str
    about: str
    steps: tuple[Step, ...]
    models: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The path of the page."""
        return ROOT / "docs" / self.page


_RECIPE: Final = """\
recipe: 1
name: digits
model: {onnx: models/digits.onnx}
targets: [host]
tune: {trials: 16}
outputs: [cpp, wheel, bundle]
verify: {data: models/digits-test.npz, min_accuracy: 0.95}
"""
_RELEASE: Final = """\
pipeline: 1
name: products
recipes: [digits.tvmflow.yaml]
release: {version: "1.0.0", gates: {min_accuracy: 0.95}}
"""
_TUTORIAL: Final = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
_PROGRAM: Final = _TUTORIAL.partition("```cpp\n")[2].partition("```")[0]
"""The program in C++ of the tutorial."""

_DIGITS_STEPS: Final = (
    Step("Is it installed?", "", ("tvmflow --version", "tvmflow doctor")),
    Step(
        "One command",
        "The folder has a model and its test data. Without a recipe, the model is built for this machine.",
        ("tvmflow build models/digits.onnx",),
    ),
    Step(
        "A recipe",
        "A recipe says what to build; you can keep it.",
        ("tvmflow init models/digits.onnx", "cat digits.tvmflow.yaml"),
    ),
    Step(
        "Edit it",
        "The edited recipe adds a small tuning budget, a C++ project, a wheel and the test data.",
        ("tvmflow plan digits.tvmflow.yaml",),
        files=(("digits.tvmflow.yaml", _RECIPE),),
    ),
    Step(
        "Run it",
        "The first run executes all stages. In the second run, everything is up to date.",
        ("tvmflow run digits.tvmflow.yaml", "tvmflow run digits.tvmflow.yaml"),
    ),
    Step(
        "Use it in Python",
        "",
        (
            "tvmflow run-model dist/digits/host/digits.tvmflow --input models/digits-test.npz --print-time",
        ),
    ),
    Step(
        "A mistake",
        "This is the message for a typo in a recipe.",
        ("sed 's/trials/trails/' digits.tvmflow.yaml > wrong.yaml", "tvmflow plan wrong.yaml"),
        exit_code=2,
    ),
    Step(
        "Change something",
        "With more trials, only `tune` and `pick_best` run. Later stages run only if a faster schedule is found.",
        (
            "sed -i 's/trials: 16/trials: 24/' digits.tvmflow.yaml",
            "tvmflow explain digits.tvmflow.yaml tune",
            "tvmflow run digits.tvmflow.yaml",
        ),
    ),
    Step(
        "What happened so far?",
        "tvmflow records each run that executed a stage, with its measurements and logs.",
        ("tvmflow runs", "tvmflow show run", "tvmflow logs"),
    ),
    Step(
        "What changed, and where does the time go?",
        "Compare the last two runs, and list the kernels of the library with their ONNX nodes.",
        ("tvmflow compare latest~1 latest", "tvmflow show kernels digits.tvmflow.yaml"),
    ),
    Step(
        "A report",
        "`report` writes all measurements to one self-contained HTML page.",
        ("tvmflow report -o report.html", "du -h --apparent-size report.html"),
    ),
    Step(
        "Release",
        "A pipeline names recipes, a version and gates.",
        ("tvmflow run release.yaml", "tvmflow verify releases/products-1.0.0"),
        files=(("release.yaml", _RELEASE),),
    ),
    Step(
        "The model as a Python package",
        "The wheel needs only numpy.",
        (
            "pip install --quiet --no-deps dist/digits/host/digits_model-*.whl",
            "python -m digits_model models/digits-test.npz output.npz",
        ),
    ),
    Step(
        "The model in a C++ program",
        "The C++ project needs neither Python nor TVM.",
        (
            "c++ -std=c++17 -Idist/digits/host/digits-cpp/include main.cpp"
            " dist/digits/host/digits-cpp/lib/libdigits.a -lm -lpthread -o program",
            "./program",
        ),
        files=(("main.cpp", _PROGRAM),),
    ),
)

_MAKE_MODELS: Final = (ROOT / "tools" / "make_first_models.py").read_text(encoding="utf-8")
"""The script that writes the models of the second hour."""

_DETECTOR: Final = """\
recipe: 1
name: detector
model: {onnx: models/detector.onnx}
targets: [host]
outputs: [bundle, c-library, cpp]
pipeline: compile
"""

_MODELS_STEPS: Final = (
    Step(
        "Three models",
        "A script writes them: a detector whose boxes go through `NonMaxSuppression`, as PyTorch exports it, a "
        "classifier that ends in `ArgMax`, and a network of convolutions.",
        ("python make_first_models.py", "ls models"),
        files=(("make_first_models.py", _MAKE_MODELS),),
    ),
    Step(
        "A detector",
        "The number of boxes is known only after a call: a data-dependent output shape.",
        (
            "tvmflow build models/detector.onnx",
            "tvmflow run detector.yaml",
            "tvmflow inspect dist/detector/host/detector.tvmflow",
            "tvmflow run-model dist/detector/host/detector.tvmflow",
        ),
        files=(("detector.yaml", _DETECTOR),),
    ),
    Step(
        "A classifier that returns an index",
        "The output is the index of the best class. `verify` also compares the scores that determine it.",
        (
            "tvmflow build models/classifier.onnx",
            "tvmflow run-model dist/classifier/host/classifier.tvmflow",
        ),
    ),
    Step(
        "Tune with a time budget",
        "`init` writes a recipe with a tuning budget in minutes.",
        (
            "tvmflow init models/net.onnx",
            "sed -i 's/minutes: [0-9.]*/minutes: 1/' net.tvmflow.yaml",
            "tvmflow run net.tvmflow.yaml",
            "tvmflow records ls",
        ),
    ),
    Step(
        "Change one layer",
        "The last convolution gets more channels. Only its kernel is new, so the time budget is spent on it. The other "
        "kernels get no further trials.",
        (
            "python make_first_models.py --channels 24",
            "tvmflow explain net.tvmflow.yaml tune",
            "tvmflow run net.tvmflow.yaml",
            "tvmflow records ls",
            "tvmflow compare latest~1 latest",
        ),
    ),
    Step("Everything is up to date", "", ("tvmflow run net.tvmflow.yaml",)),
)

HOURS: Final = (
    Hour(
        "first-hour.md",
        "The first hour",
        "Every command from a model to a tuned release and a C++ program, with its output. The [tutorial](tutorial.md) "
        "explains the steps, and [another page](first-hour-models.md) starts with other kinds of models.",
        _DIGITS_STEPS,
        ("digits.onnx", "digits-test.npz"),
    ),
    Hour(
        "first-hour-models.md",
        "A first hour with other models",
        "Build a detector, a classifier and a network that changes, with the output of every command. Like "
        "[the first hour](first-hour.md), this starts with a new installation.",
        _MODELS_STEPS,
    ),
)


class Newcomer:
    """A user without anything but a folder with models, and tvmflow installed from its wheel."""

    def __init__(self, folder: Path, models: tuple[str, ...]) -> None:
        """Install tvmflow, and copy files of recipes/models."""
        self.project = folder / "project"
        (self.project / "models").mkdir(parents=True)
        for name in models:
            shutil.copy(_MODELS / name, self.project / "models")
        environment = folder / "venv"
        self._install(environment, folder / "wheel")
        self.variables = {
            "PATH": f"{environment / 'bin'}:{os.defpath}:/usr/local/bin",
            "HOME": str(folder),
            "COLUMNS": str(_COLUMNS),
            "LANG": "C.UTF-8",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        packages = sysconfig.get_path("purelib")
        self.hidden = {
            packages: f"{folder}/venv/lib/site-packages",
            str(folder.resolve()): "/home/ann",
        }

    def _install(self, environment: Path, wheels: Path) -> None:
        def call(*words: object) -> None:
            subprocess.run([*map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

        call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels)
        call(sys.executable, "-m", "venv", environment)
        python = environment / "bin" / "python"
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "other-packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
        call(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *wheels.glob("*.whl"))

    def type(self, command: str) -> tuple[str, int]:
        """Run a command, and return what it prints and its exit code."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.project,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LONGEST_STEP_S,
            check=False,
        )
        output = done.stdout
        for path, name in self.hidden.items():
            output = output.replace(path, name)
        # other runs on the machine that writes the page are not part of it
        return re.sub(r"(?m)^waiting for .*\n", "", output), done.returncode


def walk(hour: Hour, folder: Path | None = None) -> str:
    """Go through all steps of an hour, and return the page with every command and its whole output.

    Args:
        hour: What the user does.
        folder: An empty folder, which stays; None for one that does not.

    Raises:
        SystemExit: when a command's exit code differs from the documented one.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        newcomer = Newcomer(folder or Path(name), hour.models)
        chapters = [_chapter(newcomer, step) for step in hour.steps]
    minutes = (time.monotonic() - started) / 60
    introduction = (
        f"# {hour.title}\n\n"
        f"{hour.about} A script ([tools/first_hour.py](../tools/first_hour.py)) ran these commands with tvmflow's wheel "
        "in a new virtual environment, with an empty home folder. "
        f"Together they took {minutes:.1f} minutes on two cores.\n"
    )
    return "\n".join([introduction, *chapters])


def _chapter(newcomer: Newcomer, step: Step) -> str:
    parts = [f"## {step.title}\n", *([f"{step.text}\n"] if step.text else [])]
    for name, content in step.files:
        (newcomer.project / name).write_text(content)
        kind = {".cpp": "cpp", ".py": "python"}.get(Path(name).suffix, "yaml")
        parts.append(f"`{name}`:\n\n```{kind}\n{content}```\n")
    for command in step.commands:
        print(f"$ {command}", flush=True)
        output, code = newcomer.type(command)
        expected = step.exit_code if command == step.commands[-1] else 0
        if code != expected:
            raise SystemExit(f"{output}\n{command}: exit code {code}, not {expected}")
        lines = [f"$ {command}", *_without_progress(output)]
        parts.append("```console\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


def _without_progress(output: str) -> list[str]:
    """Return the lines without escape sequences, and without those about other runs of the machine."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    lines = [line.rstrip() for line in plain.splitlines()]
    return [line for line in lines if ": waiting for the device " not in line]


def main() -> None:
    """Go through the hours, and write their pages unless --check is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("pages", nargs="*", help="the pages of docs/ to write; all by default")
    arguments = parser.parse_args()
    for hour in HOURS:
        if arguments.pages and hour.page not in arguments.pages:
            continue
        page = walk(hour)
        if not arguments.check:
            hour.path.write_text(page, encoding="utf-8")
            print(f"{hour.path.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()
