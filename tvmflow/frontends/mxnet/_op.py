"""One operator as its converter sees it: typed attributes, inputs with known shapes, and ways to refuse.

A converter is a function from `Op` to the Relax expression of its output, or a list of them.
Nothing is guessed: an attribute that no converter asked for is an error (`Op.check_all_read`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from tvm import relax

from tvmflow.errors import ImportFailed
from tvmflow.frontends.mxnet._symbol import Node

Expr = Any
"""A Relax expression (TVM ships no types)."""

Converter = Callable[["Op"], "Expr | list[Expr]"]

# What these say changes speed, memory or training, not the result
_WITHOUT_EFFECT: Final = frozenset(
    {"workspace", "cudnn_tune", "cudnn_off", "cudnn_algo_verbose", "momentum", "ctx"}
)
# Attributes for the optimizer and the scheduler that MXNet lets users put on any operator
_USER_KEYS: Final = ("lr_mult", "wd_mult", "ctx_group", "force_mirroring", "mirror_stage")
_FLAGS: Final = {"true": True, "false": False, "1": True, "0": False}
_NONE: Final = frozenset({"None", "none", ""})
_REQUIRED: Final[Any] = object()


def static_shape(value: Expr) -> tuple[int, ...]:
    """The shape of an emitted tensor."""
    return tuple(int(dim) for dim in value.ty.shape.values)


def signature(value: Expr) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an emitted tensor."""
    return static_shape(value), str(value.ty.dtype)


class Op:
    """A node, the tensors it reads, and the function that is being built.

    `inputs` gives None for an input that inference does not read.
    """

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Expr | None],
        input_names: Sequence[str],
        builder: relax.BlockBuilder,
    ) -> None:
        self.kind = node.op
        self.name = node.name
        self.builder = builder
        self._attrs = node.attrs
        self._inputs = tuple(inputs)
        self._input_names = tuple(input_names)
        self._read: set[str] = set()

    # -- inputs ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Expr:
        if index >= len(self._inputs):
            self.refuse(f"it has {len(self._inputs)} inputs, input {index} is needed")
        value = self._inputs[index]
        assert value is not None, f"{self.kind} reads an input that it declares unread"
        return value

    def reads(self, index: int) -> bool:
        """Whether inference reads this input."""
        return self._inputs[index] is not None

    def all_inputs(self) -> list[Expr]:
        """Every input, for operators with any number of them; `num_args` must agree."""
        count = self.integer("num_args", len(self))
        if count != len(self):
            self.refuse(f"num_args is {count}, but it has {len(self)} inputs")
        return [self[index] for index in range(count)]

    def shape(self, index: int = 0) -> tuple[int, ...]:
        return static_shape(self[index])

    def rank(self, index: int = 0) -> int:
        return len(self.shape(index))

    def dtype(self, index: int = 0) -> str:
        return str(self[index].ty.dtype)

    def axis(self, value: int, rank: int | None = None) -> int:
        """A possibly negative axis of the first input as a position."""
        rank = self.rank() if rank is None else rank
        if not -rank <= value < rank:
            self.refuse(f"axis {value} does not exist in {rank} dimensions")
        return value % rank

    def expect_shape(self, index: int, shape: tuple[int, ...]) -> Expr:
        """Input `index`, which must have this shape."""
        if (found := self.shape(index)) != shape:
            self.refuse(
                f"its input {self._input_names[index]!r} has the shape {found}, but {shape} is needed "
                f"for data of shape {self.shape()}",
                fix="check that the recipe's input shapes are those the model was made for, "
                "and that the two files belong together",
            )
        return self[index]

    # -- attributes ------------------------------------------------------------------------

    def _raw(self, key: str) -> str | None:
        self._read.add(key)
        value = self._attrs.get(key)
        return None if value is None or value in _NONE else str(value)

    def _parsed(self, key: str, default: Any, parse: Callable[[str], Any], wanted: str) -> Any:
        text = self._raw(key)
        if text is None:
            if default is _REQUIRED:
                self.refuse(f"the attribute {key} is missing")
            return default
        try:
            return parse(text.strip())
        except (ValueError, SyntaxError, TypeError, KeyError):
            self.refuse(f"{key}={text!r} is not {wanted}")

    def has(self, key: str) -> bool:
        """Whether the attribute was written, with a value other than None."""
        return self._raw(key) is not None

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._parsed(key, default, lambda t: _FLAGS[t.lower()], "true or false")
        return value

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        value: int = self._parsed(key, default, int, "an integer")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        if self._attrs.get(key) in _NONE:
            # a None that was written is not the default
            self.ignore(key)
            return None
        value: int | None = self._parsed(key, default, int, "an integer")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        value: float = self._parsed(key, default, _number, "a number")
        return value

    def choice(self, key: str, default: str, supported: Sequence[str]) -> str:
        """One of the values that can be imported."""
        value: str = self._parsed(key, default, str, "a word")
        if value not in supported:
            self.refuse(f"{key}={value!r} is not supported, only {', '.join(supported)}")
        return value

    def integers(self, key: str, default: Sequence[int] = _REQUIRED) -> tuple[int, ...]:
        """A tuple; a single number counts as a tuple of one."""
        value: Sequence[int] = self._parsed(key, default, _integers, "a tuple of integers")
        return tuple(value)

    def numbers(self, key: str, default: Sequence[float] = _REQUIRED) -> tuple[float, ...]:
        value: Sequence[float] = self._parsed(key, default, _numbers, "a tuple of numbers")
        return tuple(value)

    def optional_integers(self, key: str) -> tuple[int, ...] | None:
        """A tuple, or None when it was not written."""
        value: tuple[int, ...] | None = self._parsed(key, None, _integers, "a tuple of integers")
        return value

    def bounds(self, key: str) -> tuple[int | None, ...]:
        """A tuple in which None may stand, as in `slice`."""
        value: tuple[int | None, ...] = self._parsed(key, _REQUIRED, _bounds, "a tuple of integers")
        return value

    def require(self, key: str, value: str, why: str) -> None:
        """Refuse every other value of an attribute whose default is `value`."""
        text = self._raw(key)
        if text is not None and text.lower() != value.lower():
            self.refuse(f"{key}={text!r} is not supported: {why}")

    def ignore(self, *keys: str) -> None:
        """These attributes do not matter to inference."""
        self._read.update(keys)

    def check_all_read(self) -> None:
        """Refuse attributes that the converter did not look at: they might change the result."""
        unread = [
            f"{key}={value!r}"
            for key, value in sorted(self._attrs.items())
            if key not in self._read
            and key not in _WITHOUT_EFFECT
            and not key.startswith("__")
            and not any(key == user or key.endswith(f"_{user}") for user in _USER_KEYS)
        ]
        if unread:
            self.refuse(f"the attribute {', '.join(unread)} is not supported")

    # -- results ---------------------------------------------------------------------------

    def emit(self, value: Expr) -> Expr:
        """Give an intermediate value a name, so that its shape is known."""
        return self.builder.emit(value)

    def scalar(self, value: float, dtype: str | None = None) -> Expr:
        """A constant of the first input's dtype."""
        return relax.const(value, dtype or self.dtype())

    def te(self, function: Callable[..., Any], *args: Any, name: str) -> Expr:
        """Call a tensor expression, for what Relax has no operator for."""
        return self.builder.emit_te(function, *args, primfunc_name_hint=name)

    def refuse(self, why: str, fix: str = "") -> NoReturn:
        """This node cannot be imported."""
        raise ImportFailed(f"{self.kind} {self.name!r} cannot be imported: {why}", fix=fix)


def _number(text: str) -> float:
    return float(_FLAGS[text.lower()] if text.lower() in ("true", "false") else text)


def _literal(text: str) -> Any:
    # MXNet also writes (2L, 2L), and lists
    return ast.literal_eval(text.replace("L", "").replace("[", "(").replace("]", ")"))


def _tuple(text: str, kind: Callable[[Any], Any]) -> tuple[Any, ...]:
    value = _literal(text)
    return tuple(kind(item) for item in value) if isinstance(value, tuple) else (kind(value),)


def _integers(text: str) -> tuple[int, ...]:
    return _tuple(text, int)


def _numbers(text: str) -> tuple[float, ...]:
    return _tuple(text, float)


def _bounds(text: str) -> tuple[int | None, ...]:
    return _tuple(text, lambda item: None if item is None else int(item))


def table(*parts: Mapping[str, Converter]) -> dict[str, Converter]:
    """One table of several that must not overlap."""
    whole: dict[str, Converter] = {}
    for part in parts:
        assert not whole.keys() & part.keys(), sorted(whole.keys() & part.keys())
        whole.update(part)
    return whole
