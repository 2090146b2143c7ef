"""A CPU as kernels and schedules see it: vectors, registers, caches, least work for another core.

All figures of a CPU that decide how code is divided stand here; `contraction.candidates` estimates the speed of
register tiles from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import tvm
from tvm.target import codegen

from tvmflow.core.types import Json

_CORES: Final = 4
"""The cores that untuned schedules are balanced for, on every machine: the same code runs with any number of threads.

Parts for 4 cores are enough for 16, and with one thread they cost less than a twentieth.
"""


MIN_PARALLEL_ELEMENTS: Final = 1 << 15
"""Fewer elements are not worth handing to another core."""
MIN_PARALLEL_PRODUCTS: Final = 1 << 16
"""Fewer multiplications are not worth handing to another core."""
PARTS_PER_CORE: Final = 16
"""With so many parts of the work for each core, an uneven rest costs little."""
STRIPS_PER_CORE: Final = 2
"""With so many parts of a Winograd convolution for each core, all cores are busy."""
BATCHES_PER_CORE: Final = 4
"""With so many batches for each core, each packs its matrices for itself, while they are in its cache."""

MIN_LANES: Final = 4
"""Vectors of fewer lanes are not worth their instructions."""
_MANY_REGISTERS: Final = 32
FUNCTION_VECTORS: Final = 4
"""The vectors of which functions are computed side by side, with their constants loaded once for all."""
_ARM64: Final = ("aarch64", "arm64")
_NEON_LANES: Final = 4
# The vectors of a tile of four rows or more, whose sums fill half of 32 registers.
_PACKED_VECTORS: Final = 4

# CPUs differ little in the size of the first-level cache.
L1_BYTES: Final = 1 << 15
FLOAT_BYTES: Final = 4
LINE_FLOATS: Final = 16
"""The float32 values in a line of a cache."""
CACHED_LINES: Final = 64
"""So many lines that lie apart, as rows of a transposed tile do, stay in the first-level cache."""
PACKED_FLOATS: Final = L1_BYTES * 3 // 4 // FLOAT_BYTES
"""So many numbers of a packed matrix stay in the first-level cache while all rows are multiplied with them."""

# The time to issue a by-element multiplication, by whether a CPU does one or two of vectors in a cycle.
_ISSUE_TIMES: Final = (0.6, 0.67)
_ONE_MULTIPLICATION: Final = frozenset({"cortex-a53", "cortex-a55", "cortex-a57", "cortex-a72"})
# A division of four numbers takes 34 cycles.
_SLOW_DIVISIONS: Final = frozenset({"cortex-a57", "cortex-a72"})
_AVX_LANES: Final = 8
# Instructions take lanes of float16 from half of the registers alone, so that LLVM spills earlier.
_REGISTERS_WITHOUT_LANES: Final = 4
# CPUs with registers of 512 bits and arithmetic units of 256.
_HALF_WIDE_UNITS: Final = frozenset({"znver4"})
_HALF_WIDE_COST: Final = 1.7
# Where LLVM prefers 256 bits, a CPU lowers its clock for wider vectors.
_LOW_CLOCK_COST: Final = 1.25


def _full_vector_cost(cpu: str, features: set[str]) -> float:
    """Return the time of an operation on 512 bits relative to one on 256, by what LLVM knows of a CPU."""
    if cpu in _HALF_WIDE_UNITS:
        return _HALF_WIDE_COST
    return _LOW_CLOCK_COST if "prefer-256-bit" in features else 1.0


DOT_INSTRUCTIONS: Final[Mapping[tuple[str, int], str]] = {
    ("uint8", 16): "llvm.x86.avx512.vpdpbusd.512",
    ("uint8", 8): "llvm.x86.avx512.vpdpbusd.256",
    ("uint8", 4): "llvm.x86.avx512.vpdpbusd.128",
    ("int8", 4): "llvm.aarch64.neon.sdot.v4i32.v16i8",
}
"""The dtype of data and the number of sums -> LLVM's intrinsic that adds four products of data and int8 weights to each sum."""


class PairInstructions(NamedTuple):
    """Instructions of x86-64 that multiply vectors of bytes.

    Attributes:
        feature: LLVM's name of the feature that adds them.
        multiply: The one that adds two products of uint8 and int8 each, as int16, which saturates.
        widen: The one that adds two products of int16 each, as int32.
    """

    feature: str
    multiply: str
    widen: str


PAIR_INSTRUCTIONS: Final[Mapping[int, PairInstructions]] = {
    4: PairInstructions("ssse3", "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
    8: PairInstructions("avx2", "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    16: PairInstructions(
        "avx512bw", "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"
    ),
}
"""The float32 values of a vector -> its instructions."""
MATRIX_INSTRUCTION: Final = "llvm.aarch64.neon.smmla.v4i32.v16i8"
"""LLVM's intrinsic that multiplies two rows of eight bytes with two others, and adds the four products to sums."""


SHARED_LANES: Final = 16
"""The float32 values of the widest vectors of all levels of x86-64, for which they store weights alike."""


BFLOAT16_INSTRUCTIONS: Final[Mapping[tuple[str | None, int], str]] = {
    ("x86_64", 16): "llvm.x86.avx512bf16.dpbf16ps.512",
    ("x86_64", 8): "llvm.x86.avx512bf16.dpbf16ps.256",
    ("x86_64", 4): "llvm.x86.avx512bf16.dpbf16ps.128",
    ("aarch64", 4): "llvm.aarch64.neon.bfdot.v4f32.v8bf16",
}
"""The architecture and the number of sums -> LLVM's intrinsic that adds two products of bfloat16 to each float32 sum."""

_BFLOAT16_FEATURES: Final = {"x86_64": {"avx512bf16", "avx512vl"}, "aarch64": {"bf16", "neon"}}


def _find_bfloat16_arch(arch: str, features: set[str]) -> str | None:
    """Return the architecture of `BFLOAT16_INSTRUCTIONS`; None for a CPU without them."""
    arch = "aarch64" if arch == "arm64" else arch
    needed = _BFLOAT16_FEATURES.get(arch)
    return arch if needed is not None and needed <= features else None


def _find_dot_dtype(arch: str, features: set[str]) -> str | None:
    """Return the dtype of data that dot product instructions multiply with int8 weights, or None."""
    if arch == "x86_64" and features & {"avx512vnni", "avxvnni"}:
        # AVX-512 VNNI without VL has no instructions for vectors of 256 bits.
        return "uint8" if features & {"avx512vl", "avxvnni"} else None
    return "int8" if arch in _ARM64 else None


def _has_narrow_dots(arch: str, features: set[str], lanes: int, dot_dtype: str | None) -> bool:
    return arch == "x86_64" and dot_dtype is None and PAIR_INSTRUCTIONS[lanes].feature in features


def is_cpu(target: tvm.target.Target) -> bool:
    """Return whether a target is a CPU, for which LLVM generates the code."""
    return str(target.kind.name) == "llvm"


def list_features(target: tvm.target.Target) -> frozenset[str]:
    """Return the features of a CPU by LLVM's names."""
    return frozenset(map(str, codegen.llvm_get_cpu_features(target)))


def converts_float16(target: tvm.target.Target) -> bool:
    """Return whether a CPU has instructions that convert vectors of float16."""
    arch = _arch(target.attrs)
    if arch not in ("", "x86_64", "i386", "i686"):
        # TVM crashes when it is asked for the features of a triple that LLVM does not know.
        return arch in _ARM64
    return "f16c" in map(str, codegen.llvm_get_cpu_features(target))


def list_masked_types(target: tvm.target.Target) -> frozenset[str]:
    """Return the dtypes of which a CPU loads and stores some lanes of a vector in one instruction."""
    if _arch(target.attrs) not in ("", "x86_64"):
        # TVM crashes when it is asked for the features of a triple that LLVM does not know.
        return frozenset()
    features = set(map(str, codegen.llvm_get_cpu_features(target)))
    wide = {"float32", "float64", "int32", "int64"} if "avx" in features else set()
    narrow = {"bool", "int8", "uint8"} if {"avx512bw", "avx512vl"} <= features else set()
    return frozenset(wide | narrow)


def find_factor_lanes(target: Mapping[str, Json]) -> int:
    """Return the lanes of a vector of which instructions take any one as a factor; 0 without such."""
    return _NEON_LANES if _arch(target) in _ARM64 else 0


def _arch(target: Mapping[str, Json]) -> str:
    return str(target.get("mtriple", "")).partition("-")[0]


class CpuModel(NamedTuple):
    """A CPU as schedule rules see it.

    Attributes:
        lanes: The number of float32 values in a vector register.
        registers: The number of vector registers.
        l2_bytes: The size of a core's second-level cache.
        cores: The number of cores that the work is divided for.
        has_broadcast_loads: True if a multiplication can read one number from memory for all lanes.
        full_vector_cost: The time of an operation on whole vectors, relative to one on half of their lanes.
        dot_dtype: The dtype of data that dot product instructions multiply with int8 weights; None without them.
        has_quads: Whether these add four products to each sum; two otherwise.
        has_narrow_dots: Whether `PAIR_INSTRUCTIONS` are the fastest that multiply bytes: their weights have 7 bits.
        has_matrices: Whether an instruction multiplies matrices of 2 x 8 and 8 x 2 bytes.
        bfloat16_arch: The architecture whose instructions (`BFLOAT16_INSTRUCTIONS`) multiply bfloat16; None without them.
        has_fma: Whether an instruction multiplies and adds with one rounding.
        has_float16: Whether instructions multiply and add vectors of float16.
        factor_lanes: The lanes of a vector of which instructions take any one as a factor; 0 without such instructions.
        issue_time: The time to issue a multiplication whose factor is a lane, relative to computing it.
        divides_slowly: Whether a division of vectors takes as long as dozens of additions.
    """

    lanes: int
    registers: int
    l2_bytes: int
    cores: int
    has_broadcast_loads: bool = False
    full_vector_cost: float = 1.0
    dot_dtype: str | None = None
    has_quads: bool = True
    has_narrow_dots: bool = False
    has_matrices: bool = False
    bfloat16_arch: str | None = None
    has_fma: bool = False
    has_float16: bool = False
    factor_lanes: int = 0
    issue_time: float = _ISSUE_TIMES[1]
    divides_slowly: bool = False

    @property
    def dot_instruction(self) -> str | None:
        """LLVM's intrinsic that adds four products of bytes to each number of a vector; None without it."""
        has_one = self.dot_dtype is not None and self.has_quads and not self.has_narrow_dots
        return DOT_INSTRUCTIONS.get((self.dot_dtype or "", self.lanes)) if has_one else None

    @property
    def multiplies_bytes(self) -> bool:
        """True if instructions multiply vectors of bytes, perhaps with weights of 7 bits."""
        return self.dot_dtype is not None or self.has_narrow_dots

    @property
    def has_few_registers(self) -> bool:
        """True if there are 16 registers for vectors, not 32."""
        return self.registers < _MANY_REGISTERS

    @property
    def cached_weight_bytes(self) -> int:
        """The weights that stay in the second-level cache while data pass through it."""
        return self.l2_bytes * 3 // 4

    @property
    def cached_data_bytes(self) -> int:
        """The data that stay in the second-level cache while weights pass through it."""
        return self.l2_bytes // 2

    @property
    def packed_columns(self) -> int:
        """The columns of packed weights that lie together.

        With small caches of few ways, rows of a tile that lie in several places evict each other.
        """
        return self.lanes * (_PACKED_VECTORS if self.factor_lanes else 1)

    def divides_packs(self, vectors: int) -> bool:
        """Return whether a tile of so many vectors reads packed columns that lie together."""
        return not self.factor_lanes or _PACKED_VECTORS % vectors == 0

    @property
    def unspilled_registers(self) -> int:
        """The registers of a tile's values beyond which LLVM begins to spill some."""
        return self.registers * 11 // 16

    @property
    def broadcasts_first(self) -> bool:
        """True if a number is moved to all lanes of a register before it is multiplied."""
        return not self.has_broadcast_loads and not self.factor_lanes

    def for_narrow_weights(self) -> CpuModel:
        """Return the CPU for a model whose int8 weights are from -64 to 64.

        The sum of two of their products with bytes fits into int16.
        """
        return self._replace(dot_dtype="uint8") if self.has_narrow_dots else self

    def for_float16(self) -> CpuModel:
        """Return the CPU with vectors of float16, twice as many numbers as of float32 in registers and caches."""
        return self._replace(
            lanes=2 * self.lanes,
            factor_lanes=2 * self.factor_lanes,
            l2_bytes=2 * self.l2_bytes,
            registers=self.registers - _REGISTERS_WITHOUT_LANES,
        )

    @classmethod
    def from_target(cls, target: Mapping[str, Json]) -> CpuModel | None:
        """Return the model of a target's CPU; None if no rule supports it."""
        tvm_target = tvm.target.Target(dict(target))
        if not is_cpu(tvm_target):
            return None
        arch = _arch(target)
        features = {str(name) for name in codegen.llvm_get_cpu_features(tvm_target)}
        dot_dtype = _find_dot_dtype(arch, features)
        bfloat16_arch = _find_bfloat16_arch(arch, features)
        if "avx512f" in features:
            cost = _full_vector_cost(str(target.get("mcpu", "")), features)
            wide = cls(16, 32, 1 << 20, _CORES, has_broadcast_loads=True, full_vector_cost=cost)
            return wide._replace(
                dot_dtype=dot_dtype,
                has_narrow_dots=_has_narrow_dots(arch, features, wide.lanes, dot_dtype),
                bfloat16_arch=bfloat16_arch,
                has_fma=True,
            )
        if "avx2" in features or "avx" in features:
            has_fma = "fma" in features
            narrow = _has_narrow_dots(arch, features, _AVX_LANES, dot_dtype)
            own = cls(_AVX_LANES, 16, 1 << 19, _CORES, dot_dtype=dot_dtype, has_fma=has_fma)
            return own._replace(has_narrow_dots=narrow)
        if arch in ("x86_64", "i686"):
            return cls(4, 16, 1 << 18, _CORES)
        if arch in _ARM64:
            neon = cls(_NEON_LANES, 32, 1 << 19, _CORES, has_fma=True)
            neon = neon._replace(dot_dtype=dot_dtype, bfloat16_arch=bfloat16_arch)
            neon = neon._replace(
                has_quads="dotprod" in features,
                has_matrices="i8mm" in features,
                has_float16="fullfp16" in features,
            )
            mcpu = target.get("mcpu")
            return neon._replace(
                factor_lanes=find_factor_lanes(target),
                issue_time=_ISSUE_TIMES[mcpu not in _ONE_MULTIPLICATION],
                divides_slowly=mcpu in _SLOW_DIVISIONS,
            )
        if arch.startswith("arm") and "neon" in features:
            return cls(4, 16, 1 << 18, _CORES, has_fma="vfp4" in features)
        # Every RISC-V CPU with the vector extension has vectors of at least 128 bits (Zvl128b).
        if arch == "riscv64" and "v" in features:
            return cls(4, 32, 1 << 18, _CORES, has_fma=True)
        # Engines compile WebAssembly for x86-64 or ARM64.
        if arch.startswith("wasm") and "simd128" in features:
            return cls(4, 16, 1 << 18, _CORES)
        return None


def cpu_model_for(target: Mapping[str, Json], rules_version: int) -> CpuModel | None:
    """Return the CPU model that untuned kernels are scheduled for.

    Args:
        target: TVM's mapping of the target.
        rules_version: The version of the schedule rules; 0 if kernels have no schedule until tuning finds one.

    Returns:
        The model; None if untuned kernels have no schedule.
    """
    return CpuModel.from_target(target) if rules_version else None
