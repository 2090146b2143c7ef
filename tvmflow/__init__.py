"""tvmflow: from a trained model to tuned, verified, packaged libraries, redoing only what is needed."""

from tvmflow.core.version import VERSION as __version__

# Type checkers take this name as true. Importing it from `typing` would cost an up-to-date run a
# third of its time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from tvmflow.api import Plan, Recipe, Result, plan, run
    from tvmflow.core.errors import TvmflowError
    from tvmflow.runtime.loading import load
    from tvmflow.runtime.module import Module

__all__ = [
    "Module",
    "Plan",
    "Recipe",
    "Result",
    "TvmflowError",
    "__version__",
    "load",
    "plan",
    "run",
]


def __getattr__(name: str) -> object:
    # The command line must not pay for the runtime, nor a program that loads a library for the
    # command line, so the runtime is imported at first use.
    if name in ("Module", "load"):
        from tvmflow.runtime import loading

        return getattr(loading, name)
    if name in ("Plan", "Recipe", "Result", "plan", "run"):
        from tvmflow import api

        return getattr(api, name)
    if name == "TvmflowError":
        from tvmflow.core import errors

        return errors.TvmflowError
    raise AttributeError(f"module 'tvmflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
