"""What an exporter is: object code and what is known of it, in the form that its users load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Built(NamedTuple):
    """A linked library and its description.

    `manifest` is what a loader checks before it loads: target, CPU features, TVM's version,
    digests, and how the library is verified.
    """

    name: str
    library: Path
    signature: Mapping[str, Any]
    manifest: Mapping[str, Any]


class Exporter(Protocol):
    """One module in this folder."""

    SUFFIX: str
    """What the delivered file's name ends in, after the recipe's name."""

    def export(self, built: Built, output: Path) -> None:
        """Write the deliverable to `output`: the same bytes for the same input, anywhere."""
        ...
