"""Locks: all that a release came from and gave, in a file that a run can be held to.

A lock names sources, resolved targets, packages, the schedule chosen for each kernel, and the
digest of every file that a stage gives for the same inputs. A run that keeps to one searches
nothing, and ends with those very digests or says where they part.
"""

from __future__ import annotations

from tvmflow.locks._file import (
    FOR_CHECKS,
    MEASURING,
    SEARCHING,
    SUFFIX,
    Lock,
    LockedKernel,
    LockedRecipe,
    LockedStage,
    LockFile,
    lock_path,
    read_lock,
)
from tvmflow.locks.keep import keep_to
from tvmflow.locks.make import make_lock, pin

__all__ = [
    "FOR_CHECKS",
    "MEASURING",
    "SEARCHING",
    "SUFFIX",
    "Lock",
    "LockFile",
    "LockedKernel",
    "LockedRecipe",
    "LockedStage",
    "keep_to",
    "lock_path",
    "make_lock",
    "pin",
    "read_lock",
]
