"""Write language models whose states do not grow: `python -m tests.e2e.make_language_models FOLDER`.

`tokens.json` has the prompt of each model, and the tokens that it generates.
"""

# PyTorch need not be installed where types are checked.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, INNER, STATE, RANK, KERNEL, LAYERS, LENGTH = 97, 32, 64, 8, 4, 4, 2, 64
PROMPT, COUNT = [3, 14, 15, 92, 65], 50


class SelectiveState(nn.Module):
    """A layer of Mamba in one step: a causal convolution, then a selective state space."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.enter = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv = nn.Conv1d(INNER, INNER, KERNEL, groups=INNER)
        self.select = nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        self.delta = nn.Linear(RANK, INNER)
        self.leave = nn.Linear(INNER, WIDTH, bias=False)
        self.decay = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(INNER, 1))
        self.skip = nn.Parameter(torch.ones(INNER))

    def forward(
        self, x: torch.Tensor, window: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the result, the last columns of the convolution's input, and the next state."""
        inner, gate = self.enter(self.norm(x)).chunk(2, -1)
        window = torch.cat([window, inner.transpose(1, 2)], 2)
        inner = functional.silu(self.conv(window)).squeeze(2)
        delta, into, out = self.select(inner).split([RANK, STATE, STATE], -1)
        delta = functional.softplus(self.delta(delta))
        state = state * torch.exp(-delta[..., None] * self.decay.exp())
        state = state + (delta * inner)[..., None] * into[:, None]
        y = (state * out[:, None]).sum(-1) + self.skip * inner
        return x + self.leave(y[:, None] * functional.silu(gate)), window[:, :, 1:], state


class Mamba(nn.Module):
    """States are inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(SelectiveState() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits and the next states."""
        x, following = self.words(input_ids), list[torch.Tensor]()
        for place, layer in enumerate(self.layers):
            x, *pair = layer(x, *states[2 * place : 2 * place + 2])
            following += pair
        return self.head(x), *following


class Stateful(nn.Module):
    """States are buffers."""

    def __init__(self, model: Mamba) -> None:
        super().__init__()
        self.model = model
        for name, zeros in empty().items():
            self.register_buffer(name, zeros)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        states = [self.get_buffer(name) for name in empty()]
        logits, *following = self.model(input_ids, *states)
        for state, new in zip(states, following, strict=True):
            state.copy_(new)
        return logits


class StaticCache(nn.Module):
    """Attention over a KV cache of a fixed size; the token's position says where its keys and values go."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, LENGTH, WIDTH))

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.words(input_ids) + self.places(position)
        self.k_cache.index_copy_(1, position, self.key(x))
        self.v_cache[:, position] = self.value(x)
        hidden = torch.arange(LENGTH) > position[:, None]
        scores = self.query(x) @ self.k_cache.transpose(1, 2) * WIDTH**-0.5
        return self.head(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.v_cache)


def empty() -> dict[str, torch.Tensor]:
    """Return the states of a new sequence."""
    shapes = {"window": (1, INNER, KERNEL - 1), "state": (1, INNER, STATE)}
    return {f"{kind}_{n}": torch.zeros(shapes[kind]) for n in range(LAYERS) for kind in shapes}


def generate(model: nn.Module, *, has_position: bool) -> list[int]:
    """Return the most likely tokens after the prompt."""
    tokens = list(PROMPT)
    for place in range(len(PROMPT) + COUNT - 1):
        position = [torch.tensor([place])] if has_position else []
        logits = model(torch.tensor([[tokens[place]]]), *position)
        if place >= len(PROMPT) - 1:
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def main() -> None:
    """Write all models into the folder on the command line."""
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mamba, cache = Mamba().eval().requires_grad_(False), StaticCache().eval().requires_grad_(False)
    for parameter in cache.parameters():
        # the tokens vary more
        parameter.mul_(2)
    token = torch.tensor([[1]])
    torch.onnx.export(
        mamba,
        (token, *empty().values()),
        str(folder / "mamba.onnx"),
        dynamo=False,
        input_names=["input_ids", *(f"past_{name}" for name in empty())],
        output_names=["logits", *(f"present_{name}" for name in empty())],
    )
    torch.export.save(torch.export.export(Stateful(mamba), (token,)), folder / "mamba.pt2")
    program = torch.export.export(cache, (token, torch.tensor([0])))
    torch.export.save(program, folder / "static.pt2")
    tokens = {
        "mamba": [PROMPT, generate(Stateful(mamba), has_position=False)],
        "static": [PROMPT, generate(cache, has_position=True)],
    }
    (folder / "tokens.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main()
