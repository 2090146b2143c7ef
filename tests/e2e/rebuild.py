"""Rebuilds delivered files from a statement of provenance and its materials: without a store, a plan, a recipe or a key.

Usage: `python rebuild.py STATEMENT MATERIALS OUT`. MATERIALS is a folder of files that are known by
their sha256 alone. What the statement says is checked on the way: tools, materials, and the digest of
every file of a stage that another stage read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvmflow.core import packages
from tvmflow.stages import STAGES
from tvmflow.stages.base import StageContext, parse_settings


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Rebuild:
    """One statement, and the stages that it names as they are run again."""

    def __init__(self, statement: Path, materials: Path, out: Path) -> None:
        envelope = json.loads(statement.read_text().splitlines()[0])
        self.body: Any = json.loads(base64.b64decode(envelope["payload"]))
        definition = self.body["predicate"]["buildDefinition"]
        self.settings: Mapping[str, Any] = definition["externalParameters"]["settings"]
        self.dependencies: list[Any] = definition["resolvedDependencies"]
        self.out = out
        files = {sha256(path): path for path in materials.rglob("*") if path.is_file()}
        self.sources = {
            entry["name"]: files[entry["digest"]["sha256"]] for entry in self.of_kind("source")
        }

    def of_kind(self, kind: str) -> list[Any]:
        return [entry for entry in self.dependencies if entry["annotations"]["kind"] == kind]

    def check_tools(self) -> None:
        """Check that the packages of the statement are those that are installed."""
        for entry in self.of_kind("tool"):
            identity = packages.identity(entry["name"])
            assert identity.startswith(entry["annotations"]["version"]), identity
            assert identity.endswith(entry["digest"]["tvmflowRecord"]), (identity, entry)

    def run(self) -> None:
        """Run the stages up to `export`, in the order in which they need each other."""
        for name, stage in STAGES.items():
            for label in self.settings:
                if label.partition("/")[0] == name and not stage.TRAITS.run.measures:
                    self.run_stage(name, label)

    def run_stage(self, name: str, label: str) -> None:
        stage, folder = STAGES[name], self.out / label
        inputs = {role: path for role, path in self.sources.items() if "/" not in role}
        for need, files in stage.TRAITS.needs.items():
            target = label.partition("/")[2]
            made = self.out / (need if STAGES[need].TRAITS.scope == "model" else f"{need}/{target}")
            paths = [made / file for file in files] or sorted(made.rglob("*"))
            inputs |= {
                f"{need}/{path.relative_to(made).as_posix()}": path
                for path in paths
                if path.is_file()
            }
            inputs |= {
                role: path for role, path in self.sources.items() if role.startswith(f"{need}/")
            }
        work = self.out.with_name(f"{self.out.name}-work") / label
        for path in (folder, work):
            path.mkdir(parents=True)
        settings = parse_settings(stage.run, self.settings[label])
        stage.run(settings, StageContext(inputs, folder, work, work, work, lambda event: None))

    def check_results(self) -> int:
        """Compare every file that one stage read of another; return how many there are."""
        results = self.of_kind("result")
        for entry in results:
            if not entry["name"].startswith("emulation_program"):
                assert sha256(self.out / entry["name"]) == entry["digest"]["sha256"], entry["name"]
        return len(results)


def main(statement: str, materials: str, out: str) -> None:
    rebuild = Rebuild(Path(statement), Path(materials), Path(out))
    rebuild.check_tools()
    rebuild.run()
    sys.stdout.write(f"{rebuild.check_results()} results are the same\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
