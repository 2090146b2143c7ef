"""Requirements: the versions of packages that tvmflow works with, for advice that can be followed.

An up-to-date run imports this module, which imports nothing.
"""

REQUIREMENTS = {
    "apache-tvm": "apache-tvm==0.27.0.post1",
    "apache-tvm-ffi": "apache-tvm-ffi>=0.1.14.post0,<0.1.15",
    "numpy": "numpy>=1.26,<2.5",
    "onnx": "onnx>=1.21,<2",
    "onnxruntime": "onnxruntime>=1.20,<2",
    "safetensors": "safetensors>=0.5",
    "xgboost-cpu": "xgboost-cpu>=3.0",
    "ziglang": "ziglang>=0.13,<0.18",
}
"""Distribution -> its requirement, as pyproject.toml has it."""


def install_command(*distributions: str, again: bool = False) -> str:
    """Return the command that installs distributions in versions that tvmflow works with.

    `again` replaces also what is installed.
    """
    names = " ".join(f"'{REQUIREMENTS.get(name, name)}'" for name in distributions)
    return f"pip install {'--force-reinstall ' if again else ''}{names}"
