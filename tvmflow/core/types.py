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
"""A JSON value: None, bool, int, float, str, or a list or dict of JSON values."""

Array: TypeAlias = "np.ndarray[Any, Any]"
"""An array of any shape and dtype, for annotations without importing NumPy."""

Feed: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
"""Input name -> array with a batch of samples."""

STATEMENT_SUFFIX = ".intoto.jsonl"
"""Suffix of provenance statements, which lie beside the files that they describe."""

Size = int | str
"""A tensor size: an integer, or an expression of dimensions such as `2 * seq + 1` (see `core.dimensions`)."""

Precision = Literal["model", "mixed", "float16", "bfloat16"]
"""The precisions of a recipe, in descending order."""

OPTIMIZED_OPERATORS: Final = {
    "conv1d": "a convolution over a sequence",
    "conv2d": "a convolution over an image",
    "conv3d": "a convolution over a volume, such as a video",
    "grouped_conv2d": "a convolution over an image whose groups have several channels each",
    "depthwise_conv2d": "a separate convolution of each channel of an image",
    "conv1d_transpose": "a transposed convolution over a sequence",
    "conv2d_transpose": "a transposed convolution over an image",
    "conv3d_transpose": "a transposed convolution over a volume",
    "matmul": "a matrix multiplication with weights",
    "attention": "softmax of the product of queries and keys, times values",
}
"""Operators with optimized CPU kernels; a recipe can exclude them with `kernels.plain`."""


class Dimension(NamedTuple):
    """A dynamic dimension, whose size may differ between calls. Its name is an identifier.

    All sizes, including `min` and `max`, are multiples of `multiple_of`. Rules optimize for the largest of `tune_at`.
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
        """The valid sizes, for messages.

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
        """Return why a size is invalid, or an empty string."""
        if self.min <= size <= self.max and size % self.multiple_of == 0:
            return ""
        return f"the dimension {self.name} is {size}, and its sizes are {self.range_text}"


class State(NamedTuple):
    """A tensor that is kept between calls: an output that is an input of the next call.

    With `axis`, each call appends the output along that axis; with None, the output replaces the input. `initial` is
    the first content in base64, in C order; empty means zeros. `stored_as` is the dtype in which the library
    stores a float32 state of the model; empty means the model's.
    """

    input: str
    output: str
    axis: int | None = None
    initial: str = ""
    stored_as: str = ""

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
        """Return the initial content of `size` bytes."""
        return base64.b64decode(self.initial) or bytes(size)


INT8_ROWS: Final = "int8"
"""The dtype of states whose rows are quantized, see `TensorSpec.row_scales`."""
SCALE_BYTES: Final = 4
"""The size in bytes of the float32 scale at the end of each row of a tensor with `row_scales`."""
SCALE_STEPS: Final = 127
"""The largest integer of such a row."""


class TensorSpec(NamedTuple):
    """One input or output of a model.

    With dynamic shapes, `shape` is the maximum shape, and `sizes` the symbolic shape; an input's sizes are integers and
    names of dimensions. The size of `bounded_axis` is data-dependent, with its upper bound in `shape`; all axes before
    that axis have size 1. With `row_scales`, the last axis has int8 values and the bytes of their float32 scale.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bounded_axis: int | None = None
    sizes: tuple[Size, ...] = ()
    row_scales: bool = False

    @property
    def bytes(self) -> int:
        """The total size in bytes."""
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
        if not self.row_scales:
            del document["row_scales"]
        return document

    @classmethod
    def from_json(cls, value: Json) -> "TensorSpec":
        """Return the tensor that `to_json` wrote."""
        shape = tuple(value["shape"])
        sizes = tuple(value.get("sizes", ()))
        rest = value.get("bounded_axis"), sizes, value.get("row_scales", False)
        return cls(value["name"], shape, value["dtype"], *rest)

    def stored_as(self, dtype: str) -> "TensorSpec":
        """Return this tensor in another dtype; rows have their scales if it is `INT8_ROWS`."""
        shape, sizes, more = self.shape, self.sizes, (dtype == INT8_ROWS) - self.row_scales
        if more:
            shape = (*shape[:-1], shape[-1] + more * SCALE_BYTES)
            sizes = (*sizes[:-1], shape[-1]) if sizes else ()
        return self._replace(dtype=dtype, shape=shape, sizes=sizes, row_scales=dtype == INT8_ROWS)


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
    """An external input file of a stage; the key contains its content, not its path."""

    role: str
    """The name by which the stage reads it."""
    path: str
    """The absolute path. For a file with a `url`, it is empty or a copy for planning; the stage downloads again."""
    where: str
    """The position in the recipe that names it (`file:line:column`), for errors."""
    url: str = ""
    """The address of a download; such a file has a `sha256`, which the key uses."""
    sha256: str = ""
    """The digest (hex) that the recipe expects; empty if it has none."""
    sha256_where: str = ""
    sha256_field: str = "sha256"
    """The position of that digest in the recipe, and its field below `model`."""
    keyed: bool = True
    """False if the key already depends on another stage that reads this file."""
    folder: str = ""
    """The folder of a group of files. Roles end with the path inside it; the key has one digest for the group."""


class Need(NamedTuple):
    """Output files of another stage that a stage reads as `<stage>/<file>`; empty `files` means all."""

    stage: str
    stage_id: str
    files: tuple[str, ...]

    @property
    def maker(self) -> str:
        """The name of the stage that produces the files."""
        return self.stage_id.partition(":")[2].partition("/")[0]


class RunTraits(NamedTuple):
    """The traits that a stage declares for the code that runs, locks and reports it."""

    measures: bool = False
    """It measures time and needs the device exclusively."""
    searches: bool = False
    """It searches schedules; a locked run takes the result from the lock file."""
    uses_ledger: bool = False
    is_locked: bool = True
    """A lock file records its outputs, and a locked run must reproduce them."""
    is_gate: bool = False
    """The files of its target are delivered only after it has succeeded."""
    unlocked_settings: tuple[str, ...] = ()
    """Settings that only name the machine it ran on; a lock file omits them."""


class StageSpec(NamedTuple):
    """One stage of a plan: all parts of its key, except content that is not known yet.

    `id` is `RECIPE:STAGE[/TARGET]`; a stage that is shared by all targets has no target. `recipe` is the name of a
    recipe or variant. `version` is the stage's version, `settings` are plain JSON, and `tools` are the distributions
    that it uses. `pinned` holds `(file, sha256)` of its outputs in a locked run.

    The key excludes `traits`, `devices` (the kinds of devices that it measures on), `memory_bytes` (see `StageCall`),
    and `deliver_every_s` (seconds of search between interim deliveries; None for no such delivery).
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
    """Files of one stage, delivered to `dist/RECIPE/TARGET` after the stage `verified_by` succeeded.

    `files` are pairs of a name in the artifact and a name in dist. `known_digests` are (name, digest) pairs from a lock
    file, for files that are in the store already; `stage_id` is then irrelevant.
    """

    recipe: str
    target: str
    stage_id: str
    files: tuple[tuple[str, str], ...]
    verified_by: str
    known_digests: tuple[tuple[str, str], ...] = ()

    def digests(self, artifacts: Mapping[str, "Artifact"]) -> dict[str, str]:
        """Return the digest of each file by its name in the artifact; the stage must have a result."""
        return dict(self.known_digests) or artifacts[self.stage_id].digests(())


class RecipeOrigin(NamedTuple):
    """The sources of a planned recipe, for provenance only; keys exclude them.

    `recipe` is the name of the recipe or variant. `locked`: a lock file is enforced. `targets` holds all targets and
    their parts, including those not planned.
    """

    recipe: str
    path: str
    pipeline: str
    variant: str = ""
    locked: bool = False
    targets: tuple[str, ...] = ()


class Plan(NamedTuple):
    """All stages of a run in topological order, the files to deliver, and the sources of each recipe."""

    stages: tuple[StageSpec, ...]
    deliveries: tuple[Delivery, ...]
    origins: tuple[RecipeOrigin, ...] = ()


class StageKey(NamedTuple):
    """The digest that names a result, and its pre-image, which explains changes."""

    digest: str
    preimage: dict[str, Json]


class StoredFile(NamedTuple):
    """One file in the store: its name within the artifact, sha256 (hex), and size in bytes."""

    name: str
    digest: str
    size: int


class Artifact(NamedTuple):
    """A published result: its key, its files, and facts for reports, which are never part of a key."""

    key: str
    files: tuple[StoredFile, ...]
    facts: dict[str, Json]

    def digests(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the digests of the files in `names`, or of all files if `names` is empty."""
        return {file.name: file.digest for file in self.files if not names or file.name in names}


class Decision(NamedTuple):
    """A decision about a stage, with its reason in one line; `causes` are all reasons to run."""

    stage_id: str
    kind: Literal["hit", "run", "wait"]
    reason: str
    causes: tuple[str, ...] = ()


class StageCall(NamedTuple):
    """The input of a worker. It crosses process boundaries as plain JSON.

    `inputs` maps `<stage>/<file>` and `<role>` to read-only paths. `out` is an empty folder for the outputs; `work`
    survives a kill, so that the stage can resume; `ledger` is the folder of the trial ledger, `locks` the folder of
    device locks. A worker must refuse to run if its distributions differ from `tools`. `devices` are the kinds of the
    planning machine's devices that the stage measures on. `memory_bytes` is the memory limit: 0 for no limit, None for
    a share of the machine's memory.
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
    """The result of a stage's execution. `message` and `fix` are empty if `outcome` is `ok`."""

    outcome: Literal["ok", "failed", "blocked", "rejected", "crashed", "timeout", "cancelled"]
    message: str = ""
    fix: str = ""
    facts: Mapping[str, Json] = MappingProxyType({})
    seconds: float = 0.0
    log: str = ""
