"""The frozen values that every layer shares: what a stage is, what it made, and why it ran.

These are named tuples, not dataclasses, because an up-to-date run must answer in a few
milliseconds and importing `dataclasses` alone costs as much as all of that run's work.
"""

import math
from typing import Any, Literal, NamedTuple

Json = Any
"""A value that `json.dumps` takes: None, bool, int, float, str, list or dict of those."""


class TensorSpec(NamedTuple):
    """One input or output of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """What its elements take."""
        bits = 8 if self.dtype == "bool" else int(self.dtype.lstrip("bfiloatun"))
        return math.prod(self.shape) * bits // 8

    def to_json(self) -> Json:
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, value: Json) -> "TensorSpec":
        return cls(value["name"], tuple(value["shape"]), value["dtype"])


class InputFile(NamedTuple):
    """A file from outside the store that a stage reads; its content is part of the key, its path is not.

    `role` is the name by which the stage asks for it. A file that has yet to be downloaded
    has a `url` and no `path`, and must then carry its `sha256` (hex), which is what the key
    uses. `where` is the place in the recipe that named it (`file:line:column`), for errors.
    A file that is not `keyed` is known by what another stage made of it.
    """

    role: str
    path: str
    where: str
    url: str = ""
    sha256: str = ""
    sha256_where: str = ""
    keyed: bool = True


class Need(NamedTuple):
    """Which output files of another stage a stage reads. Nothing else of that stage enters the key.

    `stage` is what the files are to the one that reads them: it finds each as `<stage>/<file>`.
    """

    stage: str
    stage_id: str
    files: tuple[str, ...]

    @property
    def maker(self) -> str:
        """The stage that makes them."""
        return self.stage_id.partition(":")[2].partition("/")[0]


class StageSpec(NamedTuple):
    """One stage of a plan: everything its key is made of, except content that is not known yet.

    `pinned` are `(file, sha256)` of what it must give, in a run that keeps to a lock.
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

    @property
    def label(self) -> str:
        """The stage as a user names it on the command line: `STAGE[/TARGET]`."""
        return f"{self.stage}/{self.target}" if self.target else self.stage


class Delivery(NamedTuple):
    """What a recipe wants in its `dist` folder from one stage: store file name -> delivered file name."""

    recipe: str
    target: str
    stage_id: str
    files: tuple[tuple[str, str], ...]
    verified_by: str


class Plan(NamedTuple):
    """All stages of a run in topological order, and what is to be delivered when they are done."""

    stages: tuple[StageSpec, ...]
    deliveries: tuple[Delivery, ...]


class StageKey(NamedTuple):
    """The digest that names a stage's result, and the pre-image it was made from (for reasons)."""

    digest: str
    preimage: dict[str, Json]


class StoredFile(NamedTuple):
    """One file in the store: name within its artifact, content digest (sha256, hex), size in bytes."""

    name: str
    digest: str
    size: int


class Artifact(NamedTuple):
    """A published result: its files and the small facts that reports show (never part of a key)."""

    key: str
    files: tuple[StoredFile, ...]
    facts: dict[str, Json]

    def digests(self, names: tuple[str, ...]) -> dict[str, str]:
        """`{name: digest}` of the files in `names`; all files when `names` is empty."""
        return {file.name: file.digest for file in self.files if not names or file.name in names}


class Decision(NamedTuple):
    """Whether a stage must run; why, in one line; and every cause, a phrase each."""

    stage_id: str
    kind: Literal["hit", "run", "wait"]
    reason: str
    causes: tuple[str, ...] = ()


class StageCall(NamedTuple):
    """All that a worker gets. Plain JSON apart from nothing: it crosses a process boundary.

    `inputs` maps `<stage>/<file>` and `<role>` to paths that may be read and not written;
    `out` is an empty folder to fill; `work` is kept when a stage is killed, so that it can
    resume; `ledger` is the folder of the trial ledger and `locks` that of device locks.
    `tools` are the distributions that the stage uses: where others are installed, it must not run.
    """

    stage: str
    settings: dict[str, Json]
    inputs: dict[str, str]
    out: str
    work: str
    ledger: str
    locks: str
    timeout_s: float
    tools: tuple[str, ...] = ()


class StageResult(NamedTuple):
    """How a stage ended. `message` and `fix` are empty when `outcome` is `ok`."""

    outcome: Literal["ok", "failed", "blocked", "rejected", "crashed", "timeout", "cancelled"]
    message: str
    fix: str
    facts: dict[str, Json]
    seconds: float
    log: str
