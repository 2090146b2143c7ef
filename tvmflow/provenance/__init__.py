"""Provenance of delivered files: statements and bills of materials, their signatures and checks.

Imports only executors and lower layers. Other folders import only the names below; each loads its module on first
access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmflow.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from tvmflow.provenance.check import UnknownFile as UnknownFile
    from tvmflow.provenance.check import check_delivered as check_delivered
    from tvmflow.provenance.check import format_inspection as format_inspection
    from tvmflow.provenance.check import inspect_file as inspect_file
    from tvmflow.provenance.delivered import BOM_SUFFIX as BOM_SUFFIX
    from tvmflow.provenance.delivered import MEASUREMENTS_SUFFIX as MEASUREMENTS_SUFFIX
    from tvmflow.provenance.delivered import README as README
    from tvmflow.provenance.delivered import find_sidecars as find_sidecars
    from tvmflow.provenance.delivered import list_delivered_targets as list_delivered_targets
    from tvmflow.provenance.delivered import list_repository_files as list_repository_files
    from tvmflow.provenance.delivered import list_sidecars_to_write as list_sidecars_to_write
    from tvmflow.provenance.delivered import read_builder_id as read_builder_id
    from tvmflow.provenance.delivered import read_source_state as read_source_state
    from tvmflow.provenance.write import MEASUREMENTS_STATEMENT as MEASUREMENTS_STATEMENT
    from tvmflow.provenance.write import RELEASE_STATEMENT as RELEASE_STATEMENT
    from tvmflow.provenance.write import sign_statements as sign_statements
    from tvmflow.provenance.write import text_digest as text_digest
    from tvmflow.provenance.write import write_release_statements as write_release_statements
    from tvmflow.provenance.write import write_release_targets as write_release_targets
    from tvmflow.provenance.write import write_sidecars as write_sidecars

__getattr__ = lazy_names(
    __name__,
    {
        "check": "UnknownFile check_delivered format_inspection inspect_file",
        "delivered": "BOM_SUFFIX MEASUREMENTS_SUFFIX README find_sidecars list_delivered_targets "
        "list_repository_files list_sidecars_to_write read_builder_id read_source_state",
        "write": "MEASUREMENTS_STATEMENT RELEASE_STATEMENT sign_statements text_digest "
        "write_release_statements write_release_targets write_sidecars",
    },
)
