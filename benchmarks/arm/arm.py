"""64-bit ARM without an ARM machine: executed instructions, and the cycles that llvm-mca gives them.

    python benchmarks/arm/arm.py --tools FOLDER [--fetch] [--net NAME ...] [--cpu CPU ...] [--precision PRECISION]
                                 [--tflite FILE ...] [--against FOLDER] [--json FILE]

Each network is built untuned for the CPU, and called once under qemu-aarch64, whose plugin counts how
often each block of instructions runs; so are ONNX Runtime and ncnn from their wheels for ARM, and
LiteRT for the files of `--tflite`, which may be quantized and have integers as inputs and outputs. llvm-mca of LLVM 22 turns blocks into cycles: it knows registers,
ports and latencies of a CPU, but no caches and no wrong predictions of branches. The table has millions
of instructions and of cycles, the share of the multiplications that the CPU could do in that time, the
ratio of tvmflow's cycles to the library's, and the largest error beside ONNX Runtime on this machine,
of the largest output. A peer that was not fetched, or that cannot run a network, is skipped by name.

A CPU that qemu 7.2 does not emulate is one with its instructions: a Cortex-A55 runs as a Neoverse N1, a Neoverse V1
as qemu's `max` with vectors of 256 bits.

`--tools` is a folder with Debian's packages unpacked; `--fetch` fills it by apt-get and pip, without
root. `--against` names another checkout of tvmflow, whose libraries are counted, too. `--json` is
written as results come; peers that it has for a network and a CPU are not counted again.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _nets
import numpy as np
import onnx
import onnxruntime
from _runtimes import ROOT
from history import record
from onnx import helper

from tvmflow.frontends.base import InputRequest
from tvmflow.frontends.frontend import MODEL
from tvmflow.frontends.inputs import resolve_inputs
from tvmflow.frontends.tflite import TfliteFrontend
from tvmflow.frontends.tflite._conversion import convert
from tvmflow.frontends.tflite._model import read_model

_SOURCES: Final = ROOT / "benchmarks" / "arm"
_PACKAGES: Final = (
    *("qemu-user", "libcapstone4", "libfdt1", "liburing2"),
    *("llvm-22", "libllvm22", "libz3-4", "libpfm4", "libedit2"),
    *("libc6-arm64-cross", "libgcc-s1-arm64-cross", "libstdc++6-arm64-cross"),
)
# Of arm64: a Python for the wheels of peers, and the libraries that it needs.
_PYTHON: Final = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8"),
)
_IR_VERSION: Final = 10
_PLATFORMS: Final = (
    *("manylinux_2_28_aarch64", "manylinux_2_27_aarch64"),
    *("manylinux_2_17_aarch64", "manylinux2014_aarch64"),
)
# llvm-mca has one model for Cortex-A57, A72 and A76; the limit is in multiplications of 4 float32 a cycle
CPUS: Final[Mapping[str, float]] = {
    "cortex-a55": 1,
    "cortex-a72": 1,
    "neoverse-n1": 2,
    "neoverse-v1": 4,
}
"""The CPUs that llvm-mca knows, and the multiplications of vectors of 128 bits that they do in a cycle."""
# Those that qemu 7.2 lacks, and what has their instructions there.
_EMULATED: Final = {
    "cortex-a55": "neoverse-n1",
    "neoverse-v1": "max,sme=off,sve-default-vector-length=32",
}

_CPUINFO: Final = """\
processor : 0
BogoMIPS : 108.00
Features : fp asimd aes pmull sha1 sha2 crc32{features}
CPU implementer : 0x41
CPU architecture: 8
CPU variant : 0x0
CPU part : {part}
CPU revision : 3

"""
_ARMV8_2: Final = " atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
_CPU_PARTS: Final = {
    "cortex-a55": ("0xd05", _ARMV8_2),
    "cortex-a72": ("0xd08", ""),
    "neoverse-n1": ("0xd0c", f"{_ARMV8_2} ssbs"),
    "neoverse-v1": ("0xd40", f"{_ARMV8_2} ssbs sve asimdfhm i8mm bf16 svei8mm svebf16"),
}
# Blocks that make up this share of all instructions are given to llvm-mca, each as a loop of this many rounds.
_SHARE: Final = 0.995
_ROUNDS: Final = 200
_MULTIPLICATIONS: Final = (
    *("fmla", "fmls", "sdot", "udot", "smull", "umull", "smlal", "umlal"),
    *("bfdot", "bfmmla", "smmla", "ummla", "usmmla"),
)
_OPERAND_OF_BRANCH: Final = re.compile(r"#?-?(0x[0-9a-f]+|\d+)$")
_BRANCHES: Final = re.compile(r"(b|bl|b\.\w+|cbn?z|tbn?z)\s")
# What llvm-mca refuses, or what is the system's.
_LEFT_OUT: Final = re.compile(r"(svc|udf|mrs|msr|dmb|dc|ic|hint|bti|nop|pac\w+|aut\w+|adrp?)\b")


def _quantized(made: onnx.ModelProto) -> onnx.ModelProto:
    """Return a network in int8 (QDQ per channel), whose norms are part of its convolutions before."""
    with tempfile.TemporaryDirectory() as folder:
        plain, folded, narrow = (Path(folder, name) for name in ("plain", "folded", "narrow"))
        onnx.save(made, plain)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded)
        onnxruntime.InferenceSession(str(plain), options)
        _nets.quantize(folded, narrow)
        return onnx.load(narrow)


NETS: Final[Mapping[str, Callable[[], onnx.ModelProto]]] = {
    "mobilenet": _nets.mobilenet,
    "resnet18": _nets.resnet18,
    "resnet50": _nets.resnet50,
    "squeezenet": _nets.squeezenet,
    "efficient": _nets.efficient,
    "convnext": _nets.convnext,
    "detector": _nets.detector,
    "encoder": lambda: _nets.encoder(layers=2),
    "deit": lambda: _nets.encoder(layers=2, tokens=197, width=192, heads=3),
    "vit": lambda: _nets.vision_transformer(layers=2),
    "whisper": lambda: _nets.whisper_encoder(layers=1, frames=1000),
    "lstm": _nets.lstm,
    "landmarks": _nets.landmarks,
    "unet": _nets.unet,
    "keywords": _nets.keywords,
    "mobilenet int8": lambda: _quantized(_nets.mobilenet()),
    "resnet18 int8": lambda: _quantized(_nets.resnet18()),
    "efficient int8": lambda: _quantized(_nets.efficient()),
    "encoder int8": lambda: _quantized(NETS["encoder"]()),
    "vit int8": lambda: _quantized(NETS["vit"]()),
}
"""The networks; all have seeded weights, one input and one output."""


PEERS: Final = ("ONNX Runtime", "ncnn", "LiteRT")
PRECISIONS: Final = ("model", "mixed", "float16", "bfloat16")


class Block(NamedTuple):
    """Instructions that run one after the other: how often, and their words."""

    count: int
    words: tuple[str, ...]


class Counts(NamedTuple):
    """What one call of a library takes: instructions, cycles by CPU, and multiplications of vectors."""

    instructions: int
    cycles: dict[str, float]
    products: int


class Tools:
    """The programs, and what ARM programs need under emulation.

    Args:
        folder: The folder with unpacked packages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        usr = self.folder / "usr"
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(
                map(str, (usr / "lib/x86_64-linux-gnu", usr / "lib/llvm-22/lib"))
            ),
        }
        self.qemu = usr / "bin/qemu-aarch64"
        self.llvm = usr / "lib/llvm-22/bin"
        self.system = usr / "aarch64-linux-gnu"
        self.counter = self.folder / "counter.so"
        self.runtime = self.folder / "onnxruntime"
        self.python = self.folder / "arm64/usr/bin/python3.11"
        self.ncnn = self.folder / "ncnn"
        self.pnnx = self.folder / "pnnx/pnnx/pnnx"
        self.litert = self.folder / "litert"

    def find_missing(self) -> list[str]:
        """Return the programs that are not there."""
        needed = (self.qemu, self.llvm / "llvm-mc", self.llvm / "llvm-mca", self.system / "lib")
        return [str(path) for path in needed if not path.exists()]

    def fetch(self) -> None:
        """Download Debian's packages and the wheels of peers for ARM, and unpack them."""
        packages = self.folder / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        for name in _PACKAGES:
            subprocess.run(["apt-get", "download", name], cwd=packages, check=True)
        for package in packages.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(self.folder)], check=True)
        self._fetch_wheel(f"onnxruntime=={importlib.metadata.version('onnxruntime')}", self.runtime)
        self._fetch_python()
        self._fetch_wheel("ncnn", self.ncnn)
        self._fetch_wheel("pnnx", self.folder / "pnnx", platforms=())
        self.pnnx.chmod(0o755)
        self._fetch_wheel("ai-edge-litert", self.litert)
        self._fetch_wheel("numpy", self.litert)

    def _fetch_wheel(self, name: str, folder: Path, platforms: Sequence[str] = _PLATFORMS) -> None:
        """Unpack a wheel of Python 3.11 for ARM, or one for this machine."""
        words = [f"--platform={platform}" for platform in platforms]
        words += ["--python-version=3.11"] if platforms else []
        with tempfile.TemporaryDirectory() as downloads:
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"),
                    *("--only-binary", ":all:", *words, "--dest", downloads, name),
                ],
                check=True,
            )
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)

    def _fetch_python(self) -> None:
        """Unpack Debian's Python for arm64, whose packages this machine's apt-get need not know."""
        apt, packages = self.folder / "apt", self.folder / "packages-arm64"
        for folder in (apt / "lists/partial", apt / "cache/archives/partial", packages):
            folder.mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        options = {
            **{"APT::Architecture": "arm64", "APT::Architectures::": "arm64"},
            **{"Dir::State": str(apt), "Dir::State::status": str(apt / "status")},
            "Dir::Cache": str(apt / "cache"),
        }
        apt_get = ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]
        subprocess.run([*apt_get, "-qq", "update"], check=True)
        subprocess.run([*apt_get, "download", *_PYTHON], cwd=packages, check=True)
        for package in packages.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(self.folder / "arm64")], check=True)

    def make(self) -> None:
        """Compile the plugin."""
        words = [str(_SOURCES / "counter.c"), "-shared", "-fPIC", "-o", str(self.counter)]
        _compile([*words, "-target", "x86_64-linux-gnu"])

    def find_runtime(self) -> Path | None:
        """Return the library of ONNX Runtime; None where it was not fetched."""
        return next(iter(self.runtime.glob("onnxruntime/capi/libonnxruntime.so*")), None)

    def find_peers(self, net: Net | None) -> list[str]:
        """Return the libraries that were fetched, and that have a form of a network."""
        python = self.python.exists()
        fetched = {
            "ONNX Runtime": self.find_runtime() is not None,
            "ncnn": python and self.ncnn.exists() and self.pnnx.exists(),
            "LiteRT": python and self.litert.exists(),
        }
        # the converter of ncnn knows no quantized ONNX models
        is_for = {
            "ncnn": net is None or not net.is_quantized,
            "LiteRT": net is None or net.tflite is not None,
        }
        return [peer for peer in PEERS if fetched[peer] and is_for.get(peer, True)]

    def run(
        self,
        cpu: str,
        words: Sequence[str],
        folder: Path,
        system: Path | None = None,
        **environment: str,
    ) -> list[Block]:
        """Run a program under emulation, and return the blocks that its counted call has run."""
        counts = folder / "counts"
        system = system or self._make_system(cpu, self.system)
        command = [str(self.qemu), "-cpu", _EMULATED.get(cpu, cpu), "-L", str(system)]
        plugin = ["-plugin", f"{self.counter},out={counts}"]
        subprocess.run(
            [*command, *plugin, *words], env={**self.environment, **environment}, check=True
        )
        lines = map(str.split, counts.read_text().splitlines())
        return [Block(int(count), tuple(words)) for count, *words in lines]

    def _make_system(self, cpu: str, origin: Path) -> Path:
        """Return the root of a system with this CPU, which libraries read in its files."""
        system = self.folder / f"system-{origin.name}-{cpu}"
        if not system.exists():
            part, features = _CPU_PARTS[cpu]
            (system / "proc").mkdir(parents=True)
            (system / "proc/cpuinfo").write_text(_CPUINFO.format(part=part, features=features))
            cpus = system / "sys/devices/system/cpu"
            cpus.mkdir(parents=True)
            for name in ("possible", "present", "online"):
                (cpus / name).write_text("0\n")
            for folder in ("lib", "usr"):
                if (origin / folder).exists():
                    (system / folder).symlink_to(origin / folder)
        return system

    def run_python(self, cpu: str, words: Sequence[str], folder: Path) -> list[Block]:
        """Count a program of the Python for ARM, with the system's libraries that it came with."""
        system = self._make_system(cpu, self.folder / "arm64")
        program = [str(self.python), "-S", str(_SOURCES / "peers.py")]
        return self.run(cpu, [*program, *words], folder, system, PYTHONHOME="/usr")

    def disassemble(self, words: Sequence[str]) -> list[str]:
        """Return the text of instructions; those that no ARM CPU has are left empty."""
        lines = [" ".join(f"0x{word[at : at + 2]}" for at in (6, 4, 2, 0)) for word in words]
        options = ["--disassemble", "-triple=aarch64-linux-gnu", "-mattr=+all"]
        done = subprocess.run(
            [str(self.llvm / "llvm-mc"), *options],
            input="\n".join(lines),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        unknown = {int(line) - 1 for line in re.findall(r"<stdin>:(\d+):", done.stderr)}
        texts = iter(
            " ".join(line.split())
            for line in done.stdout.splitlines()
            if line.strip() and not line.strip().startswith(".")
        )
        return ["" if at in unknown else next(texts) for at in range(len(words))]

    def count(self, blocks: Sequence[Block], cpus: Sequence[str]) -> Counts:
        """Return instructions, cycles and multiplications of a call."""
        blocks = sorted(blocks, key=lambda block: -block.count * len(block.words))
        words = sorted({word for block in blocks for word in block.words})
        texts = dict(zip(words, self.disassemble(words), strict=True))
        total = sum(block.count * len(block.words) for block in blocks)
        large, seen = [], 0
        for block in blocks:
            large.append(block)
            seen += block.count * len(block.words)
            if seen > _SHARE * total:
                break
        cycles = {cpu: self._estimate(cpu, large, texts) * total / seen for cpu in cpus}
        products = sum(
            block.count * sum(texts[word].startswith(_MULTIPLICATIONS) for word in block.words)
            for block in blocks
        )
        return Counts(total, cycles, products)

    def _estimate(self, cpu: str, blocks: Sequence[Block], texts: Mapping[str, str]) -> float:
        """Return the cycles of blocks, each as a loop."""
        lines = []
        for number, block in enumerate(blocks):
            body = [_OPERAND_OF_BRANCH.sub("0", t) if _BRANCHES.match(t) else t
                    for t in map(texts.__getitem__, block.words) if t and not _LEFT_OUT.match(t)]  # fmt: skip
            lines += [f"# LLVM-MCA-BEGIN b{number}", *body, "# LLVM-MCA-END"]
        options = [
            *("-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+all"),
            *(f"-iterations={_ROUNDS}", "-instruction-info=0", "-resource-pressure=0"),
            # atomic instructions have no model
            "-skip-unsupported-instructions=any",
        ]
        done = subprocess.run(
            [str(self.llvm / "llvm-mca"), *options],
            input="\n".join([*lines, ""]),
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.findall(r"Code Region - b(\d+)\n.*?Total Cycles:\s+(\d+)", done.stdout, re.S)
        return sum(int(cycles) / _ROUNDS * blocks[int(n)].count for n, cycles in found)


def _compile(words: Sequence[str]) -> None:
    command = [sys.executable, "-m", "ziglang", "cc", "-O2", "-w", *words]
    subprocess.run(command, check=True)


def count_tvmflow(
    tools: Tools, checkout: Path, model: Path, cpu: str, precision: str, feed: Path, output: Path
) -> list[Block]:
    """Build a model's C library with a checkout of tvmflow, and count a call."""
    folder = output.parent / f"{output.name}-{checkout.name}"
    folder.mkdir()
    recipe = folder / f"{model.stem}.yaml"
    recipe.write_text(
        f"recipe: 1\nname: {model.stem}\nmodel: {{onnx: {json.dumps(str(model))}}}\ntargets: [{cpu}]\n"
        "outputs: [c-library]\ntune: {trials: 0}\nverify: {against: none}\n"
        f"kernels: {{precision: {precision}}}\n"
    )
    subprocess.run(
        [sys.executable, "-m", "tvmflow", "run", str(recipe), "--store", str(folder / "store")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (header,) = (folder / "dist").rglob("*.h")
    (library,) = header.parent.glob("*.a")
    program, prefix = folder / "program", header.stem
    names = [f'-DHEADER="{header}"', f"-DPREFIX={prefix}", f"-DNAME={prefix.upper()}"]
    files = [str(_SOURCES / "tvmflow.c"), str(library), "-o", str(program)]
    _compile(["-target", "aarch64-linux-gnu.2.28", *names, *files, "-lm", "-lpthread"])
    return tools.run(cpu, [str(program), str(feed), str(output)], folder)


def count_onnxruntime(
    tools: Tools, model: onnx.ModelProto, path: Path, cpu: str, feed: Path, output: Path, size: int
) -> list[Block]:
    """Count a call of ONNX Runtime."""
    library = tools.find_runtime()
    assert library is not None, "it was fetched"
    program = tools.folder / "onnxruntime-program"
    _compile(
        [
            *("-target", "aarch64-linux-gnu.2.28", str(_SOURCES / "onnxruntime.c")),
            *("-o", str(program), "-ldl"),
        ]
    )
    value = model.graph.input[0]
    kind = value.type.tensor_type
    sizes = [
        str(number) for number in (kind.elem_type, *(axis.dim_value for axis in kind.shape.dim))
    ]
    names = [value.name, model.graph.output[0].name]
    words = [str(program), str(library), str(path), str(feed), str(output), *names, *sizes]
    return tools.run(cpu, words, output.parent, OUTPUT_BYTES=str(size))


def count_ncnn(
    tools: Tools,
    model: onnx.ModelProto,
    path: Path,
    cpu: str,
    precision: str,
    feed: Path,
    output: Path,
) -> list[Block]:
    """Count a call of ncnn on the model that its converter makes."""
    folder = output.parent / f"{output.name}-model"
    folder.mkdir()
    (folder / "net.onnx").symlink_to(path)
    command = [str(tools.pnnx), "net.onnx", "fp16=0"]
    subprocess.run(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )
    shape = [str(axis.dim_value) for axis in model.graph.input[0].type.tensor_type.shape.dim]
    # its tensors have no axis of images
    shape.remove("1")
    files = [folder / "net.ncnn.param", folder / "net.ncnn.bin", feed, output]
    words = ["ncnn", str(tools.ncnn / "ncnn"), *map(str, files), precision, *shape]
    return tools.run_python(cpu, words, folder)


def count_litert(tools: Tools, path: Path, cpu: str, feed: Path, output: Path) -> list[Block]:
    """Count a call of LiteRT, with the kernels of XNNPACK."""
    words = ["litert", str(tools.litert), *map(str, (path, feed, output))]
    return tools.run_python(cpu, words, output.parent)


class Net(NamedTuple):
    """A network: its model, and the file of LiteRT that it was converted from."""

    name: str
    model: onnx.ModelProto
    tflite: Path | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether some of its numbers are integers."""
        return any(node.op_type == "DequantizeLinear" for node in self.model.graph.node)


def _load_tflite(path: Path) -> Net:
    """Convert a TFLite file as tvmflow imports it."""
    data, inputs = path.read_bytes(), TfliteFrontend().read_inputs({MODEL: path})
    # an unknown number of images is one
    shapes = [tuple(n if isinstance(n, int) else 1 for n in each.dims or ()) for each in inputs]
    requests = [InputRequest(each.name, s) for each, s in zip(inputs, shapes, strict=True)]
    model, _ = convert(read_model(data), data, resolve_inputs(inputs, requests))
    # of the format that ONNX Runtime reads
    model.ir_version = min(model.ir_version, _IR_VERSION)
    return Net(path.stem, model, path)


def _draw(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return seeded data: of floats normal ones, of integers any of 8 bits."""
    random = np.random.default_rng(0)
    if dtype.kind == "f":
        return random.standard_normal(shape, dtype=np.float32).astype(dtype)
    lowest = max(np.iinfo(dtype).min, np.iinfo(np.int8).min)
    return random.integers(lowest, lowest + 256, shape).astype(dtype)


def measure(
    tools: Tools, net: Net, args: argparse.Namespace, known: Collection[tuple[str, str, str]]
) -> Iterator[dict[str, Any]]:
    """Give the counts of a network by CPU and library, without the peers that are known."""
    value, name_of_output = net.model.graph.input[0], net.model.graph.output[0].name
    shape = [axis.dim_value for axis in value.type.tensor_type.shape.dim]
    checkouts = {"tvmflow": ROOT, **({"before": args.against.resolve()} if args.against else {})}
    with tempfile.TemporaryDirectory() as temporary:
        path, feed = Path(temporary, "net.onnx"), Path(temporary, "feed")
        onnx.save(net.model, path)
        data = _draw(shape, helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        feed.write_bytes(data.tobytes())
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options)
        expected = session.run([name_of_output], {value.name: data})[0].ravel()
        for cpu, label in itertools.product(args.cpu, [*checkouts, *tools.find_peers(net)]):
            if (net.name, cpu, label) in known:
                continue
            output = Path(temporary, f"{label}-{cpu}")
            try:
                if label == "ONNX Runtime":
                    size = expected.nbytes
                    blocks = count_onnxruntime(tools, net.model, path, cpu, feed, output, size)
                elif label == "ncnn":
                    blocks = count_ncnn(tools, net.model, path, cpu, args.precision, feed, output)
                elif label == "LiteRT":
                    blocks = count_litert(tools, net.tflite, cpu, feed, output)
                else:
                    checkout, precision = checkouts[label], args.precision
                    blocks = count_tvmflow(tools, checkout, path, cpu, precision, feed, output)
            except subprocess.CalledProcessError as failed:
                if label in checkouts:
                    raise
                print(f"{net.name:<14} {cpu:<12} {label:<14} skipped: {failed}", flush=True)
                continue
            numbers = np.fromfile(output, expected.dtype)
            error = math.nan
            if numbers.size == expected.size:
                difference = np.abs(np.subtract(numbers, expected, dtype=np.float64)).max()
                error = float(difference / np.abs(expected.astype(np.float64)).max())
            counts = tools.count(blocks, [cpu])
            yield {
                **{"net": net.name, "cpu": cpu, "library": label, "error": error},
                **counts._asdict(),
            }


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what a row is about."""
    return row["net"], row["cpu"], row["library"]


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of one network."""
    by_cpu = collections.defaultdict(dict)
    for row in rows:
        by_cpu[row["cpu"]][row["library"]] = row
    for cpu, libraries in by_cpu.items():
        own = libraries["tvmflow"]["cycles"][cpu]
        for label, row in libraries.items():
            cycles = row["cycles"][cpu]
            busy = row["products"] / cycles / CPUS[cpu]
            ratio = f"{own / cycles:>8.2f}" if label != "tvmflow" else f"{'':>8}"
            print(
                f"{row['net']:<14} {cpu:<12} {label:<14} {row['instructions'] / 1e6:>9.1f}"
                f" {cycles / 1e6:>9.1f} {busy:>7.0%} {ratio}   {row['error']:.1e}",
                flush=True,
            )


def _summarize(rows: Sequence[Mapping[str, Any]], precision: str) -> None:
    """Print geometric means of ratios by CPU, to each library and to the fastest peer."""
    for cpu in dict.fromkeys(row["cpu"] for row in rows):
        ratios = collections.defaultdict(dict)
        for net in dict.fromkeys(row["net"] for row in rows):
            cycles = {
                row["library"]: row["cycles"][cpu]
                for row in rows
                if (row["cpu"], row["net"]) == (cpu, net)
            }
            own = cycles.pop("tvmflow", None)
            if own is None:
                continue
            for label, others in cycles.items():
                ratios[label][net] = own / others
            if peers := [count for label, count in cycles.items() if label != "before"]:
                ratios["the fastest peer"][net] = own / min(peers)
        record(f"arm, {precision}", ratios.get("the fastest peer", {}), counted_for=cpu)
        for label, found in ratios.items():
            mean = statistics.geometric_mean(found.values())
            print(
                f"{cpu}: tvmflow takes {mean:.2f} of the cycles of {label}"
                f" (geometric mean of {len(found)}), at most {max(found.values()):.2f}"
            )


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--net", nargs="*", choices=list(NETS), default=list(NETS))
    parser.add_argument("--tflite", nargs="+", type=Path, default=[])
    parser.add_argument("--cpu", nargs="+", choices=list(CPUS), default=list(CPUS))
    parser.add_argument("--against", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tools = Tools(args.tools)
    if args.fetch:
        tools.fetch()
    if missing := tools.find_missing():
        print(f"skipped: {', '.join(missing)} not found; --fetch downloads what is needed")
        return
    tools.make()
    for peer in set(PEERS) - set(tools.find_peers(None)):
        print(f"{peer} is skipped: it was not fetched")
    print(
        f"{'':<14} {'CPU':<12} {'library':<14} {'M instr.':>9} {'M cycles':>9} {'busy':>7} {'tvmflow/':>8}   error"
    )
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())
    known = {_key(row) for row in rows if row["library"] in PEERS}
    nets = (Net(name, NETS[name]()) for name in args.net)
    for net in itertools.chain(nets, map(_load_tflite, args.tflite)):
        for row in measure(tools, net, args, known):
            rows = [*(other for other in rows if _key(other) != _key(row)), row]
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
        _show([row for row in rows if row["net"] == net.name and row["cpu"] in args.cpu])
    _summarize(rows, args.precision)


if __name__ == "__main__":
    main()
