"""What every test gets: the checkout on the path of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


# Workers import the tests' own support modules, wherever pytest was started.
os.environ["PYTHONPATH"] = str(ROOT)
