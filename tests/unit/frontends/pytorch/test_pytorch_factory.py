"""Factories of PyTorch models: which there are, what they may return, and how their errors are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tvmflow.frontends import pytorch
from tvmflow.frontends.pytorch._worker import (
    Problem,
    describe_error,
    find_factory,
    read_result,
)

CODE = """\
def make():
    return [][3]

_hidden = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, from which modules are imported."""
    (tmp_path / "factory_nets").mkdir()
    (tmp_path / "factory_nets/small.py").write_text(CODE)
    (tmp_path / "factory_nets/broken.py").write_text("import no_such_package")
    (tmp_path / "factory_nets/wrong.py").write_text("x = 1 / 0")
    (tmp_path / "factory_nets/ends.py").write_text("raise SystemExit('no weights')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("factory_nets")]:
        del sys.modules[name]


@pytest.mark.parametrize("text", ["nets:make", "a.b_1.c:_make"])
def test_the_form_of_a_factory(text: str) -> None:
    assert pytorch.is_factory(text)


@pytest.mark.parametrize(
    "text",
    ["nets", "nets.py:make", "nets:", ":make", "a/b:c", "hf://a/b", "a..b:c", "a:b()", "a:b:c"],
)
def test_other_texts_are_none(text: str) -> None:
    """`nets.py:make` has the form, and Python has no such module."""
    assert pytorch.is_factory(text) == (text == "nets.py:make")


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("gone:make", "module", "there is no module 'gone'"),
        ("factory_nets.gone:make", "module", "there is no module 'factory_nets.gone'"),
        ("factory_nets.broken:make", "code", "ModuleNotFoundError: No module named 'no_such_package' (factory_nets/broken.py:1)"),
        ("factory_nets.wrong:make", "code", "ZeroDivisionError: division by zero (factory_nets/wrong.py:1)"),
        ("factory_nets.ends:make", "code", "SystemExit: no weights (factory_nets/ends.py:1)"),
        ("factory_nets.small:maek", "function", "the module has no function 'maek'; did you mean 'make'?"),
        ("factory_nets.small:_hidden", "function", "the module has no function '_hidden'"),
    ],
)  # fmt: skip
def test_what_cannot_be_called(folder: Path, name: str, problem: str, reason: str) -> None:
    """With the line of the user's own code that is wrong."""
    with pytest.raises(Problem) as caught:
        find_factory(name)
    assert (caught.value.problem, str(caught.value)) == (problem, reason)


def test_an_error_of_a_factory_has_its_place(folder: Path) -> None:
    make = find_factory("factory_nets.small:make")
    with pytest.raises(IndexError) as caught:
        make()
    expected = "IndexError: list index out of range (factory_nets/small.py:2)"
    assert describe_error(caught.value) == expected
    # an error from elsewhere has no place that a user could mend
    assert describe_error(KeyError("w")) == "KeyError: 'w'"
    with pytest.raises(ZeroDivisionError) as other:
        1 / 0  # noqa: B018
    assert describe_error(other.value) == "ZeroDivisionError: division by zero"


class Net:
    """Stands for torch.nn.Module."""


@pytest.mark.parametrize(
    ("inputs", "arguments", "named"),
    [((1, 2), (1, 2), {}), ([1], (1,), {}), ({"x": 1}, (), {"x": 1}), (1, (1,), {}), ((), (), {})],
)
def test_inputs_are_positions_or_names(inputs: Any, arguments: Any, named: Any) -> None:
    """One tensor need not be in a tuple."""
    net = Net()
    assert read_result((net, inputs), Net) == (net, arguments, named)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Net(), "it did not return a module and its inputs, but: Net"),
        ((Net(), 1, 2), "it did not return a module and its inputs, but: tuple of 3"),
        (None, "it did not return a module and its inputs, but: NoneType"),
        ((1, Net()), "the first value that it returned is not a torch.nn.Module, but: int"),
    ],
)
def test_other_results_are_refused(result: Any, reason: str) -> None:
    with pytest.raises(Problem) as caught:
        read_result(result, Net)
    assert (caught.value.problem, str(caught.value)) == ("result", reason)


def test_remedies_name_the_module_and_its_function() -> None:
    error = pytorch._factory_error("nets.small:make", "code", "KeyError: 'w'")
    assert str(error) == (
        "nets.small:make: KeyError: 'w'\n"
        "  fix: run it by itself: `python -c 'import nets.small; nets.small.make()'`"
    )
