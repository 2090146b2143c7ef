"""Writes down what a finished run came from and gave."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tvmflow.decide import Survey
from tvmflow.keys import canonical
from tvmflow.locks._file import FOR_CHECKS, MEASURING, SEARCHING, Lock, LockedTarget
from tvmflow.planned import PlannedRecipe, Target, machines_of
from tvmflow.stages import pick_best
from tvmflow.stores.local import LocalStore
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.tuning.ledger import trial_id
from tvmflow.values import Artifact, Json, Plan, StageSpec
from tvmflow.yaml_positions import write_yaml

_HEAD: Final = """\
# What this release came from and gave: written by `tvmflow lock`, kept to by `tvmflow run --locked`.
# Compare two with `tvmflow diff`. What stands under `measured` is for readers; nothing is held to it.
"""

# A stage's settings that say on which machine it ran, and nothing of what was asked.
UNLOCKED_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {"verify": ("target",)}


def make_lock(
    recipes: Sequence[PlannedRecipe],
    plan: Plan,
    survey: Survey,
    store: LocalStore,
    path: Path,
    kept: Lock | None = None,
) -> str:
    """The text of the lock at `path` for a plan of which every stage has its result.

    The same results give the same text, wherever they were made. Of a plan that is held to a lock,
    `kept`, the search has no results: what it had found is taken from there.
    """
    tools: dict[str, str] = {}
    architecture = ""
    entries: dict[str, Json] = {}
    for planned in sorted(recipes, key=lambda each: each.recipe.name):
        specs = [spec for spec in plan.stages if spec.recipe == planned.recipe.name]
        found = _Found(store, {spec.label: survey.artifacts[spec.id] for spec in specs})
        entries[planned.recipe.name] = {
            "recipe": _relative(planned.loaded.path, path),
            "version": planned.recipe.version,
            **found.signature(),
            "stages": {
                spec.label: _stage(spec, survey)
                for spec in sorted(specs, key=lambda spec: spec.label)
                if spec.stage not in SEARCHING
            },
            "targets": {
                machine.name: found.target(machine, target, _kept(kept, planned, machine))
                for target in sorted(planned.targets, key=lambda each: each.name)
                for machine in machines_of(target)
            },
        }
        for spec in specs:
            preimage = survey.keys[spec.id].preimage
            tools.update(preimage["tools"])
            architecture = preimage["machine"]
    lock = {
        "lock": 1,
        "machine": architecture,
        "tools": dict(sorted(tools.items())),
        "recipes": entries,
    }
    return _HEAD + write_yaml(lock)


def pin(store: LocalStore, path: Path, survey: Survey) -> None:
    """Keep what a lock needs for as long as it is there, whatever else is let go. Within the run that made it."""
    keys = [key.digest for key in survey.keys.values()]
    store.pin(f"lock:{path.absolute()}", keys, file=str(path.absolute()))


def stage_of(name: str) -> str:
    """The stage that an input is a file of, or the role of a file from outside."""
    return name.partition("/")[0]


def settings_of(stage: str, settings: Mapping[str, Json]) -> dict[str, Json]:
    """A stage's settings as a lock has them: plain values in a stable order, without those of a machine that measures."""
    kept = {
        name: value
        for name, value in settings.items()
        if name not in UNLOCKED_SETTINGS.get(stage, ())
    }
    plain: dict[str, Json] = json.loads(canonical(kept))
    return plain


def _kept(
    lock: Lock | None, planned: PlannedRecipe, machine: ResolvedTarget
) -> LockedTarget | None:
    recipe = lock.recipes.get(planned.recipe.name) if lock else None
    return recipe.targets.get(machine.name) if recipe else None


def _stage(spec: StageSpec, survey: Survey) -> dict[str, Json]:
    preimage = survey.keys[spec.id].preimage
    free = spec.stage in MEASURING | FOR_CHECKS
    outputs = {} if free else survey.artifacts[spec.id].digests(())
    inputs = sorted(preimage["inputs"].items())
    return {
        "version": spec.version,
        "settings": settings_of(spec.stage, spec.settings),
        "inputs": {name: digest for name, digest in inputs if stage_of(name) not in FOR_CHECKS},
        **({"outputs": dict(sorted(outputs.items()))} if outputs else {}),
    }


def _relative(recipe: Path, lock: Path) -> str:
    return Path(os.path.relpath(recipe, lock.parent)).as_posix()


class _Found:
    """A recipe's results, by the labels of their stages."""

    def __init__(self, store: LocalStore, artifacts: Mapping[str, Artifact]) -> None:
        self._store = store
        self._artifacts = artifacts

    def signature(self) -> dict[str, Json]:
        """What the model takes, gives and is made of."""
        # of a model in parts there is one for each target that cuts it elsewhere
        labels = [label for label in self._artifacts if label.partition("/")[0] == "import"]
        facts = self._facts(min(labels, default=""))
        return {
            **{
                kind: {each["name"]: _shaped(each) for each in facts.get(kind, ())}
                for kind in ("inputs", "outputs")
            },
            "operators": facts.get("operators", {}),
        }

    def target(
        self, machine: ResolvedTarget, target: Target, kept: LockedTarget | None
    ) -> dict[str, Json]:
        """A machine that was built for, and what was found out about the model on it."""
        held = kept.model_dump(mode="json", exclude_defaults=True) if kept else {}
        kernels = held.get("kernels") or self._kernels(machine.name)
        coverage = held.get("measured", {}).get("coverage")
        measured = self._measured(machine.name, target.name, coverage)
        return {
            "tvm": json.loads(canonical(machine.tvm)),
            "cores": machine.cores,
            "features": list(machine.features),
            **({"toolchain": machine.toolchain} if machine.toolchain else {}),
            **({"measured": measured} if measured else {}),
            **({"kernels": kernels} if kernels else {}),
        }

    def _measured(self, machine: str, target: str, coverage: float | None) -> dict[str, Json]:
        verified, chosen = self._facts(f"verify/{target}"), self._facts(f"pick_best/{machine}")
        errors = [each["max_abs_error"] for each in verified.get("outputs", {}).values()]
        latency = verified.get("latency", {}).get("library")
        if coverage is None:
            coverage = chosen.get("coverage") or None
        found: dict[str, Any] = {
            "accuracy": verified.get("accuracy"),
            "max_abs_error": max(errors) if errors else None,
            "latency_us": round(latency["median"] * 1e6, 3) if latency else None,
            "coverage": coverage,
            "bytes": self._facts(f"export/{machine}").get("files"),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _kernels(self, machine: str) -> dict[str, Json]:
        """Every kernel, by its workload's key, with its times and its schedule if one was chosen."""
        tasks = self._json(f"extract_tasks/{machine}", "tasks.json") or []
        traces = self._json(f"pick_best/{machine}", pick_best.CHOSEN) or {}
        times = {
            each["name"]: each for each in self._facts(f"pick_best/{machine}").get("kernels", ())
        }
        return {
            task["key"]: {
                "names": task["names"],
                "calls": task["weight"],
                **_times(times.get(task["names"][0], {})),
                **_chosen(traces.get(task["key"])),
            }
            for task in sorted(tasks, key=lambda task: str(task["key"]))
        }

    def _facts(self, label: str) -> dict[str, Any]:
        found = self._artifacts.get(label)
        return found.facts if found else {}

    def _json(self, label: str, name: str) -> Any:
        found = self._artifacts.get(label)
        if found is None:
            return None
        return json.loads(Path(self._store.checked_blob(found.digests((name,))[name])).read_text())


def _shaped(tensor: Mapping[str, Any]) -> str:
    return f"{tensor['dtype']}[{'×'.join(map(str, tensor['shape']))}]"


def _times(kernel: Mapping[str, Any]) -> dict[str, float]:
    names = ("untuned_us", "tuned_us")
    return {name: kernel[name] for name in names if kernel.get(name) is not None}


def _chosen(trace: Json) -> dict[str, str]:
    return {"trial": trial_id(trace), "trace": canonical(trace).decode()} if trace else {}
