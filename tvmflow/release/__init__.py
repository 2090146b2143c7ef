"""Releases: lock files, gates, release folders, comparisons, reproducibility checks and retuning.

Imports only pages and lower layers. Other folders import only the names below; each loads its module on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmflow.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from tvmflow.release.comparison import Comparison as Comparison
    from tvmflow.release.comparison import Figure as Figure
    from tvmflow.release.comparison import Side as Side
    from tvmflow.release.comparison import compare_sides as compare_sides
    from tvmflow.release.comparison import comparison_json as comparison_json
    from tvmflow.release.comparison import load_side as load_side
    from tvmflow.release.comparison import make_side as make_side
    from tvmflow.release.folder import ReleaseResult as ReleaseResult
    from tvmflow.release.folder import check_before_build as check_before_build
    from tvmflow.release.folder import find_folder as find_folder
    from tvmflow.release.folder import make_release as make_release
    from tvmflow.release.gates import CONTENT_GATE as CONTENT_GATE
    from tvmflow.release.gates import LOCK as LOCK
    from tvmflow.release.gates import TargetComparison as TargetComparison
    from tvmflow.release.gates import list_checked_gates as list_checked_gates
    from tvmflow.release.gates import read_lock_with_measurements as read_lock_with_measurements
    from tvmflow.release.lock import LOCK_SUFFIXES as LOCK_SUFFIXES
    from tvmflow.release.lock import LockUpdate as LockUpdate
    from tvmflow.release.lock import diff_locks as diff_locks
    from tvmflow.release.lock import import_lock as import_lock
    from tvmflow.release.lock import lock_text as lock_text
    from tvmflow.release.lock import make_lock as make_lock
    from tvmflow.release.lock import pin_lock as pin_lock
    from tvmflow.release.lock import run_update as run_update
    from tvmflow.release.oci_artifacts import pull_artifact as pull_artifact
    from tvmflow.release.oci_artifacts import push_artifact as push_artifact
    from tvmflow.release.page import compare_page as compare_page
    from tvmflow.release.page import describe_gates as describe_gates
    from tvmflow.release.page import read_release as read_release
    from tvmflow.release.reproduce import ENVIRONMENTS as ENVIRONMENTS
    from tvmflow.release.reproduce import ReproducibilityReport as ReproducibilityReport
    from tvmflow.release.reproduce import build_again as build_again
    from tvmflow.release.retune import TuningProgress as TuningProgress
    from tvmflow.release.retune import select_stage as select_stage
    from tvmflow.release.retune import spend_budget as spend_budget
    from tvmflow.release.retune import with_spent_trials as with_spent_trials

__getattr__ = lazy_names(
    __name__,
    {
        "comparison": "Comparison Figure Side compare_sides comparison_json load_side make_side",
        "folder": "ReleaseResult check_before_build find_folder make_release",
        "gates": "CONTENT_GATE LOCK TargetComparison list_checked_gates read_lock_with_measurements",
        "lock": "LOCK_SUFFIXES LockUpdate diff_locks import_lock lock_text make_lock pin_lock run_update",
        "oci_artifacts": "pull_artifact push_artifact",
        "page": "compare_page describe_gates read_release",
        "reproduce": "ENVIRONMENTS ReproducibilityReport build_again",
        "retune": "TuningProgress select_stage spend_budget with_spent_trials",
    },
)
