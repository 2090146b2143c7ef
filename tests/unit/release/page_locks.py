"""Lock files of releases, for their pages."""

from __future__ import annotations

from tvmflow.recipe.lock_file import (
    LockedKernel,
    LockedRecipe,
    LockedTarget,
    LockFile,
    Measurements,
)
from tvmflow.tuning.trials import trial_id

TARGET = LockedTarget(
    tvm={"kind": "llvm", "mcpu": "<skylake>"},
    cores=2,
    measured=Measurements(latency_us=123.0, accuracy=0.5, bytes={"net.so": 1200}),
    kernels={
        "a": LockedKernel(names=["conv"], calls=1, untuned_us=456.0, flops=1e6),
        "b": LockedKernel(
            names=["pool"],
            calls=9,
            untuned_us=99.0,
            tuned_us=88.0,
            trial=trial_id([[], []]),
            trace="[[], []]",
        ),
    },
)


def lock(*names: str) -> LockFile:
    """Return a lock file in which all recipes are variants of one file."""
    recipe = LockedRecipe(recipe="net.yaml", version="2", stages={}, targets={"host": TARGET})
    recipes = dict.fromkeys(names or ("net",), recipe)
    return LockFile(
        lock=1, machine="linux-x86_64", tools={"apache-tvm": "0.27+abc"}, recipes=recipes
    )
