"""The small network that several modules quantize."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.onnx_models import save
from tests.unit.stages.quantize.quantizing import RNG, import_files, small_network


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small network, imported, with eight samples."""
    folder = tmp_path_factory.mktemp("network")
    data = folder / "data.npz"
    np.savez(data, x=RNG.normal(size=(8, 3, 8, 8)).astype(np.float32))
    return {**import_files(save(small_network(), folder), folder / "import"), "data": data}
