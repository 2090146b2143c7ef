"""Which branches of a program inputs take, by PyTorch."""

from __future__ import annotations

import pytest


@pytest.mark.pytorch
def test_shares_of_branches() -> None:
    """Bounds are those of the operator or of its arguments; what inputs do not decide is left out."""
    import torch

    from tvmflow.frontends.pytorch._worker import observe

    class Model(torch.nn.Module):  # type: ignore[misc]  # PyTorch may be missing
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            a = torch.relu(x) + torch.nn.functional.hardtanh(x, -3, 1.5) + x.clamp(min=-2)
            b = torch.where(mask, a, -a) + torch.nn.functional.selu(torch.ones(4))
            return torch.cond(b.sum() > 1000, lambda t: t * 2, lambda t: -t, (b,))

    values = (torch.tensor([-4.0, -1.0, 0.0, 2.0]), torch.tensor([True, False, False, False]))
    module = torch.export.export(Model(), values).module()
    found = {entry.operator: dict(entry.branches) for entry in observe(module, values)}
    assert found == {
        "relu": {"negative inputs": 0.5, "positive inputs": 0.25},
        "hardtanh": {
            "inputs below -3": 0.25,
            "inputs between its bounds": 0.5,
            "inputs above 1.5": 0.25,
        },
        "clamp": {"inputs below -2": 0.25, "inputs between its bounds": 0.75},
        "where": {"true": 0.25, "false": 0.75},
        "cond": {"true": 0.0, "false": 1.0},
    }
