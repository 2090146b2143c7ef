"""The differences of two lock files, as reviewers see them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.release.locks import A, B, lock
from tvmflow.release.lock import diff_locks


@pytest.mark.parametrize(
    ("path", "new", "change"),
    [
        ("tools__apache-tvm", "2", ("everywhere", "package", "apache-tvm 1 -> 2")),
        ("machine", "x", ("everywhere", "machine", "linux-x86_64 -> x")),
        ("recipes__net__version", "1.1", ("net", "version", "1.0 -> 1.1")),
        (
            "recipes__net__stages__import__outputs",
            {"model.json": A, "params.safetensors": B},
            ("net", "weights", "changed; the operators are the same"),
        ),
        (
            "recipes__net__inputs__data",
            "float32[8×3]",
            ("net", "inputs", "data float32[1×3] -> float32[8×3]"),
        ),
        (
            "recipes__net__stages__verify_of_host__settings",
            {"verify": {"rtol": 0.5}},
            ("net", "settings", "verify.rtol 0.1 -> 0.5"),
        ),
        (
            "recipes__net__targets__host__tvm__kind",
            "cuda",
            ("net/host", "target", "kind llvm -> cuda"),
        ),
        (
            "recipes__net__targets__host__features",
            ["avx2"],
            ("net/host", "target", "avx2 now used"),
        ),
        (
            "recipes__net__targets__host__measured__latency_us",
            800.0,
            ("net/host", "latency", "1 ms -> 800 µs (-20.0%)"),
        ),
        (
            "recipes__net__targets__host__measured__accuracy",
            0.5,
            ("net/host", "accuracy", "unknown -> 50.00%"),
        ),
        (
            "recipes__net__targets__host__kernels",
            {},
            ("net/host", "kernels", "0 unchanged, 1 removed"),
        ),
    ],
)
def test_each_change_has_one_line(path: str, new: Any, change: tuple[str, str, str]) -> None:
    changes = diff_locks(lock(), lock(**{path: new}))
    assert change in changes
    assert diff_locks(lock(), lock()) == []


def test_operators_are_counted() -> None:
    after = lock(
        recipes__net__operators={"nn.conv2d": 3, "add": 1},
        recipes__net__stages__import__outputs={"model.json": B, "params.safetensors": A},
    )
    assert ("net", "operators", "add none -> 1, nn.conv2d 2 -> 3") in diff_locks(lock(), after)


def test_a_file_of_another_size_is_shown_with_both_sizes() -> None:
    after = lock(
        recipes__net__stages__export_of_host__outputs={"net.so": B},
        recipes__net__targets__host__measured__bytes={"net.so": 150},
    )
    changed = ("net/host", "file", "net.so changed, 100 bytes -> 150 bytes (+50.0%)")
    assert changed in diff_locks(lock(), after)


def test_added_and_removed_recipes_and_targets_are_shown() -> None:
    without = lock(recipes={})
    assert diff_locks(without, lock()) == [("net", "recipe", "added")]
    assert diff_locks(lock(), without) == [("net", "recipe", "removed")]
    assert diff_locks(lock(), lock(recipes__net__targets={})) == [("net/host", "target", "removed")]
