"""Releases: what a pipeline's recipes gave, judged against the release before, in a folder that never changes again."""

from __future__ import annotations

from tvmflow.releases.folder import Released, make_release

__all__ = ["Released", "make_release"]
