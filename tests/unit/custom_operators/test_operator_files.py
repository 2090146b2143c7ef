"""The files of operators that a plan lists: those that a recipe names, and the modules beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.core.errors import RecipeError
from tvmflow.custom_operators.loading import list_operator_files


def where(index: int) -> str:
    return f"net.yaml:4:{index}"


def roles(folder: Path, *names: str) -> dict[str, str]:
    files = list_operator_files(names, folder, where).files
    return {file.role: str(Path(file.path).relative_to(folder)) for file in files}


def test_modules_that_a_file_imports_from_its_folder_are_listed(tmp_path: Path) -> None:
    """Also those that these import, and imports inside functions; what lies elsewhere is not."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/pool.py").write_text(
        "import numpy, shapes\ndef f():\n    from tables import x\n"
    )
    (tmp_path / "ops/shapes.py").write_text("import deeper.inner\n")
    (tmp_path / "ops/deeper.py").write_text("import shapes, pool\n")
    (tmp_path / "ops/tables.py").write_text("x = 1\n")
    (tmp_path / "ops/unused.py").write_text("")
    (tmp_path / "pool.c").write_text("")
    assert roles(tmp_path, "ops/pool.py", "pool.c") == {
        "operator:pool.py": "ops/pool.py",
        "operator:pool.c": "pool.c",
        "operator import:shapes.py": "ops/shapes.py",
        "operator import:tables.py": "ops/tables.py",
        "operator import:deeper.py": "ops/deeper.py",
    }


def test_a_module_that_may_appear_is_watched(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text("import shapes")
    assert list_operator_files(["pool.py"], tmp_path, where).candidates == (tmp_path / "shapes.py",)


def test_a_file_is_not_run_by_planning(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text("while True: pass")
    assert list(roles(tmp_path, "pool.py")) == ["operator:pool.py"]


@pytest.mark.parametrize("text", ["x = (", "def f(:\n", "(" * 5000, "\0"])
def test_a_file_that_is_no_python_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "pool.py").write_text(text)
    with pytest.raises(RecipeError, match=r"^net.yaml:4:0: operators: \S*pool.py") as caught:
        roles(tmp_path, "pool.py")
    assert caught.value.exit_code == 2


def test_a_name_that_python_cannot_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.pool.py").write_text("")
    with pytest.raises(
        RecipeError, match=r"operators.0: .* cannot import \S+own.pool.py"
    ) as caught:
        roles(tmp_path, "own.pool.py")
    assert "own_pool.py" in caught.value.fix


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pool.py").write_text("")
    with pytest.raises(RecipeError, match=r"net.yaml:4:1: operators.1: \S+b/pool.py has the name"):
        roles(tmp_path, "a/pool.py", "b/pool.py")
