"""Write the archives that the tests of PyTorch models import: `python -m tests.e2e.make_archives FOLDER`.

Runs in a process of its own, so that tests and PyTorch do not share one.
"""

# PyTorch need not be installed where types are checked.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

BATCH = torch.export.Dim("batch", min=1, max=16)


@dataclasses.dataclass
class Answer:
    """What a model of another package returns: importing it must not need that package."""

    scores: torch.Tensor
    states: list[torch.Tensor]


pytree.register_pytree_node(
    Answer,
    lambda value: ([value.scores, value.states], ["scores", "states"]),
    lambda values, _: Answer(*values),
    flatten_with_keys_fn=lambda value: (
        [(pytree.GetAttrKey("scores"), value.scores), (pytree.GetAttrKey("states"), value.states)],
        ["scores", "states"],
    ),
    serialized_type_name="nowhere.to.be.found.Answer",
)


class Convolutions(nn.Module):
    """A dictionary with nested values, of a batch that is free, and a weight with the name of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head, self.scores = nn.Linear(8, 4), nn.Parameter(torch.rand(4))

    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        """Return scores, and features in a tuple and a list."""
        features = self.norm(self.conv(image)).relu_().mean((2, 3))
        return {
            "scores": self.head(features) * self.scores * scale,
            "inner": (features, [features + 1]),
        }


class Text(nn.Module):
    """Inputs of int64 and bool in a dictionary, and results that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, batch: dict[str, torch.Tensor], factor: int = 2) -> Any:
        """Return a tensor twice, nothing, an input as it is, and a number."""
        sums = (self.table(batch["ids"]) * batch["mask"].unsqueeze(-1)).sum(1) * factor
        return sums, sums, None, batch["ids"], 3


class Wrapped(nn.Module):
    """A class of another package, as input and as output."""

    def forward(self, x: torch.Tensor, before: Answer) -> Answer:
        """Return sums."""
        return Answer(x + before.scores, [x * 2, *before.states])


class Recurrent(nn.Module):
    """All that a recurrent layer returns."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(10, 16, 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> Any:
        """Return outputs and states."""
        return self.layers(x)


class Counter(nn.Module):
    """A state that each call changes, where no operator says so by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count the calls."""
        torch.add(self.count, 1.0, out=self.count)
        return x + self.count


class Cell(nn.Module):
    """A state that does not begin with zeros, a count of calls, and a buffer that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.linspace(-1, 1, 4)[None])
        self.register_buffer("count", torch.tensor(3), persistent=False)
        self.register_buffer("scale", torch.full((1, 4), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next state, scaled."""
        self.state.copy_(torch.tanh(self.linear(x) + self.state))
        self.count.add_(1)
        return self.state * self.scale * self.count


class Running(nn.Module):
    """A module with a state inside another one; an output has the name of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the cell does, and its state."""
        return {"y": self.cell(x) + 1, "cell.state": self.cell.state}


class Streaming(nn.Module):
    """A causal convolution over chunks, and a window that moves, which is written in parts."""

    past: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 4)
        self.register_buffer("past", torch.zeros(1, 3, 3))
        self.register_buffer("window", torch.ones(1, 6))

    def forward(self, chunk: torch.Tensor) -> Any:
        """Return features, and the mean of the window."""
        whole = torch.cat([self.past, chunk], -1)
        self.past = whole[:, :, -3:]
        self.window[:, :-1] = self.window[:, 1:].clone()
        self.window[:, -1] = chunk.mean((1, 2))
        return self.conv(whole), self.window.mean(-1)


class Cached(nn.Module):
    """Attention over a cache of a fixed size; each call writes the row at its position."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)
        for index in range(2):
            self.register_buffer(f"cache_{index}", torch.zeros(1, 16, 8), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return attention to all tokens so far."""
        self.cache_0.index_copy_(1, position, self.keys(x))
        start = position.item()
        torch._check(start >= 0)
        torch._check(start < 16)
        self.cache_1[:, start : start + 1] = self.values(x)
        hidden = torch.arange(16) > position[:, None]
        scores = (x @ self.cache_0.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ self.cache_1


class Stored(nn.Module):
    """A cache in an object of its own, whose keys are a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SimpleNamespace(keys=torch.zeros(1, 16, 8), total=torch.zeros(1, 8))
        self.register_buffer("keys", self.cache.keys, persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return attention to all tokens so far, and their sum."""
        self.cache.keys.index_copy_(1, position, x)
        self.cache.total.add_(x[:, 0])
        hidden = torch.arange(16) > position[:, None]
        scores = (x @ self.keys.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ self.keys + self.cache.total


class Large(nn.Module):
    """A state that begins with more than a library can hold in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        self.state.add_(x)
        return self.state.sum()


def write_steps(path: Path, model: nn.Module, steps: list[tuple[torch.Tensor, ...]]) -> None:
    """Write the inputs and outputs of a model in each of some calls, `NAME/STEP`; inputs are by position."""
    arrays = {}
    for step, inputs in enumerate(steps):
        with torch.no_grad():
            results = pytree.tree_leaves(model(*inputs))
        for kind, tensors in (("input", inputs), ("output", results)):
            for place, tensor in enumerate(tensors):
                arrays[f"{kind}_{place}/{step}"] = tensor.numpy().copy()
    np.savez(path, **arrays)


class SingularValues(nn.Module):
    """An operator that ONNX does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return singular values."""
        return torch.linalg.svd(x)[1]


class Masked(nn.Module):
    """Attention with masks of both kinds, and operators that ONNX lacks."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return attention, as a function and by hand, replaced rows, and a circular margin."""
        keys = mask[:, None, None, :]
        bias = torch.where(keys, 0.0, -torch.inf)
        attend = nn.functional.scaled_dot_product_attention
        scores = x @ x.transpose(-1, -2)
        lowest = torch.finfo(x.dtype).min
        return (
            attend(x, x, x, attn_mask=keys.expand(-1, 1, x.shape[2], -1)),
            attend(x, x, x, attn_mask=bias),
            (scores + bias).softmax(-1) @ x,
            scores.masked_fill(~keys, lowest).softmax(-1) @ x,
            attend(x, x, x, is_causal=True),
            x.masked_scatter(keys.transpose(-1, -2), x.flip(0)),
            nn.functional.pad(x, (1, 2, -1, 3), mode="circular"),
        )


class Half(nn.Module):
    """Reductions and norms of float16, whose squares and sums exceed it."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return norms, deviations, means and attention."""
        function = nn.functional
        return (
            function.normalize(x, dim=-1),
            x.norm(dim=1),
            x.std(-1),
            x.mean(1),
            x.logsumexp(-1),
            function.layer_norm(x, (64,)),
            function.group_norm(x, 2),
            function.cosine_similarity(x, x.flip(0), dim=-1),
            function.gelu(x),
            torch.linalg.vector_norm(x, 2, [-1], dtype=torch.float16),
            x.sum(-1, dtype=torch.float32),
            function.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        )


def main() -> None:
    """Write all archives into the folder on the command line."""
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    image, ids = torch.randn(2, 3, 16, 16), torch.ones(1, 4, dtype=torch.int64)
    answer = Answer(torch.ones(1, 3), [torch.zeros(1, 2)])
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    archives: dict[str, tuple[nn.Module, tuple[Any, ...], Any]] = {
        "convolutions": (Convolutions(), (image, torch.ones(1)), ({0: BATCH}, None)),
        "text": (Text(), ({"ids": ids, "mask": ids > 0},), None),
        "wrapped": (Wrapped(), (torch.ones(1, 3), answer), None),
        "lstm": (Recurrent(nn.LSTM), (torch.randn(2, 7, 10),), None),
        "gru": (Recurrent(nn.GRU), (torch.randn(2, 7, 10),), None),
        "block": (block, (torch.randn(2, 9, 32),), None),
        "masked": (Masked(), (torch.randn(3, 2, 5, 8), torch.ones(3, 5) > 0), None),
        "half": (Half(), (torch.randn(2, 6, 64).half(),), None),
        "counter": (Counter(), (torch.ones(1, 3),), None),
        "large": (Large(), (torch.ones(1),), None),
        "svd": (SingularValues(), (torch.ones(4, 4),), None),
    }
    for name, (model, inputs, dynamic) in archives.items():
        with torch.no_grad():
            program = torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic)
        torch.export.save(program, folder / f"{name}.pt2")
    streams: dict[str, tuple[nn.Module, list[tuple[torch.Tensor, ...]]]] = {
        "running": (Running(), [(torch.randn(1, 4),) for _ in range(5)]),
        "streaming": (Streaming(), [(torch.randn(1, 3, 5),) for _ in range(5)]),
        "cached": (Cached(), [(torch.randn(1, 1, 8), torch.tensor([n])) for n in range(5)]),
        "stored": (Stored(), [(torch.randn(1, 1, 8), torch.tensor([n])) for n in range(5)]),
    }
    for name, (model, steps) in streams.items():
        with torch.no_grad():
            program = torch.export.export(model.eval(), steps[0])
        torch.export.save(program, folder / f"{name}.pt2")
        write_steps(folder / f"{name}.npz", model, steps)


if __name__ == "__main__":
    main()
