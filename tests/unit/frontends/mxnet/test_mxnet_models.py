"""A trained model as people published it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.mxnet_runs import checkpoint, compute, specs
from tvmflow.frontends import FRONTENDS

frontend = FRONTENDS["mxnet"]


@pytest.mark.models
@pytest.mark.slow
def test_a_plate_detector_agrees_with_recorded_outputs() -> None:
    """A checkpoint of MXNet 1.5 with six outputs, which MXNet 1.9.1 computed."""
    folder = os.environ.get("TVMFLOW_TEST_MODELS")
    if not folder:
        pytest.skip("TVMFLOW_TEST_MODELS does not name the folder of public models")
    lffd = Path(folder) / "lffd"
    recorded = np.load(lffd / "plate_small_io.npz")
    feed = {"data": recorded["x"]}
    model = frontend.load(checkpoint(lffd, "plate_small"), specs(feed))
    assert [spec.name for spec in model.outputs] == [
        "slice_axis12_output",
        "conv10_3_bbox_output",
        "slice_axis13_output",
        "conv13_3_bbox_output",
        "slice_axis14_output",
        "conv16_3_bbox_output",
    ]
    for index, actual in enumerate(compute(model, feed)):
        np.testing.assert_allclose(actual, recorded[f"y{index}"], rtol=1e-5, atol=1e-6)
