"""What becomes of the errors that libraries raise at models which they cannot read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from tvmflow.core.errors import ImportFailed, TvmflowError
from tvmflow.core.formatting import last_line

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Turn every error of the block into one that says that the model cannot be imported.

    A model may hold anything, and the libraries that read it raise whatever their code runs into.
    The traceback goes to the stage's log file.

    Raises:
        ImportFailed: in place of other errors; those of tvmflow and of the disk stay as they are.
    """
    try:
        yield
    except (TvmflowError, OSError):
        raise
    except MemoryError as error:
        raise ImportFailed("importing the model needs more memory than there is") from error
    except RecursionError as error:
        raise ImportFailed("the model is nested too deep to be imported") from error
    except Exception as error:
        _log.debug("the model cannot be imported", exc_info=True)
        raise ImportFailed(
            f"the model cannot be imported: {type(error).__name__}: {last_line(error)}",
            fix="check that its own framework can load it; if it can, report a bug of tvmflow with the model",
        ) from error
