"""This machine, as far as compiled code is concerned. Cheap enough to be read on every run."""

import os
from typing import NamedTuple

from tvmflow.values import Json


class Host(NamedTuple):
    """This machine as far as compiled code is concerned."""

    arch: str
    model: str
    flags: frozenset[str]
    cores: int

    def fingerprint(self) -> Json:
        """What decides which target `host` is; the same on every machine of this kind."""
        return {
            "arch": self.arch,
            "model": self.model,
            "flags": sorted(self.flags),
            "cores": self.cores,
        }


def read_host() -> Host:
    """This machine, from the kernel. Cores are those that this process may use."""
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if line.isspace():
                    break
                name, _, value = line.partition(":")
                fields[name.strip()] = value.strip()
    except OSError:
        fields["model name"] = ""
    arch = os.uname().machine
    model = fields.get("model name") or fields.get("CPU part") or arch
    detail = [fields[name] for name in ("cpu family", "model") if name in fields]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Host(
        arch=arch,
        model=" ".join([model, *detail]),
        flags=frozenset((fields.get("flags") or fields.get("Features") or "").split()),
        cores=cores or 1,
    )
