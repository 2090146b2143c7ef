"""The `tvmflow` command: answers at once if the result is up to date, or calls `cli`."""

from __future__ import annotations

import contextlib
import io
import os
import sys

if sys.platform == "win32":
    sys.stderr.write(
        "tvmflow: Windows is not supported: tvmflow needs the processes and file locks of Linux\n"
        "  fix: run it in WSL (`wsl --install`, then `pip install tvmflow` there); libraries for "
        "Windows are built there, too, with the target x86-64-windows\n"
    )
    sys.exit(4)

from tvmflow.core import termination

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# An option of Python (-X) of a process that was started again.
_OUTPUT_ENCODING = "tvmflow-output-encoding"
_GC_THRESHOLDS = (50_000, 10, 1_000)
_NOT_ANSWERED = ("--verbose", "--help", "-h")


# ENFILE and EMFILE
_TOO_MANY_FILES = (23, 24)
_FREE_SPACE = "free some space where it is redirected to, and run again; finished stages are kept"


def main() -> int:
    """Run the command line of this process and return its exit code."""
    if sys.getfilesystemencoding() != "utf-8":
        _start_again_with_utf8()
    _prepare_streams()
    termination.watch_signals()
    if "HOME" not in os.environ:
        from tvmflow.core.processes import home_variables

        os.environ.update(home_variables())
    argv = sys.argv[1:]
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed it, as in `tvmflow plan … | head`: SIGPIPE ends other programs then.
        _discard_output()
        code = 141
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            # while modules are imported, which `cli` does not see
            text = f"{error.filename}: {error.strerror}"
            fix = "allow more open files (ulimit -n 4096)"
        else:
            from tvmflow.core.disk_errors import describe_output

            text = f"standard output cannot be written{describe_output()}: {error.strerror}"
            fix = _FREE_SPACE
        with contextlib.suppress(OSError):
            sys.stderr.write(f"tvmflow: {text}\n  fix: {fix}\n")
        _discard_output()
        code = 4
    finally:
        if termination.signal_number():
            termination.end()
    return code


def _start_again_with_utf8() -> NoReturn:
    """Replace this process by one in which names of files are UTF-8, as in recipes and on disk.

    In the locale C, Python would have no name for a folder such as `bücher`. Output keeps its encoding.
    """
    # for the processes that this one starts
    os.environ["PYTHONUTF8"] = "1"
    encoding = sys.stdout.encoding if sys.stdout else "utf-8"
    options = ("-X", "utf8", "-X", f"{_OUTPUT_ENCODING}={encoding}")
    os.execv(sys.executable, [sys.executable, *options, *sys.orig_argv[1:]])


def _prepare_streams() -> None:
    """Make standard streams safe: any character in any encoding; closed streams become /dev/null."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # the next file that is opened would get the number, and what is printed would go there
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    stdout: Any = sys.stdout
    if encoding := sys._xoptions.get(_OUTPUT_ENCODING):
        stderr: Any = sys.stderr
        for stream in (stdout, stderr):
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    is_unsafe = stdout.errors == "strict" or stdout.encoding.lower() not in ("utf-8", "utf8")
    raw: Any = _Output(1, "w", closefd=False)
    is_unbuffered = stdout.write_through
    sys.stdout = io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stdout.encoding,
        errors="backslashreplace" if is_unsafe else stdout.errors,
        line_buffering=stdout.line_buffering,
        write_through=is_unbuffered,
    )


class _Output(io.FileIO):
    """Standard output, whose errors differ from those of files."""

    def write(self, content: Any, /) -> int:
        """Write bytes.

        Raises:
            BrokenPipeError: when nobody reads them.
            OutputError: when they cannot be written otherwise.
        """
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as error:
            from tvmflow.core.disk_errors import OutputError

            raise OutputError(error.errno, error.strerror) from error


def _discard_output() -> None:
    """Keep Python from writing the rest of the output at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        # no file descriptor is left to open os.devnull with, so nothing can be written, not even an error
        os.close(sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if argv == ["--version"]:
        from tvmflow.core.version import VERSION

        sys.stdout.write(f"tvmflow {VERSION}\n")
        return 0
    if argv in (["help"], ["--help"], ["-h"]):
        from tvmflow.cli.commands import overview

        sys.stdout.write(overview())
        return 0
    # `-v` asks for the decisions of a full evaluation, and no help was ever saved as an answer.
    has_answer = not any(word.strip("v") == "-" or word in _NOT_ANSWERED for word in argv)
    if argv[:1] in (["run"], ["plan"]) and has_answer and "TVMFLOW_LOG" not in os.environ:
        from tvmflow.engine.answers import find_answer

        text = find_answer(argv)
        if text is not None:
            sys.stdout.write(text)
            return 0
    # Few of a command's objects become garbage before it ends, and hardly any in the older generations.
    # Collecting them would take a tenth of the run time, so the thresholds are raised.
    import gc

    gc.set_threshold(*_GC_THRESHOLDS)
    # Importing argparse, YAML and pydantic takes longer than all of an up-to-date run.
    from tvmflow.cli import main as cli

    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
