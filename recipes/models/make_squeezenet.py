"""Write the MXNet checkpoint that `recipes/squeezenet-mxnet.yaml` compiles, from Gluon's model zoo.

Needs `pip install 'tvmflow[mxnet]'`. Writes, beside this script, `squeezenet1.1-symbol.json` and
`squeezenet1.1-0000.params`, which git ignores.

    python make_squeezenet.py               random weights from a fixed seed: same speed, meaningless outputs
    python make_squeezenet.py --pretrained  ImageNet weights of the zoo, which MXNet downloads and verifies
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

SEED = 7
PREFIX = "squeezenet1.1"

# MXNet reads this when it is imported
os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402  (the environment above comes first)

# MXNet 1.9 still uses the aliases that NumPy 1.24 removed
for _alias in (bool, int, float, complex, object, str):
    if _alias.__name__ not in vars(np):
        setattr(np, _alias.__name__, _alias)

import mxnet as mx  # noqa: E402


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description="write the SqueezeNet 1.1 checkpoint")
    parser.add_argument(
        "--pretrained", action="store_true", help="download the weights trained on ImageNet"
    )
    pretrained: bool = parser.parse_args().pretrained

    np.random.seed(SEED)  # MXNet's initializers draw from NumPy's global generator
    mx.random.seed(SEED)
    net = mx.gluon.model_zoo.vision.squeezenet1_1(pretrained=pretrained)
    if not pretrained:
        # He's variance, with which signals neither fade nor grow on their way through the ReLUs
        net.initialize(mx.init.MSRAPrelu(slope=0.0))
    net.hybridize()
    net(mx.nd.zeros((1, 3, 224, 224)))  # Gluon can export only what has run once
    prefix = Path(__file__).resolve().parent / PREFIX
    net.export(str(prefix), epoch=0)
    weights = "ImageNet weights" if pretrained else f"RANDOM weights (seed {SEED})"
    sys.stdout.write(f"wrote {prefix}-symbol.json and {prefix}-0000.params with {weights}\n")


if __name__ == "__main__":
    main()
