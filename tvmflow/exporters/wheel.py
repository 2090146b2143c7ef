"""`wheel`: a Python package that pip installs, with the model and all that loads it inside.

Its loader is tvmflow's own runtime, copied in when the wheel is made: a machine that runs the
model needs numpy and TVM, not tvmflow.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.exporters._archives import write_zip
from tvmflow.exporters._base import Asked, Built, Joined, identifier, one_process
from tvmflow.targets.gpu import CUDA, RUNTIME_PACKAGE

FORM: Final = ""

_PACKAGE: Final = Path(__file__).parent.parent
# A module of tvmflow -> what it is called in the wheel: all that loading a bundle needs.
_SHARED: Final[Mapping[str, str]] = {
    "tvmflow.bundles": "_bundles",
    "tvmflow.errors": "_errors",
    "tvmflow.exporters._wheel_main": "__main__",
    "tvmflow.exporters._wheel_package": "__init__",
    "tvmflow.native": "_native",
    "tvmflow.runtime": "_runtime",
    "tvmflow.samples": "_samples",
    "tvmflow.targets._gpu_probe": "_gpu_probe",
    "tvmflow.targets.gpu": "_gpu",
    "tvmflow.targets.host": "_host",
    "tvmflow.targets.platforms": "_platforms",
    "tvmflow.targets.told": "_told",
    "tvmflow.values": "_values",
    "tvmflow.weights": "_weights",
}


def _source(module: str) -> Path:
    return _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


SOURCES: Final = tuple(map(_source, _SHARED))

# A system and the beginning of its C library's name -> the tag of wheels for it. The runtime's own
# wheels ask for glibc 2.27.
_TAGS: Final[Mapping[tuple[str, str], str]] = {
    ("linux", "gnu"): "manylinux_2_27_{arch}",
    ("linux", "musl"): "musllinux_1_2_{arch}",
    ("macos", ""): "macosx_11_0_{arch}",
    ("windows", ""): "win_{arch}",
}
# What tags call an architecture, where not as the Linux kernel does.
_ARCHS: Final[Mapping[tuple[str, str], str]] = {
    ("linux", "armv7"): "armv7l",
    ("linux", "i386"): "i686",
    ("macos", "aarch64"): "arm64",
    ("windows", "aarch64"): "arm64",
    ("windows", "x86_64"): "amd64",
}


def module_name(name: str) -> str:
    """What programs import.

    >>> module_name("res-net")
    'res_net_model'
    """
    return f"{identifier(name)}_model"


def _distribution(name: str) -> str:
    """What pip calls it.

    >>> _distribution("res-net")
    'res-net-model'
    """
    return "-".join(filter(None, module_name(name).split("_")))


def _tag(asked: Asked) -> str:
    platform = asked.platform
    arch = _ARCHS.get((platform.system, platform.arch), platform.arch)
    for (system, libc), tag in _TAGS.items():
        if platform.system == system and (platform.libc or "gnu").startswith(libc):
            return tag.format(arch=arch)
    return ""


def why_not(asked: Asked) -> str:
    """Python has no name for every platform."""
    return one_process(asked, ("llvm", CUDA)) or (
        "" if _tag(asked) else f"there are no wheels for '{asked.triple}'"
    )


def files(asked: Asked) -> tuple[str, ...]:
    """`<name>_model-<version>-py3-none-<platform>.whl`, as pip wants it."""
    return (f"{_stem(asked)}-py3-none-{_tag(asked)}.whl",)


def _stem(asked: Asked) -> str:
    return f"{_distribution(asked.name).replace('-', '_')}-{asked.version}"


def export(built: Built | Joined, folder: Path) -> None:
    """A zip of the package and of what pip wants to know, with the digest of every file."""
    asked = built.asked
    package, info = module_name(asked.name), f"{_stem(asked)}.dist-info"
    content = {f"{package}/{_SHARED[name]}.py": _turned(name, package) for name in _SHARED}
    content[f"{package}/model.tvmflow"] = built.bundle.read_bytes()
    content[f"{package}/py.typed"] = b""
    content[f"{info}/METADATA"] = _metadata(built).encode()
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tvmflow {built.manifest['tvmflow']}\n"
        f"Root-Is-Purelib: false\nTag: py3-none-{_tag(asked)}\n"
    ).encode()
    record = [f"{name},{_digest(data)},{len(data)}" for name, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    write_zip(folder / files(asked)[0], content)


def _turned(name: str, package: str) -> bytes:
    """A module of ours, importing its neighbours in the wheel."""
    text = _source(name).read_text()
    for ours, theirs in _SHARED.items():
        place = package if theirs == "__init__" else f"{package}.{theirs}"
        text = text.replace(f"from {ours} import ", f"from {place} import ")
    return text.encode()


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def _metadata(built: Built | Joined) -> str:
    minor = ".".join(str(built.manifest["tvm"]).split(".")[:2])
    package = module_name(built.name)
    fields = [
        "Metadata-Version: 2.1",
        f"Name: {_distribution(built.name)}",
        f"Version: {built.asked.version}",
        f"Summary: The model {built.name}, compiled for {built.asked.target}",
        "Requires-Python: >=3.10",
        f"Requires-Dist: apache-tvm =={minor}.*",
        "Requires-Dist: numpy >=1.26",
        *([f"Requires-Dist: {RUNTIME_PACKAGE}"] if built.asked.kind == CUDA else []),
        "Description-Content-Type: text/markdown",
    ]
    shown = [
        f"    {verb} {each['name']}: {each['dtype']} {json.dumps(each['shape'])}"
        for verb, part in (("takes", "inputs"), ("gives", "outputs"))
        for each in built.signature[part]
    ]
    usage = ["    import " + package, f"    outputs = {package}.run({{…}})  # arrays by name"]
    return "\n".join([*fields, "", *usage, "", *shown, ""])
