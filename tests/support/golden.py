"""The digests of the kernels of a few models, with the versions that are part of stage keys.

`python -m tests.support.golden` records the digests again.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tests.support import tuning
from tests.support.kernels import FAST
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction.machine import cpu_model_for
from tvmflow.compiler.options import LOWERING_VERSION, SCHEDULES_VERSION, LoweringOptions
from tvmflow.compiler.schedules.rules import schedule_for_cpu
from tvmflow.graph import ir
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.workloads import normalize, workload_key

FILE: Final = Path(__file__).with_name("golden.json")
TARGET: Final = {
    "kind": "llvm",
    "mtriple": "x86_64-linux-gnu",
    "mcpu": "x86-64-v3",
    "num-cores": 2,
}

Digests = dict[str, list[str]]


def _models() -> list[Any]:
    from tvm import relax

    op = relax.op

    def channels(value: Any) -> int:
        return int(value.ty.shape[1])

    def depthwise(value: Any, weight: Any) -> Any:
        kernel = weight((channels(value), 1, 3, 3))
        return op.nn.conv2d(value, kernel, groups=channels(value), padding=1, strides=2)

    def grouped(value: Any, weight: Any) -> Any:
        return op.nn.conv2d(value, weight((32, channels(value) // 8, 3, 3)), groups=8)

    def transposed(value: Any, weight: Any) -> Any:
        return op.nn.conv2d_transpose(value, weight((channels(value), 16, 4, 4)), strides=2)

    def pooled(value: Any, _: Any) -> Any:
        return op.nn.max_pool2d(value, pool_size=3, strides=2)

    image = [tuning.conv(32), tuning.relu, depthwise, grouped, pooled, transposed]
    rows = [tuning.dense(48), tuning.relu, tuning.dense(40), tuning.softmax]
    return [
        tuning.model(*image, shape=(1, 3, 32, 32)),
        tuning.model(*rows, shape=(8, 64)),
    ]


def digest_each(mod: Any, target: dict[str, Any], options: LoweringOptions) -> Digests:
    """Return the digests of the kernels of a model by name: as it is lowered, and as it is scheduled."""
    lowered = lowering.lower(mod, make_target(target), options).mod
    scheduled, _ = schedule_for_cpu(lowered, cpu_model_for(target, 1))
    return {
        name: [workload_key(normalize(each[name])) for each in (lowered, scheduled)]
        for name in ir.list_kernels(lowered)
    }


def digest_kernels() -> dict[str, Any]:
    """Return `{"tvm": its version, "lowering": [version, digest], "schedules": [version, digest]}`."""
    pairs = [pair for mod in _models() for pair in digest_each(mod, TARGET, FAST).values()]
    digests = dict(zip(("lowering", "schedules"), zip(*pairs, strict=True), strict=True))
    numbers = {"lowering": LOWERING_VERSION, "schedules": SCHEDULES_VERSION}
    return {
        "tvm": version("apache-tvm"),
        **{
            part: [numbers[part], hashlib.sha256("".join(keys).encode()).hexdigest()]
            for part, keys in digests.items()
        },
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(digest_kernels(), indent=1) + "\n")
