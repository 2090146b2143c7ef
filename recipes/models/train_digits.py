"""Train the digit classifier that ships with tvmflow, and write its MXNet checkpoint and test set.

Needs `pip install 'tvmflow[mxnet,train]'`. Writes, beside this script:

- `digits-symbol.json`, `digits-0010.params`: the checkpoint of epoch 10
- `digits-test.npz`: `data` (N×1×8×8 float32, 0 to 1) and `label` (int64) of 360 images that are not used for training

The data are the 1,797 handwritten digits of scikit-learn's `load_digits`. Seeds are fixed and
MXNet runs on one thread, so that the same versions give the same weights.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from pathlib import Path

SEED = 7
EPOCHS = 10
BATCH = 32
HELD_OUT = 360

# MXNet reads these when it is imported
os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MXNET_CPU_WORKER_NTHREADS"] = "1"
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402  (the environment above comes first)
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402

# MXNet 1.9 still uses the aliases that NumPy 1.24 removed
for _alias in (bool, int, float, complex, object, str):
    if _alias.__name__ not in vars(np):
        setattr(np, _alias.__name__, _alias)

import mxnet as mx  # noqa: E402


def network() -> mx.sym.Symbol:
    """Two 3×3 convolutions with batch norm, one pooling, one dense layer, softmax head: 40 kB of weights."""
    net = mx.sym.Variable("data")
    for number, filters in enumerate((16, 32), start=1):
        net = mx.sym.Convolution(
            net, kernel=(3, 3), pad=(1, 1), num_filter=filters, no_bias=True, name=f"conv{number}"
        )
        # fix_gamma is left at its default (True): gamma counts as 1, whatever the file says
        net = mx.sym.BatchNorm(net, name=f"bn{number}")
        net = mx.sym.Activation(net, act_type="relu", name=f"relu{number}")
    net = mx.sym.Pooling(net, kernel=(2, 2), stride=(2, 2), pool_type="max", name="pool")
    net = mx.sym.Dropout(mx.sym.Flatten(net, name="flatten"), p=0.25, name="dropout")
    net = mx.sym.FullyConnected(net, num_hidden=10, name="dense")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def main() -> None:
    """Train the classifier, and write its checkpoint and test set."""
    folder = Path(__file__).resolve().parent
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[:, None]
    train_x, test_x, train_y, test_y = train_test_split(
        images,
        digits.target.astype("int64"),
        test_size=HELD_OUT,
        stratify=digits.target,
        random_state=SEED,
    )

    random.seed(SEED)
    np.random.seed(SEED)  # MXNet's iterator and initializers draw from NumPy's global generator
    mx.random.seed(SEED)
    logging.disable(logging.WARNING)
    module = mx.mod.Module(network(), context=mx.cpu())
    module.fit(
        mx.io.NDArrayIter(train_x, train_y.astype("float32"), BATCH, shuffle=True),
        optimizer="adam",
        optimizer_params={"learning_rate": 0.002, "wd": 1e-4},
        initializer=mx.init.Xavier(),
        num_epoch=EPOCHS,
    )
    module.save_checkpoint(str(folder / "digits"), EPOCHS)
    np.savez_compressed(folder / "digits-test.npz", data=test_x, label=test_y)

    scores = module.predict(mx.io.NDArrayIter(test_x, test_y.astype("float32"), BATCH)).asnumpy()
    right = int((scores.argmax(axis=1) == test_y).sum())
    sys.stdout.write(f"{right} of {HELD_OUT} held-out digits right ({right / HELD_OUT:.2%})\n")


if __name__ == "__main__":
    main()
