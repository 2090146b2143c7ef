"""Every error that tvmflow raises on purpose, each with its exit code.

An error says what happened, where, and what to do next. Only the command line turns one
into output. Anything that is not a `TvmflowError` is a bug of ours and is reported as one.
"""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_VERIFY: Final = 3
EXIT_ENVIRONMENT: Final = 4
EXIT_BUG: Final = 70
EXIT_INTERRUPTED: Final = 130

EXIT_CODES: Final[dict[int, str]] = {
    EXIT_OK: "everything asked for is there and verified",
    EXIT_FAILED: "a stage failed, crashed or ran out of time",
    EXIT_USAGE: "the recipe, the pipeline or the command line is wrong; nothing was run",
    EXIT_VERIFY: "a library failed its checks: against the reference, a lock or a gate; tuning bought too little; or a file is not as delivered",
    EXIT_ENVIRONMENT: "this machine is in the way: full disk, no permission, missing package, no network",
    EXIT_BUG: "a bug in tvmflow; the message names the file with the details",
    EXIT_INTERRUPTED: "interrupted; what was finished is kept",
}


class TvmflowError(Exception):
    """The base of every error that a user may see: what happened, and what to do next."""

    exit_code: int = EXIT_FAILED

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class UsageError(TvmflowError):
    """The command line asks for something that does not exist."""

    exit_code = EXIT_USAGE


class RecipeError(TvmflowError):
    """A recipe or pipeline is wrong. `problems` are all of them, each `file:line:column: …`."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: "list[str] | str", *, fix: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems), fix=fix)


class StageError(TvmflowError):
    """A stage cannot do what the recipe asks, for a reason the user can act on."""


class ImportFailed(StageError):
    """The model cannot be imported; the message names the operator and the node."""


class VerifyFailed(StageError):
    """A library was built and is not good enough: wrong numbers, or accuracy below the gate."""

    exit_code = EXIT_VERIFY


class LockMismatch(TvmflowError):
    """A stage gives other bytes than the lock names that the run keeps to."""

    exit_code = EXIT_VERIFY


class EnvironmentProblem(TvmflowError):
    """The machine is in the way: no space, no permission, a package that is not installed."""

    exit_code = EXIT_ENVIRONMENT


class StoreError(EnvironmentProblem):
    """The store cannot be used: damaged beyond repair, on a full disk, or not writable."""


class DownloadError(EnvironmentProblem):
    """A model could not be downloaded, or what came does not have the digest that was asked for."""


class Interrupted(TvmflowError):
    """The user stopped the run while this was under way."""

    exit_code = EXIT_INTERRUPTED


class BundleError(TvmflowError, ValueError):
    """A bundle cannot be loaded here, or was called with inputs that do not fit its signature."""


_OUTCOMES: Final = {
    EXIT_ENVIRONMENT: "blocked",
    EXIT_INTERRUPTED: "cancelled",
    EXIT_VERIFY: "rejected",
}


def outcome_of(error: type[TvmflowError]) -> str:
    """How a stage that raises such an error is said to have ended (see `report.StageReport`)."""
    return _OUTCOMES.get(error.exit_code, "failed")
