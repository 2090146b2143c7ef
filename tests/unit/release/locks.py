"""Lock files."""

from __future__ import annotations

from typing import Any

from tvmflow.recipe.lock_file import LockFile

A, B = "a" * 64, "b" * 64


def lock(**changes: Any) -> LockFile:
    """Return a lock file of one recipe and target; `changes` are `path__to__field=value`."""
    value: dict[str, Any] = {
        "lock": 1,
        "machine": "linux-x86_64",
        "tools": {"apache-tvm": "1"},
        "recipes": {
            "net": {
                "recipe": "net.yaml",
                "version": "1.0",
                "operators": {"nn.conv2d": 2},
                "inputs": {"data": "float32[1×3]"},
                "stages": {
                    "import": {"version": 1, "outputs": {"model.json": A, "params.safetensors": A}},
                    "lower/host": {"version": 1, "settings": {"lowering": {"layout": "blocked"}}},
                    "export/host": {"version": 1, "outputs": {"net.so": A}},
                    "verify/host": {"version": 1, "settings": {"verify": {"rtol": 0.1}}},
                },
                "targets": {
                    "host": {
                        "tvm": {"kind": "llvm"},
                        "cores": 2,
                        "measured": {"latency_us": 1000.0, "bytes": {"net.so": 100}},
                        "kernels": {A: {"names": ["conv"], "calls": 1, "untuned_us": 5.0}},
                    }
                },
            }
        },
    }
    for path, new in changes.items():
        at = value
        *way, last = path.replace("HOST", "host").split("__")
        for step in way:
            at = at[step.replace("_of_", "/")]
        at[last] = new
    return LockFile.model_validate(value)
