"""Running files of operators: what they register, and errors with file and line of the user's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvmflow.core.errors import StageError
from tvmflow.custom_operators import Node, loading
from tvmflow.custom_operators.definition import OperatorError
from tvmflow.custom_operators.loading import Operators, load_operators

REGISTERS = """\
from tvmflow.custom_operators import operator
@operator("Pool", domain="org.example")
def pool(node, x):
    return x
"""


@pytest.fixture(autouse=True)
def forget_modules() -> Iterator[None]:
    """Leave the process as it was."""
    yield
    loading.forget_operators()


def load(folder: Path, **texts: str) -> Operators:
    """Load files by their names without suffix; those that begin with `helper` are imported only."""
    files = {}
    for name, text in texts.items():
        path = folder / f"{name}.py"
        path.write_text(text)
        role = "operator import:" if name.startswith("helper") else "operator:"
        files[f"{role}{path.name}"] = path
    return load_operators(files)


def test_a_file_registers_operators_by_domain_and_version(tmp_path: Path) -> None:
    """The newest implementation that the model's version of the domain has is used."""
    text = REGISTERS + REGISTERS.replace('example"', 'example", since_version=3').replace(
        "pool", "newer"
    )
    operators = load(tmp_path, own_pool=text)
    assert [str(entry) for entry in operators.operators] == ["Pool (org.example)"] * 2
    versions = [operators.find("org.example", "Pool", version) for version in (1, 2, 3, 9)]
    assert [entry and entry.since_version for entry in versions] == [1, 1, 3, 3]
    assert operators.find("other", "Pool", 1) is None
    assert operators.operators[0].where == f"{tmp_path}/own_pool.py:2"


def test_a_module_beside_it_is_imported_if_it_is_listed(tmp_path: Path) -> None:
    load(tmp_path, own_pool=f"import helper_shapes\n{REGISTERS}", helper_shapes="size = 3\n")
    assert "helper_shapes" in sys.modules
    assert not (tmp_path / "__pycache__").exists()
    (tmp_path / "unlisted_shapes.py").write_text("")
    with pytest.raises(StageError, match=r"own_pool.py:1: .* ModuleNotFoundError"):
        load(tmp_path, own_pool=f"import unlisted_shapes\n{REGISTERS}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"own_pool.py registers no operator"),
        (
            REGISTERS * 2,
            r"own_pool.py:6: .* Pool \(org.example\) is registered already, at \S+own_pool.py:2",
        ),
        ("\nx = 1 / 0\n", r"own_pool.py:2: .* ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit()\n", r"own_pool.py:2: .* SystemExit"),
        (
            "from tvmflow.custom_operators import operator\noperator(3, domain='x')\n",
            r"own_pool.py:2: .* is a string, not 3",
        ),
        (
            "from tvmflow.custom_operators import operator\n\noperator('X')\n",
            r"own_pool.py:3: .* TypeError",
        ),
    ],
)
def test_a_file_that_fails_is_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StageError, match=message) as caught:
        load(tmp_path, own_pool=text)
    assert caught.value.exit_code == 1
    assert "docs/custom-operators.md" in caught.value.fix


def test_an_endless_loop_is_stopped_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that catches all errors."""
    monkeypatch.setattr(loading, "_LIMIT_S", 1)
    loop = "while True:\n    try:\n        x = 1\n    except Exception:\n        pass\n"
    with pytest.raises(StageError, match=r"own_pool.py:[1-5]: .* does not end: .* 1 s"):
        load(tmp_path, own_pool=loop)


def test_a_file_named_like_an_installed_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="has the name of an installed module, 'json'"):
        load(tmp_path, json=REGISTERS)


def test_a_file_of_c_that_is_not_utf_8_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "pool.c").write_bytes("int x;\n/* Zürich */\n".encode("latin-1"))
    (tmp_path / "own_pool.py").write_text(REGISTERS)
    files = {f"operator:{name}": tmp_path / name for name in ("own_pool.py", "pool.c")}
    with pytest.raises(StageError, match=r"pool.c:2: the file is not UTF-8 text"):
        load_operators(files)


def test_an_error_of_an_implementation_has_its_line(tmp_path: Path) -> None:
    operators = load(tmp_path, own_pool=REGISTERS.replace("return x", "return x.missing"))
    [entry] = operators.operators
    with pytest.raises(
        StageError, match=r"own_pool.py:4: the implementation of the operator Pool"
    ) as caught:
        operators.call(entry, entry.implement, None, 3)
    assert "AttributeError" in caught.value.message


def test_a_node_of_a_reference_emits_no_kernels() -> None:
    node = Node(operator="Pool", domain="d", version=1, attributes={}, inputs=(), outputs=1)
    with pytest.raises(OperatorError, match=r"'x' is not a tensor"):
        node.c("void f() {}", "f", "x", outputs=[])
