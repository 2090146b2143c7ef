"""Write some of the images in `digits-test.npz` as PNG files, each in the folder of its class.

Needs `pip install 'tvmflow[images]'`. Writes `digits-images/<label>/<number>.png`, 8×8 pixels of 8 bits, where the
label is a line of `digits-labels.txt`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

PER_CLASS = 2
HERE = Path(__file__).parent


def main() -> None:
    """Write the first images of each class."""
    labels = (HERE / "digits-labels.txt").read_text().split()
    with np.load(HERE / "digits-test.npz") as arrays:
        images, classes = arrays["data"], arrays["label"]
    for index, label in enumerate(labels):
        folder = HERE / "digits-images" / label
        folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images[classes == index][:PER_CLASS]):
            pixels = np.rint(image[0] * 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")


if __name__ == "__main__":
    main()
