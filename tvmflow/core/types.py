"""Frozen values that every layer shares: plans, stages, keys, artifacts and decisions.

They are named tuples: most of them cross a process boundary or a file as JSON lists.
"""

import base64
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Json = Any
"""A value that `json.dumps` takes: None, bool, int, float, str, list or dict of those."""

Array: TypeAlias = "np.ndarray[Any, Any]"
"""An array of any shape and dtype. Annotations have it without an import of NumPy."""

Feed: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
"""A batch of inputs by name."""

STATEMENT_SUFFIX = ".intoto.jsonl"
"""The end of the name of a statement of provenance, which is beside the files that it is about."""

Size = int | str
"""A size of a tensor: a number, or an expression of dimensions such as `2 * seq + 1` (see `core.dimensions`)."""

Precision = Literal["model", "mixed", "float16", "bfloat16"]
"""The precisions of a recipe, the finest first."""

OPTIMIZED_OPERATORS: Final = {
    "conv1d": "a convolution over a sequence",
    "conv2d": "a convolution over an image",
    "conv3d": "a convolution over a volume, such as a video",
    "grouped_conv2d": "a convolution over an image whose groups have several channels each",
    "depthwise_conv2d": "a convolution over an image of each channel by itself",
    "conv1d_transpose": "a transposed convolution over a sequence",
    "conv2d_transpose": "a transposed convolution over an image",
    "conv3d_transpose": "a transposed convolution over a volume",
    "matmul": "a matrix product with weights",
    "attention": "softmax of the product of queries and keys, times values",
}
"""The operators that have optimized kernels for CPUs, and that a recipe can exempt (`kernels.plain`)."""


class Dimension(NamedTuple):
    """A size that each call of a library chooses. Its name is an identifier.

    All sizes, `min` and `max` included, are multiples of `multiple_of`. Rules optimize for the largest of `tune_at`.
    """

    name: str
    min: int
    max: int
    multiple_of: int = 1
    tune_at: tuple[int, ...] = ()

    def to_json(self) -> Json:
        """Return the dimension as plain JSON."""
        document = {**self._asdict(), "tune_at": list(self.tune_at)}
        if not self.tune_at:
            del document["tune_at"]
        return document

    @classmethod
    def from_json(cls, value: Json) -> "Dimension":
        """Return the dimension that `to_json` wrote."""
        return cls(**{**value, "tune_at": tuple(value.get("tune_at", ()))})

    @classmethod
    def list_of(cls, signature: Mapping[str, Json]) -> "tuple[Dimension, ...]":
        """Return the dimensions of a signature; none for a model of fixed sizes."""
        return tuple(map(cls.from_json, signature.get("dimensions", ())))

    @property
    def range_text(self) -> str:
        """The sizes that it can have, for messages.

        >>> Dimension("seq", 8, 512, 8).range_text
        '8 to 512, multiples of 8'
        """
        multiples = f", multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.min} to {self.max}{multiples}"

    @property
    def least_nonempty(self) -> int:
        """The smallest size above 0."""
        return self.min or self.multiple_of

    def find_problem(self, size: int) -> str:
        """Return why it cannot have a size, or an empty string."""
        if self.min <= size <= self.max and size % self.multiple_of == 0:
            return ""
        return f"the dimension {self.name} is {size}, and its sizes are {self.range_text}"


class State(NamedTuple):
    """A tensor that a call leaves for the next one: an input, and the output that replaces it.

    It grows along `axis`; None if each call replaces it. `initial` is its first content in base64, dense in C order;
    empty for zeros.
    """

    input: str
    output: str
    axis: int | None = None
    initial: str = ""

    @classmethod
    def list_of(cls, signature: Mapping[str, Json]) -> "tuple[State, ...]":
        """Return the states of a signature, in the order of the inputs."""
        return tuple(cls(**entry) for entry in signature.get("states", ()))

    @classmethod
    def find_length(cls, signature: Mapping[str, Json]) -> "Dimension | None":
        """Return the dimension that is the length of all growing states; None if none grows."""
        inputs = {entry["name"]: entry for entry in signature["inputs"]}
        names = {
            inputs[state.input]["sizes"][state.axis]
            for state in cls.list_of(signature)
            if state.axis is not None
        }
        return next((entry for entry in Dimension.list_of(signature) if entry.name in names), None)

    def content(self, size: int) -> bytes:
        """Return its content at the beginning, `size` bytes."""
        return base64.b64decode(self.initial) or bytes(size)


class TensorSpec(NamedTuple):
    """One input or output of a model.

    With dynamic shapes, `shape` is the maximum shape, and `sizes` the symbolic one: integers and names of dimensions
    for an input. The size of `bounded_axis` is data-dependent, with its upper bound in `shape`; all axes before it
    have size 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bounded_axis: int | None = None
    sizes: tuple[Size, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of all elements."""
        bits = 8 if self.dtype == "bool" else int(self.dtype.lstrip("bfiloatun"))
        return math.prod(self.shape) * bits // 8

    def to_json(self) -> Json:
        """Return the tensor as plain JSON."""
        document = {**self._asdict(), "shape": list(self.shape)}
        if self.bounded_axis is None:
            del document["bounded_axis"]
        document["sizes"] = list(self.sizes)
        if not self.sizes:
            del document["sizes"]
        return document

    @classmethod
    def from_json(cls, value: Json) -> "TensorSpec":
        """Return the tensor that `to_json` wrote."""
        shape = tuple(value["shape"])
        sizes = tuple(value.get("sizes", ()))
        return cls(value["name"], shape, value["dtype"], value.get("bounded_axis"), sizes)


def shape_text(tensor: Json) -> str:
    """Return the shape of a tensor in a signature.

    >>> shape_text({"shape": [64, 4]}), shape_text({"shape": [1, 64, 4], "bounded_axis": 1})
    ('[64, 4]', '[1, at most 64, 4]')
    """
    bounded = tensor.get("bounded_axis")
    sizes = [
        f"at most {size}" if axis == bounded else str(size)
        for axis, size in enumerate(tensor.get("sizes") or tensor["shape"])
    ]
    return f"[{', '.join(sizes)}]"


class InputFile(NamedTuple):
    """A file from outside the store that a stage reads; the key contains its content, not its path."""

    role: str
    """The name by which the stage reads it."""
    path: str
    """Its absolute path; empty before a download. After one, only planning reads it: a stage downloads it again."""
    where: str
    """The position in the recipe that names it (`file:line:column`), for errors."""
    url: str = ""
    """The address to download it from. Such a file has a `sha256`, which the key uses."""
    sha256: str = ""
    """The digest (hex) that the recipe expects; empty when it names none."""
    sha256_where: str = ""
    sha256_field: str = "sha256"
    """The position of that digest in the recipe, and its field below `model`."""
    keyed: bool = True
    """False if the key already depends on another stage that reads this file."""
    folder: str = ""
    """The folder of many files, whose paths in it end their roles: keys and reports have one digest for all."""


class Need(NamedTuple):
    """Output files of another stage that a stage reads as `<stage>/<file>`; all if none are named."""

    stage: str
    stage_id: str
    files: tuple[str, ...]

    @property
    def maker(self) -> str:
        """The name of the stage that makes the files."""
        return self.stage_id.partition(":")[2].partition("/")[0]


class RunTraits(NamedTuple):
    """The traits that a stage declares for the code that runs, locks and reports it."""

    measures: bool = False
    """It measures time, with exclusive use of the device."""
    searches: bool = False
    """It chooses schedules by a search, whose result a locked run takes from the lock file."""
    uses_ledger: bool = False
    is_locked: bool = True
    """A lock file records its outputs, and a locked run must reproduce them."""
    is_gate: bool = False
    """Nothing of its target is delivered before it has succeeded."""
    unlocked_settings: tuple[str, ...] = ()
    """Settings that only name the machine it ran on, which a lock file leaves out."""


class StageSpec(NamedTuple):
    """One stage of a plan: all parts of its key, except content that is not known yet.

    Its id is `RECIPE:STAGE[/TARGET]`, with the name of a recipe or a variant, and without a target for a stage that
    runs once for all. `version` is the stage's, settings are plain JSON, and `tools` the distributions that it uses.
    `pinned` has `(file, sha256)` of its outputs in a locked run. The key excludes the traits, the device kinds that
    it measures on, its memory limit (see `StageCall`), and the length of a search until its interim delivery (None:
    no such delivery).
    """

    id: str
    stage: str
    recipe: str
    target: str
    version: int
    settings: dict[str, Json]
    files: tuple[InputFile, ...]
    needs: tuple[Need, ...]
    tools: tuple[str, ...]
    timeout_s: float
    pinned: tuple[tuple[str, str], ...] = ()
    traits: RunTraits = RunTraits()
    devices: tuple[str, ...] = ()
    memory_bytes: int | None = None
    deliver_every_s: float | None = None

    @property
    def label(self) -> str:
        """The name of the stage on the command line: `STAGE[/TARGET]`."""
        return f"{self.stage}/{self.target}" if self.target else self.stage


class Delivery(NamedTuple):
    """Files of one stage that are delivered to `dist/RECIPE/TARGET` after the stage `verified_by`.

    `files` are pairs of a name in the artifact and in dist. `known_digests` are digests by name from a lock file, of
    files in the store; the stage is then any of the target.
    """

    recipe: str
    target: str
    stage_id: str
    files: tuple[tuple[str, str], ...]
    verified_by: str
    known_digests: tuple[tuple[str, str], ...] = ()

    def digests(self, artifacts: Mapping[str, "Artifact"]) -> dict[str, str]:
        """Return the digest of each file by its name in the artifact, once the stage has a result."""
        return dict(self.known_digests) or artifacts[self.stage_id].digests(())


class RecipeOrigin(NamedTuple):
    """The sources of a planned recipe, for provenance, in no key; `locked` if a lock file is enforced.

    `recipe` is the name of the recipe or of its variant. `targets` are all, with their parts, planned or not.
    """

    recipe: str
    path: str
    pipeline: str
    variant: str = ""
    locked: bool = False
    targets: tuple[str, ...] = ()


class Plan(NamedTuple):
    """All stages of a run in topological order, the deliveries when they are done, and whose they are."""

    stages: tuple[StageSpec, ...]
    deliveries: tuple[Delivery, ...]
    origins: tuple[RecipeOrigin, ...] = ()


class StageKey(NamedTuple):
    """The digest that names a result, and the pre-image that it is the digest of (for reasons)."""

    digest: str
    preimage: dict[str, Json]


class StoredFile(NamedTuple):
    """One file in the store: its name within the artifact, sha256 (hex), and size in bytes."""

    name: str
    digest: str
    size: int


class Artifact(NamedTuple):
    """A published result: its key, its files, and the facts that reports show (never part of a key)."""

    key: str
    files: tuple[StoredFile, ...]
    facts: dict[str, Json]

    def digests(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the digest of each file in `names` by name; of all files when `names` is empty."""
        return {file.name: file.digest for file in self.files if not names or file.name in names}


class Decision(NamedTuple):
    """A decision about a stage, with its reason in one line; `causes` are all reasons to run."""

    stage_id: str
    kind: Literal["hit", "run", "wait"]
    reason: str
    causes: tuple[str, ...] = ()


class StageCall(NamedTuple):
    """The input of a worker. It crosses process boundaries as plain JSON.

    `inputs` maps `<stage>/<file>` and `<role>` to read-only paths. `out` is an empty folder to fill; `work` survives
    a kill, so that the stage can resume; `ledger` is the folder of the trial ledger and `locks` that of device locks.
    A worker must refuse to run with other distributions than `tools`. `devices` are the kinds of the planning
    machine's devices that it measures on. `memory_bytes` limits its memory: 0 for no limit, None for a share of the
    machine's.
    """

    stage: str
    settings: dict[str, Json]
    inputs: dict[str, str]
    out: str
    work: str
    ledger: str
    locks: str
    timeout_s: float
    tools: Mapping[str, str] = MappingProxyType({})
    traits: RunTraits = RunTraits()
    devices: tuple[str, ...] = ()
    memory_bytes: int | None = None


class StageResult(NamedTuple):
    """The end of a stage. `message` and `fix` are empty when `outcome` is `ok`."""

    outcome: Literal["ok", "failed", "blocked", "rejected", "crashed", "timeout", "cancelled"]
    message: str = ""
    fix: str = ""
    facts: Mapping[str, Json] = MappingProxyType({})
    seconds: float = 0.0
    log: str = ""
