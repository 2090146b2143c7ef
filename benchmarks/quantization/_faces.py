"""Images with faces in known places, and how well a detector finds them: average precision.

Faces are the 100 of 25×25 that scikit-image carries (`lfw_subset`, of Labeled Faces in the Wild), enlarged and put into
pieces of its photographs. They do not replace real scenes: they show what a detector loses, not how good it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np

_HEIGHT, _WIDTH = 240, 320
_FACES: Final = 100
_LARGEST: Final = 100
_SMALLEST: Final = 30
_BACKGROUNDS: Final = ("chelsea", "coffee", "rocket", "motorcycle_left")
# Boxes of one face overlap by more than this; the detector's own program uses the same number.
_SAME_FACE: Final = 0.3
_FOUND: Final = 0.5
_LEAST_SCORE: Final = 0.05


def compose_images(count: int, seed: int) -> tuple[Any, Any]:
    """Return images as UltraFace takes them, N×3×240×320, and their boxes, N×2×4: left, top, right, bottom from 0 to 1.

    An image has a face in each half; even and odd seeds have other faces.
    """
    import skimage
    from skimage import data, io, transform

    folder = Path(skimage.__file__).parent / "data"
    photographs = [
        io.imread(next(folder.glob(f"{name}.*"))).astype(np.float64) for name in _BACKGROUNDS
    ]
    faces = data.lfw_subset()[:_FACES][seed % 2 :: 2] * 255
    random = np.random.default_rng(seed)
    images = np.empty((count, 3, _HEIGHT, _WIDTH), np.float32)
    boxes = np.empty((count, 2, 4))
    for image, own in zip(images, boxes, strict=True):
        whole = photographs[random.integers(len(photographs))]
        top, left = (
            random.integers(size - part + 1)
            for size, part in zip(whole.shape, (_HEIGHT, _WIDTH), strict=False)
        )
        canvas = whole[top : top + _HEIGHT, left : left + _WIDTH].copy()
        for half in range(2):
            side = int(random.integers(_SMALLEST, _LARGEST))
            y = int(random.integers(_HEIGHT - side))
            x = half * _WIDTH // 2 + int(random.integers(_WIDTH // 2 - side))
            face = transform.resize(faces[random.integers(len(faces))], (side, side), order=3)
            tint = random.uniform(0.7, 1, 3)
            canvas[y : y + side, x : x + side] = np.clip(face, 0, 255)[..., None] * tint
            own[half] = x / _WIDTH, y / _HEIGHT, (x + side) / _WIDTH, (y + side) / _HEIGHT
        image[:] = ((canvas - 127) / 128).transpose(2, 0, 1)
    return images, boxes


def average_precision(outputs: Any, boxes: Any) -> float:
    """Return the area under the curve of precision and recall in percent; a face is found by a box with half its union.

    Args:
        outputs: The detector's results, N×boxes×6: the scores of background and face, and the box.
        boxes: The boxes of the faces, N×faces×4.
    """
    scores: list[float] = []
    hits: list[bool] = []
    for result, truth in zip(outputs, boxes, strict=True):
        left = np.ones(len(truth), bool)
        for score, box in _suppress(result[:, 1], result[:, 2:]):
            overlaps = np.where(left, _overlap(box, truth), 0)
            best = int(overlaps.argmax())
            scores.append(score)
            hits.append(overlaps[best] >= _FOUND)
            left[best] &= not hits[-1]
    order = np.argsort(-np.array(scores), kind="stable")
    found = np.cumsum(np.array(hits)[order])
    precision = found / np.arange(1, len(found) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    recall = found / boxes[..., 0].size
    return float(np.sum(np.diff(recall, prepend=0) * envelope) * 100)


def _suppress(scores: Any, boxes: Any) -> list[tuple[float, Any]]:
    """Return the boxes that are the best ones of their place, best first."""
    likely = np.flatnonzero(scores > _LEAST_SCORE)
    left = likely[np.argsort(-scores[likely], kind="stable")]
    kept = []
    while len(left):
        first = left[0]
        kept.append((float(scores[first]), boxes[first]))
        left = left[_overlap(boxes[first], boxes[left]) <= _SAME_FACE]
    return kept


def _overlap(box: Any, others: Any) -> Any:
    """Return the intersection of a box with others, relative to their union."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    shared = np.prod(np.maximum(sides, 0), axis=1)
    areas = np.prod(others[:, 2:] - others[:, :2], axis=1)
    return shared / np.maximum(np.prod(box[2:] - box[:2]) + areas - shared, 1e-12)


def write_detector(path: Path) -> None:
    """Write UltraFace RFB-320 from `TVMFLOW_TEST_MODELS`, with the input `x` and weights that are no inputs.

    Raises:
        SystemExit: The folder has no such file.
    """
    import onnx
    from onnx import version_converter

    source = Path(os.environ.get("TVMFLOW_TEST_MODELS", "")) / "ultraface/version-RFB-320.onnx"
    if not source.exists():
        raise SystemExit("set TVMFLOW_TEST_MODELS to the folder of public models: no UltraFace")
    # per-channel QDQ of ONNX Runtime needs opset 13
    model = version_converter.convert_version(onnx.load(source), 13)
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in [*model.graph.input]:
        if value.name in weights:
            model.graph.input.remove(value)
    (entry,) = model.graph.input
    for node in model.graph.node:
        node.input[:] = ["x" if name == entry.name else name for name in node.input]
    entry.name = "x"
    onnx.save(model, path)
