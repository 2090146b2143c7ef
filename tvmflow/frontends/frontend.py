"""The abstract base class of frontends, with shared code for files, import and reference."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pydantic import AfterValidator, Field

from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import EnvironmentProblem, ImportFailed, RecipeError, TvmflowError
from tvmflow.core.file_kinds import ZIP, FileKind, recognize
from tvmflow.core.formatting import last_line, quoted
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.schema import field_error
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Array, Dimension, InputFile, Json, TensorSpec
from tvmflow.frontends.base import (
    LoadedModel,
    MissingFile,
    ModelFacts,
    ModelInput,
    NotAModel,
    Reference,
    ReferenceTraits,
    SourceFields,
    Where,
)
from tvmflow.store.addresses import (
    InvalidAddress,
    check_address,
    is_address,
    without_secrets,
)
from tvmflow.store.source_files import SourceFiles

_log = logging.getLogger(__name__)

Files = Mapping[str, Path]
"""Role of a model's file -> its path."""

Specs = tuple[TensorSpec, ...]
"""Names, shapes and dtypes of tensors."""


class ImportCall(NamedTuple):
    """The arguments of `Frontend.load`."""

    files: Files
    inputs: Specs
    tensors: Sequence[str]
    bound: Mapping[str, Array]
    dimensions: Sequence[Dimension]
    counts_rows: bool


class Frontend(ABC):
    """The importer and the reference for the models of one framework.

    A frontend is a folder; its `__init__` imports neither the framework nor tvm.

    Attributes:
        NAME: The framework, for messages.
        KIND: The frontend's name in the registry, and its field under `model:` in a recipe.
        MODELS: The framework's models, for messages.
        SOURCE: The recipe's fields for a model of this framework.
        TOOLS: Distributions whose code can change the result of `load`; they are in the key of `import`.
        REQUIRES_INPUTS: Whether a recipe must specify input shapes, because the files do not have them.
        WORKER: The module of the reference process.
        MODULE: A module that the reference needs; empty if the reference process checks that itself.
    """

    NAME: ClassVar[str]
    KIND: ClassVar[str]
    MODELS: ClassVar[str]
    SOURCE: ClassVar[type[SourceFields]]
    TOOLS: ClassVar[tuple[str, ...]]
    REQUIRES_INPUTS: ClassVar[bool] = False
    REFERENCE: ClassVar[ReferenceTraits]
    WORKER: ClassVar[str]
    MODULE: ClassVar[str] = ""

    @abstractmethod
    def find_missing_files(self, model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
        """Yield the missing files of a recipe in the folder `base`.

        The value of `model:` is not validated yet, because missing files are reported together with other mistakes.
        """

    @abstractmethod
    def files(
        self, source: SourceFields, base: Path, where: Where, sources: SourceFiles
    ) -> tuple[InputFile, ...]:
        """Return the files of the model, without importing a framework.

        `sources` resolves addresses: such a file has a digest, and a path only if it was downloaded before.

        Raises:
            RecipeError: if a file is not of this framework, or cannot be imported.
            DownloadError: if an address cannot be looked up.
        """

    def find_unnamed_files(self, files: Sequence[InputFile]) -> tuple[InputFile, ...]:
        """Return additional files of a downloaded model, which `files` could not know.

        Raises:
            RecipeError: if the model is not of this framework, or names files outside its folder.
        """
        return ()

    @abstractmethod
    def read_facts(self, files: Files) -> ModelFacts:
        """Return the facts of a model, read without a framework from its first file.

        Raises:
            ImportFailed: if a file is not of this framework.
        """

    def list_dynamic_inputs(self, files: Files) -> Sequence[ModelInput]:
        """Return the inputs for a new recipe; `files` must have all files of the model."""
        return self.read_facts(files).inputs

    def load(
        self,
        files: Files,
        inputs: Specs,
        tensors: Sequence[str] = (),
        bound: Mapping[str, Array] = MappingProxyType({}),
        dimensions: Sequence[Dimension] = (),
        *,
        counts_rows: bool = True,
    ) -> LoadedModel:
        """Import the model for these input shapes.

        Args:
            files: Path of each file by its role.
            inputs: The inputs; fully specified ones may be missing.
            tensors: Names of intermediate tensors that the module returns after its outputs.
            bound: Constants that the recipe binds to inputs; the library does not have these inputs.
            dimensions: The dimensions in the sizes of inputs.
            counts_rows: Whether a data-dependent number of rows may be returned as a count (a bounded axis).

        Raises:
            ImportFailed: with operator and node, or if a name in `tensors` is not a tensor of the model.
            EnvironmentProblem: if a package for the import is not installed.
        """
        call = ImportCall(
            files, inputs, tensors, bound, dimensions=dimensions, counts_rows=counts_rows
        )
        try:
            from tvmflow.graph.ir import mark_seven_bit_weights

            loaded = self._load(call)
            return loaded._replace(mod=mark_seven_bit_weights(loaded.mod, loaded.params))
        except (TvmflowError, OSError):
            raise
        except MemoryError as error:
            raise ImportFailed("importing the model needs more memory than there is") from error
        except RecursionError as error:
            raise ImportFailed("the model is nested too deep to be imported") from error
        except Exception as error:
            # The traceback goes to the stage's log file.
            _log.debug("the model cannot be imported", exc_info=True)
            raise ImportFailed(
                f"the model cannot be imported: {type(error).__name__}: {last_line(error)}",
                fix="check that its own framework can load it; if it can, report a bug of tvmflow with the model",
            ) from error

    @abstractmethod
    def _load(self, call: ImportCall) -> LoadedModel:
        """Import the model; `load` translates errors of libraries."""

    def reference(
        self,
        files: Files,
        inputs: Specs,
        outputs: Specs,
        *,
        tensors: Specs = (),
        threads: int,
        scratch: Path,
    ) -> AbstractContextManager[Reference]:
        """Start the reference in a separate process, which also returns `tensors`.

        Raises:
            EnvironmentProblem: if the framework is not installed.
        """
        from tvmflow.frontends import _reference_process

        if self.MODULE and importlib.util.find_spec(self.MODULE) is None:
            text = f"{self.REFERENCE.name}, the reference for {self.MODELS}, is not installed"
            raise EnvironmentProblem(text, fix=self.REFERENCE.install)
        message = {
            "inputs": [spec.to_json() for spec in inputs],
            "outputs": [spec.name for spec in outputs],
            "tensors": [spec.name for spec in tensors],
            "threads": threads,
            "scratch": str(scratch),
            **self._describe_files(files, tensors, scratch),
        }
        return _reference_process.start(
            self.REFERENCE.name,
            self.REFERENCE.install,
            self.WORKER,
            message,
            inputs,
            (*outputs, *tensors),
            scratch,
            self._environment(threads),
        )

    @abstractmethod
    def _describe_files(self, files: Files, tensors: Specs, scratch: Path) -> dict[str, Any]:
        """Return the part of the first message that names the files to load in the reference process."""

    def _environment(self, threads: int) -> Mapping[str, str]:
        return {}

    def list_tensors(self, files: Files) -> Mapping[str, str]:
        """Return intermediate tensor -> its node, in order of computation; empty if unknown before the import."""
        return {}

    @abstractmethod
    def reference_version(self) -> str:
        """Return the version of the installed reference, which may be imported in this process.

        Raises:
            ImportError, EnvironmentProblem: if the reference is not installed or cannot be loaded.
        """


# ---------------------------------------------------------------- models that one field names


MODEL: Final = "model"
"""The role of the model's main file."""

_DIGEST_PATTERN: Final = r"^[0-9a-fA-F]{64}$"


def _check_file(value: str) -> str:
    if is_address(value):
        try:
            check_address(value)
        except InvalidAddress as error:
            raise field_error(str(error)) from None
    return value


def _check_digest(value: str) -> str:
    if len(value) != 64 or set(value) - set("0123456789abcdefABCDEF"):
        raise field_error(f"must be 64 hexadecimal digits, not the string {quoted(value)}")
    return value.lower()


NamedFile = Annotated[str, Field(min_length=1), AfterValidator(_check_file)]
"""A file in a recipe: a path relative to the recipe's folder, or a URL."""

_Digest = Annotated[
    str, AfterValidator(_check_digest), Field(json_schema_extra={"pattern": _DIGEST_PATTERN})
]


class SeveralFiles(SourceFields):
    """The field that pins the further files of a model, or all files of a multi-file model."""

    files: dict[str, _Digest] | None = Field(
        default=None,
        description="SHA-256 digests of the model's other files, by path relative to its folder. Required for URLs other "
        "than `hf://` and `oci://`.",
    )


class OneFile(SeveralFiles):
    """The fields that pin a model file, and the further files that it names."""

    sha256: _Digest | None = Field(
        default=None,
        description="SHA-256 digest of the model file, 64 hexadecimal digits. Required for URLs other than `hf://` and "
        "`oci://`, which pin a commit or digest.",
    )


class OneFileFrontend(Frontend):
    """A frontend for models with one main file, in the field named like the frontend.

    Attributes:
        FILE: The kind of that file.
        NOUN: A model, for messages: `a TFLite model`.
        FOREIGN: The predicate of a message about another file, `is not a TFLite model`; FOREIGN_FIX is its fix.
        FILE_NAME: The file, as the subject of a message.
        UNSUPPORTED_FIX: The fix for a model that cannot be imported.
    """

    SOURCE: ClassVar[type[OneFile]]
    FILE: ClassVar[FileKind]
    NOUN: ClassVar[str]
    FOREIGN: ClassVar[str]
    FILE_NAME: ClassVar[str] = "the file"
    FOREIGN_FIX: ClassVar[str] = ""
    UNSUPPORTED_FIX: ClassVar[str] = ""

    @staticmethod
    @abstractmethod
    def describe(path: Path, /) -> ModelFacts:
        """Return the facts of a file; NotAModel for other files."""

    def find_missing_files(self, model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
        """Yield the model's file if it is a path that does not exist."""
        path = model.get(self.KIND)
        if isinstance(path, str) and path and not is_address(path) and not is_file(base / path):
            yield MissingFile((self.KIND,), missing_file_text(base / path))

    def files(
        self, source: SourceFields, base: Path, where: Where, sources: SourceFiles
    ) -> tuple[InputFile, ...]:
        """Return the model's only file."""
        named = self.named_file(source, base, where)
        assert isinstance(source, self.SOURCE)
        if source.files is not None:
            text = f"model.files: {self.NOUN} is one file; its digest is `sha256`"
            raise RecipeError(f"{where('files')}: {text}")
        file = sources.resolve(named)
        if file.path:
            self.check_file(file)
        return (file,)

    def named_file(self, source: SourceFields, base: Path, where: Where) -> InputFile:
        """Return the model's file, not resolved yet."""
        assert isinstance(source, self.SOURCE)
        text = str(getattr(source, self.KIND))
        path, url = ("", text) if is_address(text) else (str(base / text), "")
        return InputFile(
            role=MODEL,
            path=path,
            where=where(self.KIND),
            url=url,
            sha256=source.sha256 or "",
            sha256_where=where("sha256"),
        )

    def check_file(self, file: InputFile) -> ModelFacts:
        """Return the facts of a recipe's file; RecipeError if it cannot be read or imported."""
        start, path = f"{file.where}: model.{self.KIND}", Path(file.path)
        try:
            facts = self.describe(path)
        except NotAModel as error:
            start, kind = f"{start}: {shown(file)}", recognize(path)
            if kind not in (self.FILE, ZIP, None):
                fix = f"name it with `{kind.field}:`" if kind.field else kind.fix_for(path)
                raise RecipeError(f"{start} {kind.text}", fix=fix) from None
            raise RecipeError(f"{start} {self.FOREIGN}: {error}") from None
        except OSError as error:
            raise unreadable(f"{start}: {path}", error) from error
        if facts.unsupported:
            text = f"{start}: {shown(file)} cannot be imported: {facts.unsupported}"
            raise RecipeError(text, fix=self.UNSUPPORTED_FIX)
        return facts

    def read_facts(self, files: Files) -> ModelFacts:
        """Return the facts of the model's file, read without a framework."""
        with self.explained():
            facts = self.describe(files[MODEL])
        if facts.unsupported:
            raise ImportFailed(facts.unsupported, fix=self.UNSUPPORTED_FIX)
        return facts

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Translate NotAModel in the block to ImportFailed."""
        try:
            yield
        except NotAModel as error:
            text = f"{self.FILE_NAME} {self.FOREIGN}: {error}"
            raise ImportFailed(text, fix=self.FOREIGN_FIX) from None


def list_inner(
    names: Sequence[str], outputs: Collection[str], known: Collection[str], fix: str
) -> list[str]:
    """Return the requested tensors that are not outputs.

    Raises:
        ImportFailed: if a tensor is not in `known`.
    """
    inner = [name for name in names if name not in outputs]
    unknown = (name for name in inner if name not in known)
    hints = [f"{quoted(name)}{did_you_mean(name, sorted(known), cutoff=0.5)}" for name in unknown]
    if hints:
        raise ImportFailed("; ".join(f"the model has no tensor {hint}" for hint in hints), fix=fix)
    return inner


def shown(file: InputFile) -> str:
    """Return the path or address of a file, for messages."""
    return without_secrets(file.url) if file.url else file.path


def pinned_by_name(file: InputFile, name: str, source: SeveralFiles, where: Where) -> InputFile:
    """Set the digest of a file from the recipe's field `files`."""
    digest = (source.files or {}).get(name, "")
    position = where("files", name) if digest else ""
    return file._replace(sha256=digest, sha256_where=position, sha256_field=f"files.{name}")
