"""The GPU of this machine: what is said where there is none, an old driver, or another one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import StandInGpu
from tvmflow.targets import gpu
from tvmflow.targets.resolve import resolve
from tvmflow.targets.host import Host

SERVER = {"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}}
