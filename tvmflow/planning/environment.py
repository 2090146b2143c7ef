"""The environment that a plan depends on, beside the files that its recipes name.

Imports almost nothing, for fast up-to-date runs.
"""

import os
import sys

# Search paths of toolchains, GPU drivers and TVM's libraries, and the visible GPUs.
_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "TVM_LIBRARY_PATH"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "POCL_DEVICES"),
)
# Device files of NVIDIA's driver on a server, on a Jetson and in WSL, and its folder in /proc.
_DRIVER_DEVICES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg")
_DRIVER = "/proc/driver/nvidia"

# Download tokens are secret, and no plan depends on them.
_SECRET = "TVMFLOW_TOKEN_"

# Files that editors and Python leave beside source files.
_NO_SOURCE = (".pyc", "~", ".swp")


def describe_environment() -> str:
    """Return a text that changes with the environment of a plan, except the CPU."""
    own = sorted(name for name in os.environ if name.startswith("TVMFLOW_"))
    names = [*_VARIABLES, *(name for name in own if not name.startswith(_SECRET))]
    lines = [f"{name}={without_password(os.environ.get(name, '-'))}" for name in names]
    lines += [f"{_package_root()} {sys.prefix} {sys.hexversion}", *sys.path]
    lines += [path for path in _DRIVER_DEVICES if os.path.exists(path)]
    return "\n".join(lines + _describe_gpus())


def list_source_files() -> tuple[list[str], list[str]]:
    """Return all folders and files of this package, including files that exporters copy, in stable order."""
    folders, files = [_package_root()], []
    for folder in folders:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir():
                folders += [] if entry.name == "__pycache__" else [entry.path]
            elif not entry.name.endswith(_NO_SOURCE):
                files.append(entry.path)
    return folders, files


def _package_root() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def without_password(word: str) -> str:
    """Remove user and password from a URL: they must not get into stored digests."""
    scheme, colon, rest = word.partition("://")
    return scheme + colon + (rest.rpartition("@")[2] if colon else rest)


def _describe_gpus() -> list[str]:
    """Return the reports of NVIDIA's driver about its version and each GPU."""
    reports: list[str] = []
    try:
        gpus = sorted(f"{entry.path}/information" for entry in os.scandir(f"{_DRIVER}/gpus"))
        for path in (f"{_DRIVER}/version", *gpus):
            with open(path, encoding="utf-8", errors="replace") as stream:
                reports.append(stream.read())
    except OSError:
        # The driver is missing or reports less.
        pass
    return reports
