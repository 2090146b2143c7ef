"""Every converter against MXNet itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.support.mxnet_runs import compare, generate
from tests.support.seeds import one_of_many
from tests.support.shared import shared_folder
from tests.unit.frontends.mxnet.mxnet_cases import CASES, ZOO

pytestmark = pytest.mark.mxnet

# one network of each kind
KINDS: Final = ("mobilenetv2_0.25", "resnet18_v2", "squeezenet1.1", "vgg11_bn")


@pytest.fixture(scope="session")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases that are tested, run in MXNet once for all workers."""
    names = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_an_operator_agrees_with_mxnet.__name__
    ]
    return shared_folder(tmp_path_factory, "cases", lambda folder: generate(folder, *names))


@pytest.mark.parametrize("name", CASES)
def test_an_operator_agrees_with_mxnet(cases: Path, name: str) -> None:
    """Names, shapes, dtypes and values of all outputs are those of MXNet."""
    compare(cases, name, CASES[name].rtol, CASES[name].atol)


@pytest.mark.slow
def test_a_detector_agrees_with_mxnet(tmp_path: Path) -> None:
    """A single-shot detector: heads of three scales, anchors, decoding, suppression."""
    compare(generate(tmp_path, "ssd"), "ssd", 1e-4, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [one_of_many(name, name in KINDS) for name in ZOO])
def test_a_network_of_the_zoo_agrees_with_mxnet(tmp_path: Path, name: str) -> None:
    """Networks of the Gluon zoo with seeded weights."""
    folder = generate(tmp_path, name)
    # single outputs may come out near zero where large numbers cancel
    largest = float(abs(np.load(folder / f"{name}.npz")["out:0"]).max())
    compare(folder, name, 1e-4, 1e-5 * largest)
