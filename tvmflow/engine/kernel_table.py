"""The kernels of a build: their shares of the time, their schedules, and the nodes of the model behind them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tvmflow.core.types import Json
from tvmflow.engine.builds import read_kernel_times
from tvmflow.stages._base import Facts
from tvmflow.stages.kernel_nodes import calls_text, find_kernel_nodes


class KernelRow(NamedTuple):
    """A kernel of a library. None is what is not known.

    Attributes:
        name: Its name.
        share: Its share of the time of a call of the library, from 0 to 1, as `verify` measured it.
        calls: How often an inference calls it.
        seconds: The time of all these calls in the library: its share of the latency.
        alone_s: The time of all these calls as `pick_best` measured one by itself.
        schedule: `tuned`, or the rule of its schedule.
        workload: The key of its workload; empty without tuning.
        nodes: The nodes of the model that it came from, as text.
    """

    name: str
    share: float | None
    calls: int | None
    seconds: float | None
    alone_s: float | None
    schedule: str
    workload: str
    nodes: str

    def to_json(self) -> dict[str, Json]:
        """Return the kernel as plain JSON."""
        return self._asdict()


def list_kernel_rows(
    facts: Mapping[str, Facts], workload_names: Mapping[str, str] = MappingProxyType({})
) -> list[KernelRow]:
    """Return the kernels of a build, the slowest first.

    Args:
        facts: The facts of its stages by name; those of `build` must be there.
        workload_names: The name of the workload by kernel, where it is that of another kernel.
    """
    built = facts["build"]
    rules = {name: rule for rule, names in built["schedule_rules"].items() for name in names}
    calls = find_kernel_nodes(built, facts.get("import", {}))
    shares = facts.get("verify", {}).get("profile", {}).get("kernels", {})
    times = read_kernel_times(facts.get("verify", {}))
    measured = {kernel["name"]: kernel for kernel in facts.get("pick_best", {}).get("kernels", ())}
    workloads = {
        workload["name"]: workload["key"] for workload in facts.get("tune", {}).get("workloads", ())
    }
    rows = []
    for name, rule in rules.items():
        workload = workload_names.get(name, name)
        own = measured.get(workload, {})
        count = len(calls[name]) if name in calls else own.get("calls")
        alone_s = count * _call_seconds(own) if count is not None and own else None
        measured_times = (shares.get(name), count, times.get(name), alone_s)
        nodes = calls_text(calls.get(name, ()))
        rows.append(KernelRow(name, *measured_times, rule, workloads.get(workload, ""), nodes))
    return sorted(rows, key=lambda row: (-(row.share or 0.0), -(row.alone_s or 0.0), row.name))


def _call_seconds(kernel: Facts) -> float:
    """Return the time of a call of a kernel in the facts of `pick_best`."""
    tuned_us = kernel["tuned_us"]
    return float(kernel["untuned_us"] if tuned_us is None else tuned_us) / 1e6
