"""Code of device functions for NVIDIA GPUs; to run it, only the driver is needed.

NVRTC compiles CUDA C to machine code, and to PTX for later GPUs. For GPUs that CUDA 13 does not support, LLVM
generates PTX. TVM 0.27 does not match the LLVM 22 of its wheel: its barriers and shuffles lack arguments, and LLVM
ignores its attribute for kernels. So LLVM's own barriers and shuffles are used, and TVM's LLVM IR is parsed again.
"""

from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.core.errors import StageError
from tvmflow.targets.backends.cuda import gpu, nvrtc

_IMAGE_ALIGNMENT: Final = 8
_TRIPLE: Final = "nvptx64-nvidia-cuda"
# TVM cannot set the PTX version. For this CPU, LLVM uses 6.0, the first version that synchronizes a warp.
_FIRST_CPU: Final = "sm_70"
# The PTX version that CUDA 10.0's driver reads; some boards have no CUDA after 10.2.
_PTX_VERSION: Final = "+ptx63"
_WARP_SIZE: Final = 32
_WHOLE_WARP: Final = -1
# The last lane that a thread may read in a segment: for shuffles to later lanes, and to earlier ones.
_LAST_LANE: Final = 31
_FIRST_LANE: Final = 0
# A PTX shuffle encodes the segment's size in the bits above the lane.
_SEGMENT_SHIFT: Final = 8
_SHUFFLED_BITS: Final = 32
# libdevice has only float32 and float64 functions.
_SMALLEST_BITS: Final = 32

_BARRIERS: Final[Mapping[str, tuple[str, int]]] = {
    "shared": ("llvm.nvvm.barrier.cta.sync.aligned.all", 0),
    "shared.dyn": ("llvm.nvvm.barrier.cta.sync.aligned.all", 0),
    "warp": ("llvm.nvvm.bar.warp.sync", _WHOLE_WARP),
}
_SHUFFLES: Final[Mapping[str, tuple[str, int]]] = {
    "tirx.tvm_warp_shuffle": ("idx", _LAST_LANE),
    "tirx.tvm_warp_shuffle_up": ("up", _FIRST_LANE),
    "tirx.tvm_warp_shuffle_down": ("down", _LAST_LANE),
}
# TVM operators -> libdevice functions.
_LIBDEVICE_FUNCTIONS: Final[Mapping[str, str]] = {
    f"tirx.{name}": name
    for name in (
        *("exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "erf", "pow", "rsqrt"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "hypot"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        *("fabs", "floor", "trunc", "round", "nearbyint", "fmod"),
        *("copysign", "nextafter", "ldexp"),
    )
} | {"prim.ceil": "ceil", "prim.log2": "log2"}
# TVM operators -> LLVM intrinsics. libdevice's square root is approximate unless clang sets an option.
_LLVM_FUNCTIONS: Final[Mapping[str, str]] = {
    "tirx.fma": "llvm.fma",
    "tirx.popcount": "llvm.ctpop",
    "tirx.sqrt": "llvm.sqrt",
}
# Higher than the level of TVM's own rules, so that these rules win.
_RULE_LEVEL: Final = 99
_COMPILER_CALLBACK: Final = "tvm_callback_cuda_compile"
_LIBDEVICE_CALLBACK: Final = "tvm_callback_libdevice_path"


def lowering_target(target: tvm.target.Target) -> tvm.target.Target:
    """Return the target for which kernels of a CUDA target are lowered to device functions."""
    fields = target.export()
    if not gpu.is_unknown_to_nvrtc(fields["arch"]):
        return target
    return tvm.target.Target(
        {
            "kind": "nvptx",
            "mcpu": _FIRST_CPU,
            "max_num_threads": fields["max_threads_per_block"],
            "host": fields["host"],
        }
    )


def generate_device_code(functions: tvm.IRModule, target: tvm.target.Target) -> bytes:
    """Return the code of kernels as images; the driver loads the first image that it can.

    The format is: the number of images, the offset and the bytes of each, then the images (see `cuda.c`). Raises
    EnvironmentProblem without a compiler, and StageError if a kernel cannot be compiled.
    """
    arch = str(target.arch)
    if gpu.is_unknown_to_nvrtc(arch):
        return _join_images([generate_ptx(functions, arch)])
    compiled = nvrtc.compile_kernels(_write_cuda(functions, target), arch, nvrtc.find_toolkit())
    return _join_images([compiled.cubin, compiled.ptx])


def _write_cuda(functions: tvm.IRModule, target: tvm.target.Target) -> str:
    """Return CUDA C source; TVM would compile it itself if it found a driver."""
    compiler = tvm.get_global_func(_COMPILER_CALLBACK)
    tvm_ffi.register_global_func(_COMPILER_CALLBACK, lambda _: b"//", override=True)
    try:
        return str(tvm.get_global_func("target.build.cuda")(functions, target).inspect_source())
    finally:
        tvm_ffi.register_global_func(_COMPILER_CALLBACK, compiler, override=True)


def _join_images(images: Sequence[bytes]) -> bytes:
    """Return concatenated images, each followed by a 0 byte, because drivers read PTX as a C string."""
    head = struct.Struct(f"<Q{2 * len(images)}Q")
    places, content = list[int](), b""
    for image in images:
        places += [head.size + len(content), len(image)]
        content += image + bytes(_IMAGE_ALIGNMENT - len(image) % _IMAGE_ALIGNMENT)
    return head.pack(len(images), *places) + content


# ---------------------------------------------------------------- PTX by LLVM


def generate_ptx(functions: tvm.IRModule, arch: str) -> bytes:
    """Return PTX with a kernel for each function; arguments and errors as in `generate_device_code`."""
    fixed = {
        # LLVM's own barriers and shuffles replace TVM's.
        var: function.with_body(tvm_ffi.structural_map(function.body, (tvm.ir.Call, _fix_call)))
        for var, function in functions.functions_items()
    }
    threads = {str(var.name_hint): _count_threads(function) for var, function in fixed.items()}
    target = tvm.target.Target({"kind": "nvptx", "mcpu": _FIRST_CPU})
    libdevice = str(gpu.find_libdevice())
    tvm_ffi.register_global_func(_LIBDEVICE_CALLBACK, lambda _: libdevice, override=True)
    build = tvm.get_global_func("target.build.nvptx")
    llvm_ir = str(build(tvm.IRModule(fixed), target).inspect_source("ll"))
    return compile_llvm(_annotate(llvm_ir, arch, threads), sorted(threads))


def compile_llvm(llvm_ir: str, kernels: Sequence[str]) -> bytes:
    """Compile LLVM IR, which names its target and marks its kernels, to PTX."""
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        path = Path(folder, "kernels.ll")
        path.write_text(llvm_ir)
        load = tvm.get_global_func("ffi.Module.load_from_file.ll")
        ptx = str(load(str(path), "ll").inspect_source("s"))
    found = sorted(re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE))
    if found != list(kernels):
        raise AssertionError(f"PTX with the kernels {found} in place of {kernels}")
    return ptx.encode()


def _annotate(llvm_ir: str, arch: str, threads: Mapping[str, int]) -> str:
    """Annotate LLVM IR with the GPU's name, the PTX version, and the threads of each kernel.

    Without the thread count, LLVM may give a kernel more registers than a thread block has.
    """
    target = {"kind": "llvm", "mtriple": _TRIPLE, "mcpu": arch, "mattr": [_PTX_VERSION]}
    text = json.dumps(target, separators=(",", ":")).replace('"', "\\22")
    count = 1 + max(map(int, re.findall(r"^!(\d+) = ", llvm_ir, re.MULTILINE)))
    nodes = [f'!{{i32 2, !"tvm_target", !"{text}"}}']
    nodes += [f'!{{ptr @{name}, !"maxntidx", i32 {number}}}' for name, number in threads.items()]
    names = [f"!{count + index}" for index in range(len(nodes))]
    annotations = re.sub(
        r"^(!nvvm\.annotations = !\{.*)\}$",
        lambda match: f"{match[1]}, {', '.join(names[1:])}}}",
        llvm_ir.replace(
            f'"target-cpu"="{_FIRST_CPU}"',
            f'"target-cpu"="{arch}" "target-features"="{_PTX_VERSION}"',
        ),
        flags=re.MULTILINE,
    )
    definitions = "".join(f"{name} = {node}\n" for name, node in zip(names, nodes, strict=True))
    return f"{annotations}\n!llvm.module.flags = !{{{names[0]}}}\n{definitions}"


def _count_threads(function: tirx.PrimFunc) -> int:
    extents: dict[str, int] = {}

    def read(statement: tirx.AttrStmt) -> None:
        if str(statement.attr_key) == "thread_extent":
            extents[str(statement.node.thread_tag)] = int(statement.value)

    tvm_ffi.structural_walk(function.body, ((tirx.AttrStmt, read),))
    return prod(extent for tag, extent in extents.items() if tag.startswith("threadIdx"))


def _fix_call(call: Any) -> Any:
    name = str(getattr(call.op, "name", ""))
    if name == "tirx.tvm_storage_sync":
        intrinsic, argument = _BARRIERS[str(call.args[0].value)]
        return tirx.call_llvm_intrin("int32", intrinsic, tirx.IntImm("int32", argument))
    if name in _SHUFFLES:
        return _shuffle(call, *_SHUFFLES[name])
    return call


def _shuffle(call: Any, kind: str, lane: int) -> Any:
    """Return the value that another thread of the warp holds."""
    mask, value, distance, width, _ = call.args
    dtype = value.ty.dtype
    if dtype.lanes > 1 or dtype.bits > _SHUFFLED_BITS:
        raise StageError(
            f"kernels for GPUs before sm_75 cannot exchange {dtype} between threads",
            fix="choose float32 for the model",
        )
    is_float = str(dtype).startswith("float")
    word = f"float{_SHUFFLED_BITS}" if is_float else f"int{_SHUFFLED_BITS}"
    clamp = (_WARP_SIZE - int(width)) << _SEGMENT_SHIFT | lane
    name = f"llvm.nvvm.shfl.sync.{kind}.{'f' if is_float else 'i'}{_SHUFFLED_BITS}"
    arguments = (mask, tirx.Cast(word, value), distance, tirx.IntImm("int32", clamp))
    return tirx.Cast(str(dtype), tirx.call_llvm_intrin(word, name, *arguments))


def _call_libdevice(call: Any) -> Any:
    """Split a vector into scalar libdevice calls; float16 is computed in float32."""
    name, dtype = _LIBDEVICE_FUNCTIONS[str(call.op.name)], call.ty.dtype
    bits = max(dtype.bits, _SMALLEST_BITS)
    function = f"__nv_{name}{'f' if bits == _SMALLEST_BITS else ''}"
    arguments = [_promote(argument, bits) for argument in call.args]
    results = [
        tirx.call_pure_extern(f"float{bits}", function, *(_lane(each, lane) for each in arguments))
        for lane in range(dtype.lanes)
    ]
    value = tirx.Shuffle(results, list(range(dtype.lanes))) if dtype.lanes > 1 else results[0]
    return tirx.Cast(str(dtype), value)


def _call_llvm(call: Any) -> Any:
    dtype = str(call.ty.dtype)
    return tirx.call_llvm_pure_intrin(dtype, _LLVM_FUNCTIONS[str(call.op.name)], *call.args)


def _count_leading_zeros(call: Any) -> Any:
    # False: the result for 0 is defined.
    arguments = (*call.args, tirx.const(False, "bool"))
    return tirx.call_llvm_pure_intrin(str(call.ty.dtype), "llvm.ctlz", *arguments)


def _promote(value: Any, bits: int) -> Any:
    dtype = value.ty.dtype
    if dtype.bits == bits or not str(dtype).startswith("float"):
        return value
    return tirx.Cast(f"float{bits}{'' if dtype.lanes == 1 else f'x{dtype.lanes}'}", value)


def _lane(value: Any, lane: int) -> Any:
    if value.ty.dtype.lanes == 1:
        return value
    return value.value if isinstance(value, tirx.Broadcast) else tirx.Shuffle([value], [lane])


def _register_rules() -> None:
    """Register lowering rules for NVPTX that split vectors, because TVM's rules call scalar functions."""
    rules: list[tuple[Iterable[str], Callable[[Any], Any]]] = [
        (_LIBDEVICE_FUNCTIONS, _call_libdevice),
        (_LLVM_FUNCTIONS, _call_llvm),
        (("prim.clz",), _count_leading_zeros),
    ]
    for names, rule in rules:
        for name in names:
            tirx.op.register_intrin_lowering(name, target="nvptx", f=rule, level=_RULE_LEVEL)


_register_rules()
