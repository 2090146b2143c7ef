"""Logging: which level, and where lines go."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from tvmflow.core import logs


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """Leave the loggers as they were."""
    logger = logging.getLogger("tvmflow")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.mark.parametrize(
    ("verbosity", "variable", "level"),
    [
        (0, None, logging.WARNING),
        (0, "debug", logging.DEBUG),
        (0, "INFO", logging.INFO),
        (0, "loud", logging.WARNING),
        (-1, "debug", logging.ERROR),
        (1, "error", logging.INFO),
        (2, None, logging.DEBUG),
        (3, None, logging.DEBUG),
    ],
)
def test_the_command_line_goes_before_the_variable(
    verbosity: int, variable: str | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv(logs.LEVEL_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(logs.LEVEL_VARIABLE, variable)
    assert logs.level_for(verbosity) == level


def test_a_level_that_does_not_exist_is_named_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line; without the variable, and with an empty one, nothing is said."""
    stream = io.StringIO()
    logs.configure(logging.WARNING, stream)
    for name in ("", "DEBUG", "loud\n"):
        monkeypatch.setenv(logs.LEVEL_VARIABLE, name)
        logs.check_level()
    [line] = stream.getvalue().splitlines()
    assert "$TVMFLOW_LOG: 'loud' is not a level (valid: debug, info, warning, error)" in line


def test_lines_name_level_and_module_and_go_to_one_stream() -> None:
    """A second call replaces the stream of the first."""
    first, second = io.StringIO(), io.StringIO()
    logger = logging.getLogger("tvmflow.planning.plan")
    logs.configure(logging.INFO, first)
    logger.debug("hidden")
    logger.info("%d stages", 7)
    logs.configure(logging.ERROR, second)
    logger.info("hidden")
    logger.error("broken")
    [line] = first.getvalue().splitlines()
    assert line.endswith("INFO    tvmflow.planning.plan: 7 stages")
    [line] = second.getvalue().splitlines()
    assert line.endswith("ERROR   tvmflow.planning.plan: broken")


def test_lines_stay_out_of_other_loggers(caplog: pytest.LogCaptureFixture) -> None:
    """A program that embeds tvmflow does not get each line twice."""
    logs.configure(logging.INFO, io.StringIO())
    logging.getLogger("tvmflow.engine").warning("once")
    assert caplog.records == []


def test_text_from_elsewhere_is_one_line_of_a_log() -> None:
    """A name with a line break cannot forge a line, and none commands the terminal; tracebacks keep their lines."""
    stream = io.StringIO()
    logs.configure(logging.INFO, stream)
    logger = logging.getLogger("tvmflow.frontends")
    name = "a\n2026-01-01 ERROR \x1b[2J"
    logger.info("node %s", name)
    try:
        raise ValueError(name)
    except ValueError:
        logger.error("failed", exc_info=True)
    first, second, *rest = stream.getvalue().splitlines()
    assert first.endswith("INFO    tvmflow.frontends: node a\\n2026-01-01 ERROR \\x1b[2J")
    assert second.endswith("ERROR   tvmflow.frontends: failed")
    assert rest[0] == "Traceback (most recent call last):"
    assert "\x1b" not in stream.getvalue()
