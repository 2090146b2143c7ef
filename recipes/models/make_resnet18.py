"""Write the archive that `recipes/resnet18-pytorch.yaml` compiles: torchvision's ResNet-18.

Needs `pip install 'tvmflow[pytorch]' torchvision`. Writes `resnet18.pt2` beside this script, which git ignores.

    python make_resnet18.py               random weights from a fixed seed: same speed, meaningless outputs
    python make_resnet18.py --pretrained  the weights trained on ImageNet, which torchvision downloads and verifies
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torchvision.models import ResNet18_Weights, resnet18

SEED = 7
PATH = Path(__file__).resolve().parent / "resnet18.pt2"


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description="write ResNet-18 as an archive of torch.export")
    parser.add_argument(
        "--pretrained", action="store_true", help="download the weights trained on ImageNet"
    )
    pretrained: bool = parser.parse_args().pretrained

    torch.manual_seed(SEED)
    model = resnet18(weights=ResNet18_Weights.DEFAULT if pretrained else None).eval()
    archive = torch.export.export(model, (torch.randn(1, 3, 224, 224),))
    torch.export.save(archive, PATH)
    weights = "ImageNet weights" if pretrained else f"RANDOM weights (seed {SEED})"
    sys.stdout.write(f"wrote {PATH} with {weights}\n")


if __name__ == "__main__":
    main()
