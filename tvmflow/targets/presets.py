"""Presets: targets that a recipe can name with one word."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.types import Json
from tvmflow.targets.tvm_target import TvmTarget


class Preset(NamedTuple):
    """A named target: TVM's target (None for the host), a description, and its library's ISA levels.

    TVM's target has `num-cores` if all machines of this kind have the same number of cores.
    """

    tvm: TvmTarget | None
    description: str
    levels: tuple[str, ...] = ()


def _cpu(triple: str, cpu: str, **fields: Json) -> dict[str, Json]:
    attributes = {name.replace("_", "-"): value for name, value in fields.items()}
    return {"kind": "llvm", "mtriple": triple, "mcpu": cpu, **attributes}


def _x86(level: str) -> dict[str, Json]:
    return _cpu("x86_64-linux-gnu", level)


def _arm(cpu: str, **fields: Json) -> dict[str, Json]:
    return _cpu("aarch64-linux-gnu", cpu, **fields)


def _android(triple: str, cpu: str, **fields: Json) -> dict[str, Json]:
    # Android 5.0 (API 21), the first with 64-bit ABIs.
    return _cpu(f"{triple}21", cpu, **fields)


def _board(arch: str, cpu: str) -> dict[str, Json]:
    return _cpu(f"{arch}-none-eabihf", cpu, mfloat_abi="hard", num_cores=1)


def _cuda(arch: str, host: Mapping[str, Json]) -> dict[str, Json]:
    return {"kind": "cuda", "arch": arch, "host": dict(host)}


def _opencl(host: Mapping[str, Json], threads: int = 256, shared: int = 32768) -> dict[str, Json]:
    return {
        "kind": "opencl",
        "max_threads_per_block": threads,
        "max_shared_memory_per_block": shared,
        "host": dict(host),
    }


_SERVER: Final = _x86("x86-64-v3")
# The extensions that Linux distributions for RISC-V require, plus the vector extension.
_RVV: Final = ["+m", "+a", "+f", "+d", "+c", "+v"]
_WASM: Final = _cpu("wasm32-wasi", "generic", mattr=["+simd128"], vector_width=128, num_cores=1)
# The CPUs of NVIDIA's boards, shared by the presets for their GPUs and for only the CPU.
_NANO: Final = _arm("cortex-a57", num_cores=4)
_TX2: Final = _arm("cortex-a57")
_XAVIER: Final = _arm("carmel")
_ORIN: Final = _arm("cortex-a78ae")

PRESETS: Final[dict[str, Preset]] = {
    "host": Preset(None, "this machine: its CPU and features are detected"),
    "x86-64-v2": Preset(_x86("x86-64-v2"), "x86-64 with SSE4.2 (since about 2009)"),
    "x86-64-v3": Preset(_x86("x86-64-v3"), "x86-64 with AVX2 and FMA (since about 2015)"),
    "x86-64-v4": Preset(_x86("x86-64-v4"), "x86-64 with AVX-512 (servers since about 2017)"),
    "x86-64-any": Preset(
        _x86("x86-64-v2"),
        "any x86-64 since about 2009: one multi-ISA library with SSE4.2, AVX2 and AVX-512",
        levels=("x86-64-v2", "x86-64-v3", "x86-64-v4"),
    ),
    "x86-64-v3-musl": Preset(
        _cpu("x86_64-linux-musl", "x86-64-v3"), "x86-64 with AVX2 and FMA on Alpine Linux"
    ),
    "x86-64-windows": Preset(
        _cpu("x86_64-pc-windows-msvc", "x86-64-v3"), "Windows on x86-64 with AVX2 and FMA"
    ),
    "cortex-a53": Preset(_arm("cortex-a53", num_cores=4), "Raspberry Pi 3 and Zero 2 W (4 cores)"),
    "cortex-a55": Preset(_arm("cortex-a55"), "Rockchip RK3566 and RK3568, NXP i.MX 93"),
    "cortex-a72": Preset(_arm("cortex-a72", num_cores=4), "Raspberry Pi 4 (4 cores)"),
    "cortex-a76": Preset(_arm("cortex-a76", num_cores=4), "Raspberry Pi 5 (4 cores)"),
    "cortex-a78": Preset(_arm("cortex-a78"), "MediaTek Genio 1200, Qualcomm QCM6490"),
    "neoverse-n1": Preset(_arm("neoverse-n1"), "AWS Graviton2, Ampere Altra"),
    "neoverse-n2": Preset(_arm("neoverse-n2"), "Azure Cobalt 100, Alibaba Yitian 710, with SVE2"),
    "neoverse-v1": Preset(_arm("neoverse-v1"), "AWS Graviton3, with SVE"),
    "neoverse-v2": Preset(
        _arm("neoverse-v2"), "AWS Graviton4, Google Axion, NVIDIA Grace, with SVE2"
    ),
    "ampereone": Preset(_arm("ampere1"), "AmpereOne"),
    "jetson-nano-cpu": Preset(_NANO, "NVIDIA Jetson Nano without its GPU (4 cores)"),
    "jetson-tx2-cpu": Preset(_TX2, "NVIDIA Jetson TX2 without its GPU"),
    "jetson-xavier-cpu": Preset(_XAVIER, "NVIDIA Jetson Xavier without its GPU"),
    "jetson-orin-cpu": Preset(_ORIN, "NVIDIA Jetson Orin without its GPU"),
    "aarch64": Preset(_arm("generic"), "any 64-bit ARM on Linux with glibc"),
    "aarch64-any": Preset(
        _arm("generic"),
        "any 64-bit ARM on Linux with glibc: one multi-ISA library with dotprod and i8mm",
        levels=("armv8-a", "dotprod", "i8mm"),
    ),
    "aarch64-musl": Preset(_cpu("aarch64-linux-musl", "generic"), "any 64-bit ARM on Alpine Linux"),
    "aarch64-windows": Preset(
        _cpu("aarch64-pc-windows-msvc", "generic"), "Windows on any 64-bit ARM"
    ),
    "snapdragon-x": Preset(
        _cpu("aarch64-pc-windows-msvc", "oryon-1"), "Windows on Snapdragon X (Oryon)"
    ),
    "apple-m1": Preset(_cpu("arm64-apple-macos13", "apple-m1"), "Macs with M1 or later, macOS 13"),
    "apple-m2": Preset(_cpu("arm64-apple-macos13", "apple-m2"), "Macs with M2 or later, macOS 13"),
    "apple-m3": Preset(_cpu("arm64-apple-macos13", "apple-m3"), "Macs with M3 or later, macOS 13"),
    "apple-m4": Preset(_cpu("arm64-apple-macos13", "apple-m4"), "Macs with M4 or later, macOS 13"),
    "android-arm64-v8a": Preset(
        _android("aarch64-linux-android", "generic"), "Android 5 on any 64-bit ARM"
    ),
    "android-armeabi-v7a": Preset(
        _android("armv7a-linux-androideabi", "generic", mattr=["+neon"], mfloat_abi="soft"),
        "Android 5 on 32-bit ARM with NEON",
    ),
    "android-x86_64": Preset(
        _android("x86_64-linux-android", "x86-64-v2"), "Android 5 on x86-64: emulators, Chromebooks"
    ),
    "snapdragon": Preset(
        _android("aarch64-linux-android", "cortex-a76"),
        "Android on Snapdragon 855 (2019), Cortex-A76 and later",
    ),
    "armv7-neon": Preset(
        _cpu("armv7-linux-gnueabihf", "cortex-a7", mfloat_abi="hard", num_cores=4),
        "32-bit ARM with NEON and VFPv4: Raspberry Pi 2 and later on a 32-bit system (4 cores)",
    ),
    "riscv64-v": Preset(
        _cpu("riscv64-linux-gnu", "generic-rv64", mattr=_RVV, mabi="lp64d"),
        "64-bit RISC-V with vectors (RVV 1.0): BananaPi F3, and boards with the SpacemiT K1",
    ),
    "wasm32-wasi": Preset(
        _WASM, "WebAssembly with SIMD: browsers since 2023, Node, and runtimes with WASI"
    ),
    "browser": Preset(
        {"kind": "webgpu", "host": _WASM},
        "browsers: WebGPU, with WebAssembly as fallback (output web)",
    ),
    "cortex-m7": Preset(_board("thumbv7em", "cortex-m7"), "microcontrollers with a Cortex-M7"),
    "cortex-m55": Preset(
        _board("thumbv8.1m.main", "cortex-m55"), "microcontrollers with a Cortex-M55"
    ),
    "ios": Preset(_cpu("arm64-apple-ios13.0", "apple-a12"), "iPhones since 2018, iOS 13"),
    "cuda-sm50": Preset(_cuda("sm_50", _SERVER), "NVIDIA GTX 750, M10"),
    "cuda-sm52": Preset(_cuda("sm_52", _SERVER), "NVIDIA GTX 900, M40"),
    "cuda-sm60": Preset(_cuda("sm_60", _SERVER), "NVIDIA P100"),
    "cuda-sm61": Preset(_cuda("sm_61", _SERVER), "NVIDIA GTX 10, P4, P40"),
    "cuda-sm70": Preset(_cuda("sm_70", _SERVER), "NVIDIA V100"),
    "cuda-sm75": Preset(_cuda("sm_75", _SERVER), "NVIDIA T4, RTX 20"),
    "cuda-sm80": Preset(_cuda("sm_80", _SERVER), "NVIDIA A100, A30"),
    "cuda-sm86": Preset(_cuda("sm_86", _SERVER), "NVIDIA A10, A40, RTX 30"),
    "cuda-sm89": Preset(_cuda("sm_89", _SERVER), "NVIDIA L4, L40, RTX 40"),
    "cuda-sm90": Preset(_cuda("sm_90", _SERVER), "NVIDIA H100, H200"),
    "jetson-orin": Preset(_cuda("sm_87", _ORIN), "NVIDIA Jetson Orin: sm_87 with Cortex-A78AE"),
    "jetson-xavier": Preset(_cuda("sm_72", _XAVIER), "NVIDIA Jetson Xavier: sm_72 with Carmel"),
    "jetson-tx2": Preset(_cuda("sm_62", _TX2), "NVIDIA Jetson TX2: sm_62 with Cortex-A57"),
    "jetson-nano": Preset(_cuda("sm_53", _NANO), "NVIDIA Jetson Nano: sm_53 with Cortex-A57"),
    "opencl": Preset(_opencl(_SERVER), "any GPU with an OpenCL 1.2 driver"),
    "intel-gpu": Preset(_opencl(_SERVER, 256, 65536), "Intel GPUs since 2015 (Gen 9, Xe, Arc)"),
    "amd-gpu": Preset(_opencl(_SERVER, 256, 65536), "AMD GPUs since 2012 (GCN, RDNA)"),
    "mali": Preset(
        _opencl(_arm("generic"), 256, 32768), "Arm Mali-G GPUs (Bifrost and later), on Linux"
    ),
    "mali-android": Preset(
        _opencl(_android("aarch64-linux-android", "generic")),
        "Arm Mali-G GPUs (Bifrost and later), on Android",
    ),
    "adreno-android": Preset(
        _opencl(_android("aarch64-linux-android", "generic"), 512, 32768),
        "Qualcomm Adreno 600 GPUs and later, on Android",
    ),
}

OTHER_NAMES: Final[Mapping[str, str]] = {
    "adreno": "adreno-android",
    "ampere": "neoverse-n1",
    "ampere-altra": "neoverse-n1",
    "android": "android-arm64-v8a",
    "android-arm64": "android-arm64-v8a",
    "arm64-v8a": "android-arm64-v8a",
    "armeabi-v7a": "android-armeabi-v7a",
    "axion": "neoverse-v2",
    "cobalt-100": "neoverse-n2",
    "grace": "neoverse-v2",
    "graviton2": "neoverse-n1",
    "graviton3": "neoverse-v1",
    "graviton4": "neoverse-v2",
    "iphone": "ios",
    "native": "host",
    "raspberry-pi-3": "cortex-a53",
    "raspberry-pi-4": "cortex-a72",
    "raspberry-pi-5": "cortex-a76",
    "raspberrypi3": "cortex-a53",
    "raspberrypi4": "cortex-a72",
    "raspberrypi5": "cortex-a76",
    "rk3566": "cortex-a55",
    "rk3568": "cortex-a55",
    "rk3588": "cortex-a76",
    "rpi3": "cortex-a53",
    "rpi4": "cortex-a72",
    "rpi5": "cortex-a76",
    "windows-arm64": "aarch64-windows",
    "windows-x86_64": "x86-64-windows",
}
"""Names of machines -> the preset whose code is fastest on them. Recipes may use either name."""

_NVIDIA: Final = tuple(f"cuda-sm{number}" for number in (61, 70, 75, 80, 86, 89, 90))
_ANY_X86: Final = ("x86-64-v3", "x86-64-any")
_ANY_ARM: Final = ("aarch64", "aarch64-any")
_PHONES: Final = ("snapdragon", "android-arm64-v8a")

MEANT: Final[Mapping[str, Sequence[str]]] = {
    # systems and architectures
    "local|cpu|llvm": ("host",),
    "linux": ("host", "x86-64-any", "aarch64-any"),
    "alpine|musl": ("x86-64-v3-musl", "aarch64-musl"),
    "win(dows|32|64)?": ("x86-64-windows", "aarch64-windows"),
    "(linux-)?(x64|x86(-64)?|amd64)(-linux.*)?": _ANY_X86,
    "(linux-)?(arm64|armv[89](-a|.[1-9].*)?|aarch64)(-linux.*)?": _ANY_ARM,
    "arm": ("aarch64", "armv7-neon"),
    "arm32|armhf|armv7.*|armeabi.*": ("armv7-neon",),
    "(android-)?(x86|x86-64|emulator)": ("android-x86_64",),
    "wasm(32|64)?|web-?assembly|emscripten": ("wasm32-wasi", "browser"),
    "web|webgpu|chrome|firefox|safari": ("browser", "wasm32-wasi"),
    "riscv(64.*)?|rv64.*v|spacemit.*|(banana-?pi|bpi)-f3": ("riscv64-v",),
    # Machines that no preset supports, although their names resemble supported ones: nothing is suggested.
    "i[3-6]86|loongarch.*|ppc.*|powerpc.*|mips.*|s390x|sparc.*|armv[4-6].*|metal|hexagon|.*tpu": (),
    "cortex-m(0(plus|\\+)?|1|3|4|23|33)f?|jetson-.*thor|power[0-9]+|(riscv|rv)32.*|stm32(?![fh]7).*|esp.*|rp2[0-9]+.*|nrf5.*|(raspberry-?pi|rpi|pi)-?(1|zero)": (),
    # x86-64
    "x86-64-v1|nehalem|westmere|sandybridge|ivybridge|(gold|tre)mont|silvermont|bonnell|atom": (
        "x86-64-v2",
    ),
    "sse4.*|avx": ("x86-64-v2",),
    "(zn?(en|ver))-?[45]|avx-?512.*|skylake-(avx512|server)|(icelake|cascadelake|cooperlake)(-.*)?": (
        "x86-64-v4",
    ),
    "(sapphire|emerald|granite|diamond)-?rapids|tigerlake|rocketlake|xeon.*|epyc.*": (
        "x86-64-v4",
        "x86-64-v3",
    ),
    "avx2|fma|zn?(en|ver)-?[123]?|ryzen.*|haswell|broadwell|(core-)?i[3579](-.*)?|core-ultra.*": (
        "x86-64-v3",
    ),
    "(sky|kaby|coffee|comet|alder|raptor|meteor|arrow|lunar)-?lake(-.*)?": ("x86-64-v3",),
    # boards and servers with ARM's CPUs
    "(raspberry-?pi|rpi|pi)": ("cortex-a72", "cortex-a76"),
    "(raspberry-?pi|rpi|pi)-?(3.*|zero-?2.*)": ("cortex-a53",),
    "(raspberry-?pi|rpi|pi)-?4.*|odroid-n2.*|rk3399|rk3576|cortex-a(57|73)": ("cortex-a72",),
    "(raspberry-?pi|rpi|pi)-?5.*": ("cortex-a76",),
    "(raspberry-?pi|rpi|pi)-?2.*|cortex-a(5|7|12|15|17|32)": ("armv7-neon",),
    "i\\.?mx-?8.*|coral|rk3328|cortex-a3[45]": ("cortex-a53",),
    "i\\.?mx-?9.*|cortex-a(65|75|510|520)": ("cortex-a55",),
    "cortex-(a7[0-9]+|x[0-9]+)": ("cortex-a78",),
    "graviton": ("neoverse-v2", "neoverse-v1", "neoverse-n1"),
    "graviton5|neoverse-v3.*": ("neoverse-v2",),
    "neoverse-n3": ("neoverse-n2",),
    "stm32[fh]7.*|i\\.?mx-?rt.*": ("cortex-m7",),
    "cortex-m(52|85)|ethos.*": ("cortex-m55",),
    # Apple
    "(apple-)?m([1-4])(-.*)?": ("apple-m\\2",),
    "(apple-)?m[5-9](-.*)?": ("apple-m4",),
    "mac.*|osx|darwin.*|apple(-silicon)?|arm64-apple.*": ("apple-m1",),
    "ip(ad|hone).*|ios.*|(apple-)?a1[2-9].*": ("ios",),
    # phones
    "snapdragon-x.*|oryon.*": ("snapdragon-x",),
    "(qualcomm|snapdragon|sm[0-9]{4}|qcm|kryo).*|(google-)?(pixel|tensor-?g[0-9]).*": _PHONES,
    "(samsung|galaxy|exynos|oneplus|xiaomi|dimensity|mediatek|kirin|phone|mobile).*": _PHONES,
    # GPUs
    "gpu": (*_NVIDIA, "opencl"),
    "cuda(-?1[0-9](\\.[0-9])?)?|nvidia": _NVIDIA,
    "(cuda-?|nvidia-?)?(sm|compute)-?(50|52|60|61|70|75|80|86|89|90)a?": ("cuda-sm\\3",),
    "(cuda-?|nvidia-?)?((sm|compute)-?1[0-2][0-9]|b[123]00|gb[123]00|rtx-?50.*)": ("cuda-sm90",),
    "(gh?200|h[12]00)(-.*)?": ("cuda-sm90",),
    "l4|l40s?|rtx-?40.*": ("cuda-sm89",),
    "a(2|10|16|40)g?|rtx-?(30.*|a[2-6]000)": ("cuda-sm86",),
    "a(30|100)(-.*)?": ("cuda-sm80",),
    "t4|rtx-?20.*|gtx-?16.*": ("cuda-sm75",),
    "v100|titan-v": ("cuda-sm70",),
    "p(4|40)|gtx-?10.*": ("cuda-sm61",),
    "p100": ("cuda-sm60",),
    "(nvidia-)?jetson": ("jetson-orin", "jetson-xavier", "jetson-tx2", "jetson-nano"),
    "(nvidia-)?(jetson-)?(agx-)?orin.*|sm-?87": ("jetson-orin", "jetson-orin-cpu"),
    "(nvidia-)?(jetson-)?(agx-)?xavier.*|sm-?72": ("jetson-xavier", "jetson-xavier-cpu"),
    "(nvidia-)?(jetson-)?tx2.*|sm-?62": ("jetson-tx2", "jetson-tx2-cpu"),
    "(nvidia-)?(jetson-)?(tx1|nano).*|sm-?53": ("jetson-nano", "jetson-nano-cpu"),
    "intel|iris.*|arc.*|xe": ("intel-gpu",),
    "amd|radeon.*|rocm|gfx[0-9].*": ("amd-gpu",),
    "vulkan": ("opencl",),
}
"""Patterns of names that people use for targets -> presets to suggest.

Names are lowercase with hyphens. The first pattern that matches the whole name decides. An empty tuple means that no
preset has code for this machine, although the name may look similar to another.
"""

NAMES: Final = tuple(sorted({*PRESETS, *OTHER_NAMES}))
"""All names of presets that recipes may use."""


def preset_name(name: str) -> str:
    """Return the preset that a name stands for, or the name itself.

    >>> preset_name("graviton4"), preset_name("neoverse-v2")
    ('neoverse-v2', 'neoverse-v2')
    """
    return OTHER_NAMES.get(name, name)


def find_presets(name: str) -> Sequence[str] | None:
    """Return the presets that an unofficial name may stand for; None if the name is unknown.

    >>> find_presets("Snapdragon 8 Gen 3"), find_presets("zen4"), find_presets("stm32f4")
    (['snapdragon', 'android-arm64-v8a'], ['x86-64-v4'], [])
    """
    spelled = re.sub("[ _]+", "-", name.strip().lower())
    if same := [other for other in NAMES if other.replace("_", "-") == spelled]:
        return same
    for pattern, presets in MEANT.items():
        if match := re.fullmatch(pattern, spelled):
            return [match.expand(preset) for preset in presets]
    return None
