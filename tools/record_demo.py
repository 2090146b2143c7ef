"""Records the commands of the README in a terminal, and draws them as docs/images/demo.svg: `make recording`.

The picture moves where the viewer allows it, and shows its last screen where not: before it moves, where less
motion is preferred, and in programs that know no animations. It has light and dark colours. Everything in it
is the output of a real run; only long waits are cut.
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import pyte

ROOT: Final = Path(__file__).resolve().parent.parent
OUTPUT: Final = ROOT / "docs" / "images" / "demo.svg"

COLUMNS: Final = 92
ROWS: Final = 34
_COMMANDS: Final = (
    "cat digits.yaml",
    "tvmflow run digits.yaml",
    "tvmflow run digits.yaml",
)
RECIPE: Final = """\
recipe: 1
name: digits
model: {onnx: digits.onnx}
targets: [host]
tune: {trials: 32}
outputs: [cpp, bundle]
verify: {data: digits-test.npz, min_accuracy: 0.95}
"""
_LONGEST_WAIT_S: Final = 0.7
_FRAME_S: Final = 0.4
"""How often a screen is kept; it is shown for half as long."""

_READING_S: Final = 2.5
_LAST_S: Final = 8.0
_POSTER_S: Final = 2.0
"""For how long the last screen is shown before the first one: it is what a still of the picture has."""

_CHARACTER: Final = 8.4
_LINE: Final = 18
_MARGIN: Final = 16


class Span(NamedTuple):
    """Characters of one line in one style."""

    column: int
    text: str
    style: str


class Frame(NamedTuple):
    """A screen, and for how long it is shown."""

    lines: tuple[tuple[Span, ...], ...]
    seconds: float


class Recorder:
    """A terminal, and the screens that it has shown."""

    def __init__(self) -> None:
        """Start with an empty screen."""
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.frames: list[Frame] = []
        self.waited_s = 0.0

    def show(self, data: bytes, seconds: float) -> None:
        """Write to the terminal after some seconds; what it has shown for long enough is kept."""
        self.waited_s += seconds
        if self.waited_s >= _FRAME_S:
            self.keep(min(self.waited_s, _LONGEST_WAIT_S) / 2)
            self.waited_s = 0.0
        self.stream.feed(data)

    def keep(self, seconds: float) -> None:
        """Add the present screen to the frames, or prolong the last one if it is the same."""
        lines = tuple(_spans(self.screen, row) for row in range(ROWS))
        if self.frames and self.frames[-1].lines == lines:
            seconds += self.frames.pop().seconds
        self.frames.append(Frame(lines, seconds))

    def type(self, command: str) -> None:
        """Type a command at the prompt."""
        self.show(b"\x1b[1;32m$\x1b[0m ", 0.0)
        for start in range(0, len(command), 4):
            self.stream.feed(command[start : start + 4].encode())
            self.keep(0.1)
        self.show(b"\r\n", _FRAME_S)

    def run(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        """Run a command in a terminal of its own, and record what it writes."""
        self.type(command)
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "-c", command], environment)
        _set_size(terminal)
        last = time.monotonic()
        while chunk := _read(terminal):
            now = time.monotonic()
            self.show(chunk, now - last)
            last = now
        os.close(terminal)
        _, status = os.waitpid(process, 0)
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{command}: exit code {os.waitstatus_to_exitcode(status)}")
        self.keep(_READING_S)


def _set_size(terminal: int) -> None:
    subprocess.run(["stty", "rows", str(ROWS), "cols", str(COLUMNS)], stdin=terminal, check=True)


def _read(terminal: int) -> bytes:
    """Return what was written, joined while more comes at once; nothing at the end."""
    data = b""
    while not data or select.select([terminal], [], [], 0.02)[0]:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:
            break
        if not chunk:
            break
        data += chunk
    return data


def _spans(screen: pyte.Screen, row: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    for column in range(COLUMNS):
        cell = screen.buffer[row][column]
        style = _style(cell)
        if spans and spans[-1].style == style:
            spans[-1] = spans[-1]._replace(text=spans[-1].text + cell.data)
        else:
            spans.append(Span(column, cell.data, style))
    return tuple(span._replace(text=span.text.rstrip()) for span in spans if span.text.strip())


def _style(cell: pyte.screens.Char) -> str:
    known = ("black", "red", "green", "brown", "blue", "magenta", "cyan", "white")
    names = [cell.fg.removeprefix("bright")] if cell.fg.removeprefix("bright") in known else []
    names += ["dim"] if cell.fg in ("brightblack",) else []
    return " ".join([*names, *(["bold"] if cell.bold else [])])


_FONTS: Final = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_STYLE: Final = """\
    .window { fill: #fbfcfd; stroke: #cbd2d9; }
    text { fill: #1f2933; white-space: pre; }
    .bold { font-weight: bold; }
    .red { fill: #ba2525; } .green { fill: #207227; } .brown { fill: #8d5a00; } .blue { fill: #2251cc; }
    .magenta { fill: #8719e0; } .cyan { fill: #0a6c74; } .white { fill: #616e7c; } .dim { fill: #7b8794; }
    @media (prefers-color-scheme: dark) {
      .window { fill: #11181f; stroke: #3e4c59; }
      text { fill: #e4e7eb; }
      .red { fill: #f86a6a; } .green { fill: #74d99f; } .brown { fill: #f7c948; } .blue { fill: #8bb4ff; }
      .magenta { fill: #d0a2f7; } .cyan { fill: #62d7e0; } .white { fill: #cbd2d9; } .dim { fill: #9aa5b1; }
    }
    .frame { visibility: hidden; }
    .last { visibility: visible; }
    @media (prefers-reduced-motion: no-preference) {
      .frame { animation: 1s step-end POSTER infinite; }
"""


def draw(frames: list[Frame]) -> str:
    """Return an animated SVG of the frames."""
    frames = [*frames[:-1], frames[-1]._replace(seconds=_LAST_S)]
    total = sum(frame.seconds for frame in frames)
    unique = {line: f"l{index}" for index, line in enumerate(_unique_lines(frames))}
    rules, groups, start = [], [], 0.0
    for index, frame in enumerate(frames):
        end = start + frame.seconds
        begin_at, end_at = (f"{100 * value / total:.2f}%" for value in (start, end))
        hidden, shown = "{visibility:hidden}", "{visibility:visible}"
        before = f"0%{hidden}" if index else ""
        after = f"{end_at}{hidden}" if end < total - 1e-6 else ""
        rules.append(f"@keyframes f{index}{{{before}{begin_at}{shown}{after}}}")
        rules.append(f"#f{index}{{animation-name:f{index};animation-duration:{total:.1f}s}}")
        uses = "".join(
            f'<use href="#{unique[line]}" y="{row * _LINE}"/>'
            for row, line in enumerate(frame.lines)
            if line
        )
        last = " last" if index == len(frames) - 1 else ""
        groups.append(f'<g class="frame{last}" id="f{index}">{uses}</g>')
        start = end
    width, height = COLUMNS * _CHARACTER + 2 * _MARGIN, ROWS * _LINE + 2 * _MARGIN
    definitions = "\n".join(
        f'<g id="{name}">{"".join(map(_text, line))}</g>' for line, name in unique.items()
    )
    newline, style = "\n", _STYLE.replace("POSTER", f"{_POSTER_S}s")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'role="img" aria-label="tvmflow in a terminal" xml:space="preserve" font-size="14" '
        f'font-family="{_FONTS}">\n'
        f"<title>tvmflow builds, tunes and verifies a network; the second run has nothing to do</title>\n"
        f"<style>\n{style}{newline.join(rules)}\n    }}\n</style>\n"
        f"<defs>\n{definitions}\n</defs>\n"
        f'<rect class="window" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>\n'
        f'<g transform="translate({_MARGIN} {_MARGIN + 13})">\n{newline.join(groups)}\n</g>\n</svg>\n'
    )


def _unique_lines(frames: list[Frame]) -> dict[tuple[Span, ...], None]:
    return {line: None for frame in frames for line in frame.lines if line}


def _text(span: Span) -> str:
    style = f' class="{span.style}"' if span.style else ""
    length = f' textLength="{len(span.text) * _CHARACTER:.1f}"'
    return f'<text{style} x="{span.column * _CHARACTER:.1f}"{length}>{escape(span.text)}</text>'


def main() -> None:
    """Record and draw."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits.yaml").write_text(RECIPE)
        for file in ("digits.onnx", "digits-test.npz"):
            shutil.copy(ROOT / "recipes" / "models" / file, folder)
        tools = folder / ".tools"
        tools.mkdir()
        (tools / "tvmflow").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tvmflow "$@"\n')
        (tools / "tvmflow").chmod(0o755)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TVMFLOW_")},
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "HOME": name,
            "TMPDIR": name,
            "COLUMNS": str(COLUMNS),
        }
        for command in _COMMANDS:
            recorder.run(command, folder, environment)
    recorder.stream.feed(b"\x1b[1;32m$\x1b[0m ")
    recorder.keep(_LAST_S)
    OUTPUT.write_text(draw(recorder.frames), encoding="utf-8")
    print(f"{OUTPUT.relative_to(ROOT)}: {len(recorder.frames)} frames")


if __name__ == "__main__":
    main()
