"""tvmflow: from a trained model to tuned, verified, packaged libraries, redoing only what a change makes necessary."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Module", "load"]


def __getattr__(name: str) -> Any:
    # the command line must not pay for the runtime, nor a program that loads a library for the command line
    if name in __all__:
        from tvmflow import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'tvmflow' has no attribute {name!r}")
