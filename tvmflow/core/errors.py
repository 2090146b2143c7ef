"""Errors that tvmflow raises on purpose, each with its exit code.

An error says what happened, where, and what to do next. Only the command line prints errors. Any other exception is
reported as a bug in tvmflow.
"""

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_VERIFY: Final = 3
EXIT_ENVIRONMENT: Final = 4
EXIT_BUG: Final = 70
EXIT_INTERRUPTED: Final = 130
EXIT_KILLED: Final = 137
EXIT_UNREAD: Final = 141

EXIT_CODES: Final[dict[int, str]] = {
    EXIT_OK: "everything that was requested is there and verified",
    EXIT_FAILED: "a stage failed, crashed or ran out of time",
    EXIT_USAGE: "the recipe, the pipeline or the command line is wrong; nothing was run",
    EXIT_VERIFY: "a library failed its checks: against the reference, a lock file or a gate; tuning gained too little; or a file is not as delivered",
    EXIT_ENVIRONMENT: "the environment does not allow it: full disk, no permission, missing package, no network",
    EXIT_BUG: "a bug in tvmflow; the message names the file with the details",
    EXIT_INTERRUPTED: "interrupted (129 by SIGHUP, 143 by SIGTERM); finished stages are kept",
    EXIT_UNREAD: "the reader closed the output pipe, as in `| head -1` (SIGPIPE); finished stages are kept",
}

_SHOWN_PROBLEMS: Final = 50


class TvmflowError(Exception):
    """The base of all errors: `message` describes the problem, `fix` the remedy."""

    exit_code: int = EXIT_FAILED

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class UsageError(TvmflowError):
    """The command line names something that does not exist."""

    exit_code = EXIT_USAGE


class RecipeError(TvmflowError):
    """A recipe or pipeline is invalid: `problems` lists all mistakes, each `file:line:column: …`."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: "list[str] | str", *, fix: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        shown = self.problems[:_SHOWN_PROBLEMS]
        if more := len(self.problems) - len(shown):
            shown.append(f"… and {more} more")
        super().__init__("\n".join(shown), fix=fix)


def merge_recipe_errors(errors: "list[RecipeError]") -> RecipeError:
    """Return one error with the distinct problems and fixes of several errors."""
    problems = [problem for error in errors for problem in error.problems]
    fixes = [error.fix for error in errors if error.fix]
    return RecipeError(list(dict.fromkeys(problems)), fix="; ".join(dict.fromkeys(fixes)))


class StageError(TvmflowError):
    """A stage cannot satisfy the recipe, for a reason that the user can act on."""


class ImportFailed(StageError):
    """The model cannot be imported; the message names the operator and the node."""


class VerifyFailed(StageError):
    """A library was built and rejected: wrong outputs, or accuracy below the gate."""

    exit_code = EXIT_VERIFY


class LockMismatch(TvmflowError):
    """An output of a locked run differs from its digest in the lock file."""

    exit_code = EXIT_VERIFY


class EnvironmentProblem(TvmflowError):
    """A problem of the environment: no space, no permission, or a package that is not installed."""

    exit_code = EXIT_ENVIRONMENT


class StoreError(EnvironmentProblem):
    """The store cannot be used: damaged beyond repair, on a full disk, or not writable."""


class DownloadError(EnvironmentProblem):
    """A model could not be downloaded, or the downloaded file does not have the expected digest."""


class Interrupted(TvmflowError):
    """The user stopped the run."""

    exit_code = EXIT_INTERRUPTED


class InternalError(TvmflowError):
    """A bug in tvmflow that a check found. The message names the log file, if any."""

    exit_code = EXIT_BUG


class BundleError(TvmflowError, ValueError):
    """A bundle cannot be loaded on this host, or its inputs do not match its signature."""


_OUTCOMES: Final = {
    EXIT_ENVIRONMENT: "blocked",
    EXIT_INTERRUPTED: "cancelled",
    EXIT_VERIFY: "rejected",
}


def outcome_for(error: type[TvmflowError]) -> str:
    """Return the outcome of a stage that raised an error of this class (see `report.StageReport`)."""
    return _OUTCOMES.get(error.exit_code, "failed")
