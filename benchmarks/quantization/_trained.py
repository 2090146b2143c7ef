"""Small networks trained on the spot, with data that ship in packages: accuracy that quantization can lose.

    python benchmarks/quantization/_trained.py [NAME ...]

Images are scikit-learn's digits (1,797 of 8×8), enlarged to 32×32: half of them train, the others
test, so one image is 0.11 percent points. Texts are pieces of Python's standard library, as tokens
of a hash; the classes are the packages they come from. Architectures are those of their papers
with fewer and narrower layers: ResNet (arXiv:1512.03385), MobileNet v2 (arXiv:1801.04381) and v3
(arXiv:1905.02244), EfficientNet (arXiv:1905.11946), ViT (arXiv:2010.11929), BERT
(arXiv:1810.04805), two layers of LSTM, and the digits' network of `recipes/models`, which reads them
as they are. Each takes seconds to a minute on two cores, is seeded, and is kept in
`TVMFLOW_BENCH_FOLDER` (default: a folder in the system's temporary one). UltraFace is not trained
but a published detector, with images of `_faces.py`.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from _faces import average_precision, compose_images, write_detector

SCRATCH: Final = Path(
    os.environ.get("TVMFLOW_BENCH_FOLDER") or Path(tempfile.gettempdir()) / "tvmflow-benchmarks"
)
_CALIBRATION: Final = 128
_SIDE: Final = 32
_TOKENS: Final = 48
_VOCABULARY: Final = 4096
_PACKAGES: Final = ("asyncio", "email", "idlelib", "json", "tkinter", "unittest", "xml", "ctypes")


class Data(NamedTuple):
    """Inputs whose first axis is the samples, and their classes."""

    train: Any
    train_labels: Any
    test: Any
    test_labels: Any


class Trained(NamedTuple):
    """The files of a trained network.

    Attributes:
        model: The ONNX file, for one sample.
        calibration: An npz file with samples that it was trained with.
        test: An npz file with other samples, and `label`; of a detector `faces`, their boxes.
    """

    model: Path
    calibration: Path
    test: Path

    def read_test(self) -> tuple[Any, Any]:
        """Return the other samples, and their labels or faces."""
        with np.load(self.test) as arrays:
            return arrays["x"], arrays["label" if "label" in arrays else "faces"]


def load_digits() -> Data:
    """Return the digits as 3×32×32 images between −1 and 1."""
    import torch
    from sklearn.datasets import load_digits as load

    digits = load()
    order = np.random.default_rng(0).permutation(len(digits.target))
    small = torch.from_numpy(digits.images[order].astype(np.float32)[:, None] / 8 - 1)
    large = torch.nn.functional.interpolate(
        small, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False
    )
    images = large.repeat(1, 3, 1, 1).numpy()
    labels = digits.target[order].astype(np.int64)
    half = len(labels) // 2
    return Data(images[:half], labels[:half], images[half:], labels[half:])


def load_small_digits() -> Data:
    """Return the digits as 1×8×8 images between 0 and 1."""
    from sklearn.datasets import load_digits as load

    digits = load()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].astype(np.float32)[:, None] / 16
    labels = digits.target[order].astype(np.int64)
    half = len(labels) // 2
    return Data(images[:half], labels[:half], images[half:], labels[half:])


def load_rows() -> Data:
    """Return the digits as sequences of 32 rows of 32 numbers."""
    digits = load_digits()
    return digits._replace(train=digits.train[:, 0], test=digits.test[:, 0])


def load_texts() -> Data:
    """Return pieces of 48 tokens of Python's standard library, and the package of each."""
    library = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[list[int]] = []
    labels: list[int] = []
    for label, package in enumerate(_PACKAGES):
        texts = [
            path.read_text(errors="replace") for path in sorted((library / package).rglob("*.py"))
        ]
        words = re.findall(r"[a-z]+|[^\sa-z]", "\n".join(texts).lower())
        tokens = [zlib.crc32(word.encode()) % _VOCABULARY for word in words]
        starts = range(0, len(tokens) - _TOKENS, _TOKENS)
        kept = list(starts)[:: max(1, len(starts) // 600)][:600]
        pieces += [tokens[start : start + _TOKENS] for start in kept]
        labels += [label] * len(kept)
    order = np.random.default_rng(0).permutation(len(labels))
    inputs, classes = np.array(pieces, np.int64)[order], np.array(labels, np.int64)[order]
    third = len(order) // 3
    return Data(inputs[third:], classes[third:], inputs[:third], classes[:third])


# ---------------------------------------------------------------- the networks


def _conv(inputs: int, out: int, kernel: int, stride: int, act: Any, groups: int = 1) -> Any:
    from torch import nn

    layers = [
        nn.Conv2d(inputs, out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


def _head(width: int, classes: int) -> list[Any]:
    from torch import nn

    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]


def resnet() -> Any:
    """Return a ResNet of 14 layers, with 32 to 128 channels."""
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, out: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                _conv(inputs, out, 3, stride, nn.ReLU), _conv(out, out, 3, 1, None)
            )
            self.skip = (
                nn.Identity()
                if stride == 1 and inputs == out
                else _conv(inputs, out, 1, stride, None)
            )
            self.act = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.act(self.body(x) + self.skip(x))

    widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    blocks = [Block(*sizes) for sizes in widths]
    return nn.Sequential(_conv(3, 32, 3, 1, nn.ReLU), *blocks, *_head(128, 10))


def _inverted(rows: list[tuple[int, int, int, int, Any, bool]], last: int) -> Any:
    """Return a network of inverted bottlenecks: kernel, expansion, channels, stride, activation, scaled."""
    from torch import nn

    class Scale(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            hidden = max(8, width // 4)
            self.gate = nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                *(nn.Conv2d(width, hidden, 1), nn.ReLU()),
                *(nn.Conv2d(hidden, width, 1), nn.Hardsigmoid()),
            )

        def forward(self, x: Any) -> Any:
            return x * self.gate(x)

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(
            self,
            inputs: int,
            kernel: int,
            expand: int,
            out: int,
            stride: int,
            act: Any,
            scaled: bool,
        ) -> None:
            super().__init__()
            wide = inputs * expand
            layers = [_conv(inputs, wide, 1, 1, act)] if expand > 1 else []
            layers.append(_conv(wide, wide, kernel, stride, act, groups=wide))
            layers += [Scale(wide)] if scaled else []
            self.body = nn.Sequential(*layers, _conv(wide, out, 1, 1, None))
            self.adds = stride == 1 and inputs == out

        def forward(self, x: Any) -> Any:
            return x + self.body(x) if self.adds else self.body(x)

    first = rows[0][4]
    blocks, width = [], 16
    for kernel, expand, out, stride, act, scaled in rows:
        blocks.append(Block(width, kernel, expand, out, stride, act, scaled))
        width = out
    end = _conv(width, last, 1, 1, rows[-1][4])
    return nn.Sequential(_conv(3, 16, 3, 1, first), *blocks, end, *_head(last, 10))


def mobilenet_v2() -> Any:
    """Return a MobileNet v2 of 8 blocks."""
    from torch.nn import ReLU6

    rows = [(1, 16, 1), (6, 24, 2), (6, 24, 1), (6, 32, 2), (6, 32, 1), (6, 64, 2), (6, 64, 1)]
    return _inverted([(3, *row, ReLU6, False) for row in [*rows, (6, 96, 1)]], 320)


def mobilenet_v3() -> Any:
    """Return a MobileNet v3 of 7 blocks."""
    from torch.nn import Hardswish, ReLU

    early = [(3, 1, 16, 1, ReLU, False), (3, 4, 24, 2, ReLU, False), (3, 3, 24, 1, ReLU, False)]
    middle = [(5, 3, 40, 2, ReLU, True), (5, 3, 40, 1, ReLU, True)]
    late = [(3, 6, 80, 2, Hardswish, False), (5, 6, 80, 1, Hardswish, True)]
    return _inverted([*early, *middle, *late], 320)


def efficientnet() -> Any:
    """Return an EfficientNet of 7 blocks: swish, and every block scaled."""
    from torch.nn import SiLU

    rows = [(3, 1, 16, 1), (3, 6, 24, 2), (3, 6, 24, 1), (5, 6, 40, 2), (5, 6, 40, 1)]
    return _inverted([(*row, SiLU, True) for row in [*rows, (3, 6, 80, 2), (5, 6, 80, 1)]], 320)


def _encoder(width: int, layers: int, heads: int) -> Any:
    """Return an encoder whose attention is written as products, as exporters of every version write it."""
    import torch
    from torch import nn

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
            self.heads = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
            self.wide = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: Any) -> Any:
            y = self.norms[0](x)
            query, key, value = (
                linear(y).reshape(-1, y.shape[1], heads, width // heads).transpose(1, 2)
                for linear in list(self.heads)[:3]
            )
            scores = query @ key.transpose(-1, -2) * (width // heads) ** -0.5
            mixed = (
                (torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(-1, y.shape[1], width)
            )
            x = x + self.heads[3](mixed)
            return x + self.wide(self.norms[1](x))

    return nn.Sequential(*(Layer() for _ in range(layers)), nn.LayerNorm(width))


def vit() -> Any:
    """Return a ViT with patches of 4×4, 4 layers and 128 channels."""
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 128, 4, 4)
            self.places = nn.Parameter(torch.randn(1, (_SIDE // 4) ** 2, 128) * 0.02)
            self.encoder, self.head = _encoder(128, 4, 4), nn.Linear(128, 10)

        def forward(self, x: Any) -> Any:
            y = self.patches(x).flatten(2).transpose(1, 2) + self.places
            return self.head(self.encoder(y).mean(1))

    return Net()


def bert() -> Any:
    """Return a BERT-like encoder with 4 layers and 128 channels, over 48 tokens."""
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(_VOCABULARY, 128)
            self.places = nn.Parameter(torch.randn(1, _TOKENS, 128) * 0.02)
            self.encoder, self.head = _encoder(128, 4, 4), nn.Linear(128, len(_PACKAGES))

        def forward(self, x: Any) -> Any:
            return self.head(self.encoder(self.words(x) + self.places).mean(1))

    return Net()


def lstm() -> Any:
    """Return two layers of LSTM with 128 states over 32 rows, and a dense layer."""
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(_SIDE, 128, num_layers=2, batch_first=True)
            self.head = nn.Linear(128, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.cells(x)[0][:, -1])

    return Net()


def digits() -> Any:
    """Return the network of `recipes/models`: two convolutions and a dense layer."""
    from torch import nn

    convolutions = (_conv(1, 16, 3, 1, nn.ReLU), _conv(16, 32, 3, 1, nn.ReLU))
    return nn.Sequential(
        *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 10)
    )


class _Setup(NamedTuple):
    make: Callable[[], Any]
    load: Callable[[], Data]
    epochs: int
    rate: float


NETS: Final = {
    "resnet": _Setup(resnet, load_digits, 5, 3e-3),
    "mobilenet-v2": _Setup(mobilenet_v2, load_digits, 12, 4e-3),
    "mobilenet-v3": _Setup(mobilenet_v3, load_digits, 12, 4e-3),
    "efficientnet": _Setup(efficientnet, load_digits, 4, 4e-3),
    "vit": _Setup(vit, load_digits, 20, 1e-3),
    "bert": _Setup(bert, load_texts, 5, 1e-3),
    "lstm": _Setup(lstm, load_rows, 15, 4e-3),
    "digits": _Setup(digits, load_small_digits, 20, 4e-3),
}
"""The networks that can be trained."""

DETECTOR: Final = "ultraface"
"""The network that is not trained."""
_FACES_TESTED: Final = 200


def train(name: str, folder: Path | None = None) -> Trained:
    """Return the files of a network, which is trained when they are not there yet."""
    folder = folder or SCRATCH / "trained"
    files = Trained(
        *(folder / f"{name}{end}" for end in (".onnx", "-calibration.npz", "-test.npz"))
    )
    if all(path.exists() for path in files):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    if name == DETECTOR:
        write_detector(files.model)
        np.savez(files.calibration, x=compose_images(_CALIBRATION, 0)[0])
        images, boxes = compose_images(_FACES_TESTED, 1)
        np.savez(files.test, x=images, faces=boxes)
        return files
    import torch

    setup = NETS[name]
    data = setup.load()
    torch.manual_seed(0)
    net = setup.make()
    _fit(net, data, setup)
    net.eval()
    _export(net, torch.from_numpy(data.test[:1]), files.model)
    np.savez(files.calibration, x=data.train[:_CALIBRATION])
    np.savez(files.test, x=data.test, label=data.test_labels)
    return files


def _fit(net: Any, data: Data, setup: _Setup) -> None:
    import torch

    inputs, labels = torch.from_numpy(data.train), torch.from_numpy(data.train_labels)
    size = 64
    steps = setup.epochs * -(-len(labels) // size)
    optimizer = torch.optim.AdamW(net.parameters(), setup.rate, weight_decay=1e-2)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.rate, total_steps=steps)
    measure = torch.nn.CrossEntropyLoss(label_smoothing=0.05)
    for _ in range(setup.epochs):
        for batch in torch.randperm(len(labels)).split(size):
            optimizer.zero_grad()
            measure(net(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            rates.step()


def _export(net: Any, sample: Any, path: Path) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (sample,),
            str(path),
            input_names=["x"],
            output_names=["y"],
            opset_version=17,
            dynamo=False,
        )


def join(outputs: Iterable[Any]) -> Any:
    """Return the outputs for one sample, side by side."""
    return np.concatenate([output[0] for output in outputs], axis=-1)


def accuracy_of(outputs: Any, labels: Any) -> float:
    """Return the percentage of samples whose largest output is that of their class; of a detector, average precision."""
    if labels.ndim > 1:
        return average_precision(outputs, labels)
    return float(np.mean(np.argmax(outputs, axis=-1) == labels) * 100)


def main() -> None:
    """Train networks, and print their accuracy in ONNX Runtime."""
    import time

    import onnxruntime

    for name in sys.argv[1:] or (*NETS, DETECTOR):
        started = time.monotonic()
        files = train(name)
        seconds = time.monotonic() - started
        session = onnxruntime.InferenceSession(files.model)
        samples = files.read_test()
        outputs = [join(session.run(None, {"x": row[None]})) for row in samples[0]]
        accuracy = accuracy_of(np.array(outputs), samples[1])
        size = files.model.stat().st_size / 1e6
        print(f"{name:<14} {accuracy:6.2f} %  {size:5.2f} MB  {seconds:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
