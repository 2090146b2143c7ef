"""Vectors of a fixed length on machines whose vectors have any."""

from __future__ import annotations

from typing import Any, Final

import tvm_ffi

_ASKED: Final = "target.target_has_feature"
# What makes TVM's vectoriser turn loops into ones over masked vectors of unknown length.
_SCALABLE: Final = "v"


def use_fixed_lengths() -> None:
    """Have loops over vectors stay what schedules say on RISC-V, in this process, before anything is compiled.

    Over masked vectors of unknown length no result stays in a register: each multiplication
    loads and stores its accumulator (apache-tvm 0.27); and buffers that are also filled lane by
    lane make TVM fail. LLVM makes RVV instructions of fixed vectors as it makes NEON of them.
    """
    asked = tvm_ffi.get_global_func(_ASKED)

    def has_feature(feature: str, target: Any = None) -> bool:
        return feature != _SCALABLE and bool(asked(feature, target))

    tvm_ffi.register_global_func(_ASKED, has_feature, override=True)
