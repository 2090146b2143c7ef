"""CPUs as kernels and schedules see them: vectors, instructions, caches, costs of register tiles.

All figures of a CPU that decide how code is tiled are here, with their source: data sheets, times that
`benchmarks/kernels/tile_ranks.py` measured on machines A (EPYC Zen 4 and 5, AVX-512) and B (EPYC
Zen 3, AVX2), or cycles from models of ARM cores (docs/emulation.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import tvm
from tvm.target import codegen

from tvmflow.core.types import Json

_CORES: Final = 4
"""Untuned schedules are balanced for this many cores, and run with any number of threads.

Parts for 4 cores also keep 16 busy, and slow down a single thread by less than 5%.
"""


MIN_PARALLEL_ELEMENTS: Final = 1 << 15
"""With fewer elements, a second core saves no time."""
MIN_PARALLEL_PRODUCTS: Final = 1 << 16
"""With fewer multiplications, a second core saves no time."""
PARTS_PER_CORE: Final = 16
"""With this many parts of the work for each core, an uneven remainder costs little."""
STRIPS_PER_CORE: Final = 2
"""With this many parts of a Winograd convolution for each core, all cores are busy."""
BATCHES_PER_CORE: Final = 4
"""With this many batches per core, each core packs its own matrices, while they are in its cache."""

MIN_LANES: Final = 4
"""Vectors of fewer lanes are not faster than scalars."""
FUNCTION_VECTORS: Final = 4
"""Functions are computed for this many vectors at once, which share their constants."""
_ARM64: Final = ("aarch64", "arm64")
_NEON_LANES: Final = 4
_FEW_REGISTERS: Final = 16
# By-element float16 instructions address only half of the registers, so LLVM spills earlier.
_REGISTERS_WITHOUT_LANES: Final = 4
# The number of vectors in packed columns: the accumulators of a tile of four such rows fill half of 32 registers.
_PACKED_VECTORS: Final = 4

# CPUs differ little in the size of the first-level cache.
L1_BYTES: Final = 1 << 15
# The minimum number of ways of second-level caches; those of CPUs with AVX-512 have 8 to 16.
_L2_WAYS: Final = 8
FLOAT_BYTES: Final = 4
LINE_FLOATS: Final = 16
"""The number of float32 values in a cache line."""
CACHED_LINES: Final = 64
"""This many separate cache lines, such as rows of a transposed tile, stay in the first-level cache."""
PACKED_FLOATS: Final = L1_BYTES * 3 // 4 // FLOAT_BYTES
"""This many elements of a packed matrix stay in the first-level cache while all rows are multiplied with them."""

DOT_INSTRUCTIONS: Final[Mapping[tuple[str, int], str]] = {
    ("uint8", 16): "llvm.x86.avx512.vpdpbusd.512",
    ("uint8", 8): "llvm.x86.avx512.vpdpbusd.256",
    ("uint8", 4): "llvm.x86.avx512.vpdpbusd.128",
    ("int8", 4): "llvm.aarch64.neon.sdot.v4i32.v16i8",
}
"""(dtype of data, accumulators) -> LLVM's intrinsic that adds four products with int8 weights to each."""


class PairInstructions(NamedTuple):
    """Instructions of x86-64 that multiply vectors of bytes.

    Attributes:
        feature: LLVM's name for the CPU feature that provides them.
        multiply: The intrinsic that adds two products of uint8 and int8 to each int16, saturating.
        promote: The intrinsic that adds two products of int16 to each int32.
    """

    feature: str
    multiply: str
    promote: str


PAIR_INSTRUCTIONS: Final[Mapping[int, PairInstructions]] = {
    4: PairInstructions("ssse3", "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
    8: PairInstructions("avx2", "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    16: PairInstructions(
        "avx512bw", "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"
    ),
}
"""The float32 lanes of a vector -> its instructions."""
MATRIX_INSTRUCTION: Final = "llvm.aarch64.neon.smmla.v4i32.v16i8"
"""LLVM's intrinsic that multiplies 2×8 and 8×2 matrices of int8 and adds to four accumulators."""


SHARED_LANES: Final = 16
"""The number of float32 lanes of the widest x86-64 vectors: all ISA levels share weights packed for them."""


BFLOAT16_INSTRUCTIONS: Final[Mapping[tuple[str | None, int], str]] = {
    ("x86_64", 16): "llvm.x86.avx512bf16.dpbf16ps.512",
    ("x86_64", 8): "llvm.x86.avx512bf16.dpbf16ps.256",
    ("x86_64", 4): "llvm.x86.avx512bf16.dpbf16ps.128",
    ("aarch64", 4): "llvm.aarch64.neon.bfdot.v4f32.v8bf16",
}
"""(architecture, accumulators) -> LLVM's intrinsic that adds two bfloat16 products to each float32."""

_BFLOAT16_FEATURES: Final = {"x86_64": {"avx512bf16", "avx512vl"}, "aarch64": {"bf16", "neon"}}


# ---------------------------------------------------------------- costs of register tiles
# Costs of `candidates.estimate_speed`, in multiplications of vectors unless an attribute says otherwise.


class LoopCosts(NamedTuple):
    """The costs of a loop whose loads compete with its multiplications.

    Attributes:
        base: The time of a tile without its loads, relative to that of its multiplications.
        load: The time of a load of a vector or a row. Two loads take the time of two multiplications.
        spill: The time that each spilled register adds.
        row_tail: The relative speed of a tile with bounds checks of rows, if it spills nothing.
        tested_tile: The relative speed of a tile that spills accumulators because of bounds checks.
        tested_accumulators: This many accumulators stay in registers despite bounds checks of rows.
        more_vectors_than_rows: The relative speed of a tile with more vectors than rows if data are vectors: then
            a vector needs more loads than a row.
        few_rows: The relative speed of tiles of one or two rows, which load weights for few multiplications.
    """

    base: float
    load: float
    spill: float
    row_tail: float
    tested_tile: float = 0.6
    tested_accumulators: int = 14
    more_vectors_than_rows: float = 1.0
    few_rows: float = 0.93


EMBEDDED_BROADCAST: Final = LoopCosts(base=0.5, load=0.6, spill=0.05, row_tail=0.97)
"""AVX-512, whose instructions read a value from memory for all lanes; machine A."""
VECTORS: Final = LoopCosts(
    base=0.1, load=1.25, spill=0.03, row_tail=0.9, more_vectors_than_rows=0.8
)
"""Loops without scalars, such as depthwise convolutions; machines A and B."""


class BroadcastCosts(NamedTuple):
    """The costs of a loop that broadcasts each value to a register before use, measured on machine B.

    SSE, AVX2, RISC-V and WebAssembly need such loops. While LLVM multiplies, it keeps either the rows or the vectors of
    a tile in registers: the smaller number.
    """

    # the time of a load from the first-level cache that multiplications do not hide
    load: float = 0.1
    l2_load: float = 0.3  # likewise for a load from the second-level cache
    l2_bytes_per_cycle: int = 32  # the bandwidth of weights from that cache
    # a load can broadcast to vectors of this many float32 lanes; other vectors need a shuffle
    broadcast_lanes: int = 8
    loads_of_shuffle: int = 2  # a shuffle takes as long as this many loads
    spilled: float = 0.65  # the relative speed of a tile that spills
    # the instructions of a dot product of byte pairs; the first reads weights from memory
    pair_instructions: int = 3
    weight_load_of_pairs: float = 0.2  # the time of that load of weights
    broadcast_of_pairs: float = 0.8  # the time to broadcast a word of data
    # for depthwise kernels wider than `narrow_kernel`, LLVM loads this many vectors of data ahead
    narrow_kernel: int = 3
    early_loads: int = 2


BROADCAST: Final = BroadcastCosts()


class ByElementCosts(NamedTuple):
    """The costs of by-element instructions (64-bit ARM), from cycles of Cortex-A72 and Neoverse N1.

    LLVM loads the next multiplicands of all rows early, and weights shortly before use.
    """

    vector_loads: float = 2.0  # instructions that load a vector of weights
    row_loads: float = 0.5  # instructions that load the multiplicand of a row
    spill: float = 0.1  # each spilled register adds this fraction of the tile's time
    multiplicand_registers: int = 4  # registers for multiplicands that are loaded early
    unrolled_multiplicand_registers: int = 9  # likewise if kernel positions are unrolled
    late_loads: int = 2  # vectors per row of a depthwise kernel that are not loaded early
    max_kernel_width: int = 7  # the widest depthwise kernel that LLVM unrolls
    # the bandwidth of the second-level cache, in which CPUs differ little
    l2_bytes_per_cycle: int = 32
    # the relative speed of a tile whose weight vectors span several blocks of packed columns
    spread_columns: float = 0.88
    loop_instructions: int = 4  # the instructions of a dot product loop that do not multiply
    pair_registers: int = 3  # registers for products of pairs that are not added up yet
    exposed_load: float = 0.1  # the fraction of a load's time that other instructions do not hide
    matrix_load: float = 0.3  # likewise for a load of byte matrices


BY_ELEMENT: Final = ByElementCosts()

OPERAND_REGISTERS: Final = 4
"""The number of registers that a tile leaves for operands."""
MIN_ACCUMULATORS: Final = 8
"""The number of accumulators that keep two pipelines with a latency of four cycles busy."""
MIN_ACCUMULATORS_BY_ELEMENT: Final = 10
"""The same for by-element instructions, which need more while operands are loaded."""
MIN_ACCUMULATORS_WITHOUT_FMA: Final = 4
"""The same without fused multiply-add, where only the latency of an addition counts."""
FEW_ROWS: Final = 2
"""Tiles of at most this many rows are slower, by `LoopCosts.few_rows`."""


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
    return "f16c" in list_features(target)


def list_masked_types(target: tvm.target.Target) -> frozenset[str]:
    """Return the dtypes of masked loads and stores that take one instruction."""
    if _arch(target.attrs) not in ("", "x86_64"):
        # TVM crashes when it is asked for the features of a triple that LLVM does not know.
        return frozenset()
    features = list_features(target)
    wide = {"float32", "float64", "int32", "int64"} if "avx" in features else set()
    narrow = {"bool", "int8", "uint8"} if {"avx512bw", "avx512vl"} <= features else set()
    return frozenset(wide | narrow)


def find_multiplicand_lanes(target: Mapping[str, Json]) -> int:
    """Return the number of lanes that by-element FMA instructions select from; 0 without them."""
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
        has_broadcast_loads: True if a multiplication can read one value from memory for all lanes.
        full_vector_cost: The time of an operation on whole vectors, relative to one on half of their lanes.
        dot_dtype: The dtype of data that dot product instructions multiply with int8 weights; None without them.
        has_quads: Whether dot product instructions add four products to each accumulator, not two.
        has_pair_dots: Whether `PAIR_INSTRUCTIONS` are the fastest int8 dot products; they need 7-bit weights.
        has_matrices: Whether an instruction multiplies matrices of 2 x 8 and 8 x 2 bytes.
        bfloat16_arch: The architecture whose instructions (`BFLOAT16_INSTRUCTIONS`) multiply bfloat16; None without
            them.
        has_fma: Whether an instruction multiplies and adds with one rounding.
        has_float16: Whether instructions multiply and add vectors of float16.
        multiplicand_lanes: The number of lanes that by-element FMA instructions select from; 0 without them.
        issue_time: The time to issue a by-element multiplication, relative to computing it.
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
    has_pair_dots: bool = False
    has_matrices: bool = False
    bfloat16_arch: str | None = None
    has_fma: bool = False
    has_float16: bool = False
    multiplicand_lanes: int = 0
    issue_time: float = 0.67
    divides_slowly: bool = False

    @property
    def dot_instruction(self) -> str | None:
        """LLVM's intrinsic that adds four int8 products to each lane of a vector; None without it."""
        has_one = self.dot_dtype is not None and self.has_quads and not self.has_pair_dots
        return DOT_INSTRUCTIONS.get((self.dot_dtype or "", self.lanes)) if has_one else None

    @property
    def multiplies_bytes(self) -> bool:
        """True if instructions multiply vectors of bytes, perhaps with weights of 7 bits."""
        return self.dot_dtype is not None or self.has_pair_dots

    @property
    def has_few_registers(self) -> bool:
        """True if there are 16 registers for vectors, not 32."""
        return self.registers <= _FEW_REGISTERS

    @property
    def cached_weight_bytes(self) -> int:
        """The number of bytes of weights that stay in the second-level cache while data pass through it."""
        return self.l2_bytes * 3 // 4

    @property
    def cached_data_bytes(self) -> int:
        """The number of bytes of data that stay in the second-level cache while weights pass through it."""
        return self.l2_bytes // 2

    def evicts(self, stride: int, count: int) -> bool:
        """Return whether the second-level cache cannot hold `count` lines that are `stride` bytes apart."""
        way = self.l2_bytes // _L2_WAYS
        return count > _L2_WAYS * way // math.gcd(stride, way)

    @property
    def prefetches_weights(self) -> bool:
        """True if kernels prefetch weights that other kernels have displaced from the second-level cache.

        They save up to 30% of the time on Xeons of 2023 (Emerald Rapids), whose third-level cache is slow.
        """
        return self.has_broadcast_loads

    @property
    def packed_columns(self) -> int:
        """The number of contiguous columns in packed weights.

        In small caches of few ways, rows of a tile that lie apart would evict each other.
        """
        return self.lanes * (_PACKED_VECTORS if self.multiplicand_lanes else 1)

    def divides_packs(self, vectors: int) -> bool:
        """Return whether a tile of this many vectors reads contiguous packed columns."""
        return not self.multiplicand_lanes or _PACKED_VECTORS % vectors == 0

    @property
    def unspilled_registers(self) -> int:
        """LLVM begins to spill if a tile needs more registers than this."""
        return self.registers * 11 // 16

    @property
    def broadcasts_first(self) -> bool:
        """True if a value is broadcast to all lanes of a register before it is multiplied."""
        return not self.has_broadcast_loads and not self.multiplicand_lanes

    def for_seven_bit_weights(self) -> CpuModel:
        """Return the CPU for a model whose int8 weights are from -64 to 64.

        The sum of two products of such a weight and a byte fits into int16.
        """
        return self._replace(dot_dtype="uint8") if self.has_pair_dots else self

    @property
    def winograd_strides(self) -> tuple[int, ...]:
        """The (height, width) strides of Winograd convolutions.

        With 16 registers, a stride of 2 would spill most of the larger tile of data.
        """
        return (1, 2) if self.multiplicand_lanes else (1,)

    def for_float16(self) -> CpuModel:
        """Return the CPU model for float16: vectors and caches hold twice as many values as of float32."""
        return self._replace(
            lanes=2 * self.lanes,
            multiplicand_lanes=2 * self.multiplicand_lanes,
            l2_bytes=2 * self.l2_bytes,
            registers=self.registers - _REGISTERS_WITHOUT_LANES,
        )

    @classmethod
    def from_target(cls, target: Mapping[str, Json]) -> CpuModel | None:
        """Return the model of a target's CPU; None if no rule supports it."""
        tvm_target = tvm.target.Target(dict(target))
        if not is_cpu(tvm_target):
            return None
        arch, features = _arch(target), list_features(tvm_target)
        for row in _FAMILIES:
            if re.fullmatch(row.architectures, arch) and (
                not row.feature or row.feature in features
            ):
                own = row.cores.get(str(target.get("mcpu", "")), {})
                return row.model._replace(
                    **{**_find_instructions(row.model, arch, features), **own}
                )
        return None


def _find_instructions(model: CpuModel, arch: str, features: frozenset[str]) -> dict[str, Any]:
    """Return the fields that features of a CPU set in the model of its family."""
    dot_dtype = None
    # AVX-512 VNNI without VL has no instructions for vectors of 256 bits
    if arch == "x86_64" and ("avxvnni" in features or {"avx512vnni", "avx512vl"} <= features):
        dot_dtype = "uint8"
    found: dict[str, Any] = {"has_fma": model.has_fma or bool(features & {"fma", "vfp4"})}
    if arch in _ARM64:
        dot_dtype = "int8"
        found |= {
            "has_quads": "dotprod" in features,
            "has_matrices": "i8mm" in features,
            "has_float16": "fullfp16" in features,
        }
    elif "prefer-256-bit" in features and model.has_broadcast_loads:
        found["full_vector_cost"] = _LOW_CLOCK_COST
    has_pairs = arch == "x86_64" and model.lanes > MIN_LANES and dot_dtype is None
    key = "aarch64" if arch in _ARM64 else arch
    return {
        **found,
        "dot_dtype": dot_dtype,
        "has_pair_dots": has_pairs and PAIR_INSTRUCTIONS[model.lanes].feature in features,
        "bfloat16_arch": key if _BFLOAT16_FEATURES.get(key, {""}) <= features else None,
    }


class _Family(NamedTuple):
    """CPUs with the same vectors.

    Attributes:
        architectures: A pattern of LLVM's names.
        feature: LLVM's name for the CPU feature that provides the vectors; empty if every CPU has them.
        model: The common model.
        cores: For a single core (`mcpu`), the fields that differ from the model.
    """

    architectures: str
    feature: str
    model: CpuModel
    cores: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


# `full_vector_cost` of CPUs with LLVM's `prefer-256-bit`, which lower their clock for 512-bit vectors.
_LOW_CLOCK_COST: Final = 1.25
# These cores multiply one 128-bit vector a cycle (Arm's software optimization guides).
_ONE_MULTIPLICATION: Final = {"issue_time": 0.6}

_FAMILIES: Final = (
    # L2: 1 MiB (Skylake-SP, Zen 4 and 5); Zen 4 computes 512-bit vectors in 256-bit units (1.7: measured on machine A)
    _Family(
        ".*",
        "avx512f",
        CpuModel(16, 32, 1 << 20, _CORES, has_broadcast_loads=True, has_fma=True),
        {"znver4": {"full_vector_cost": 1.7}},
    ),
    # L2: 512 KiB (Zen 1 to 3); Intel's client CPUs before Ice Lake have 256 KiB
    _Family(".*", "avx", CpuModel(8, 16, 1 << 19, _CORES)),
    _Family("x86_64|i686", "", CpuModel(4, 16, 1 << 18, _CORES)),
    # L2: 512 KiB to 1 MiB a core, Cortex-A72 to Neoverse N1; Cortex-A57 and A72 divide four values in 34 cycles
    _Family(
        "aarch64|arm64",
        "",
        CpuModel(_NEON_LANES, 32, 1 << 19, _CORES, has_fma=True, multiplicand_lanes=_NEON_LANES),
        {
            "cortex-a53": _ONE_MULTIPLICATION,
            "cortex-a55": _ONE_MULTIPLICATION,
            "cortex-a57": {**_ONE_MULTIPLICATION, "divides_slowly": True},
            "cortex-a72": {**_ONE_MULTIPLICATION, "divides_slowly": True},
        },
    ),
    _Family("arm.*", "neon", CpuModel(4, 16, 1 << 18, _CORES)),
    # every RISC-V CPU with the vector extension has vectors of at least 128 bits (Zvl128b)
    _Family("riscv64", "v", CpuModel(4, 32, 1 << 18, _CORES, has_fma=True)),
    # engines compile WebAssembly for x86-64 or ARM64
    _Family("wasm.*", "simd128", CpuModel(4, 16, 1 << 18, _CORES)),
)


def cpu_model_for(target: Mapping[str, Json], rules_version: int) -> CpuModel | None:
    """Return the model that untuned kernels are scheduled for; None if `rules_version` is 0 (no rules)."""
    return CpuModel.from_target(target) if rules_version else None
