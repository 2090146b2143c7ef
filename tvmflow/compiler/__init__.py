"""Compilation of imported models: lowering, schedules of untuned kernels, code generation.

This package owns everything between an imported model and object code, except tuning. Other folders import only the
names below. Each name loads its module when it is first read, because planning must not load TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmflow.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from tvmflow.compiler.c_program import LibraryForWeights as LibraryForWeights
    from tvmflow.compiler.c_program import link_kernel as link_kernel
    from tvmflow.compiler.c_program import load_c_library as load_c_library
    from tvmflow.compiler.c_program.c_kernels import make_assembly as make_assembly
    from tvmflow.compiler.c_program.program import find_runtime as find_runtime
    from tvmflow.compiler.code_generation import build_kernels as build_kernels
    from tvmflow.compiler.contraction.machine import CpuModel as CpuModel
    from tvmflow.compiler.forms import compile_form as compile_form
    from tvmflow.compiler.lowering import LoweredModel as LoweredModel
    from tvmflow.compiler.lowering import ScheduledModel as ScheduledModel
    from tvmflow.compiler.lowering import lower as lower
    from tvmflow.compiler.options import SCHEDULES_VERSION as SCHEDULES_VERSION
    from tvmflow.compiler.options import LoweringOptions as LoweringOptions
    from tvmflow.compiler.options import VectorWidth as VectorWidth
    from tvmflow.compiler.schedules import generate_schedules as generate_schedules
    from tvmflow.compiler.schedules import schedule_untuned as schedule_untuned
    from tvmflow.compiler.schedules.intrinsics import load_intrinsics as load_intrinsics

__getattr__ = lazy_names(
    __name__,
    {
        "c_program": "LibraryForWeights link_kernel load_c_library",
        "c_program.c_kernels": "make_assembly",
        "c_program.program": "find_runtime",
        "code_generation": "build_kernels",
        "contraction.machine": "CpuModel",
        "forms": "compile_form",
        "lowering": "LoweredModel ScheduledModel lower",
        "options": "SCHEDULES_VERSION LoweringOptions VectorWidth",
        "schedules": "generate_schedules schedule_untuned",
        "schedules.intrinsics": "load_intrinsics",
    },
)
