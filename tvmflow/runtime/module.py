"""A loaded model: its signature, and calling, timing and profiling it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.core.errors import BundleError
from tvmflow.core.types import Array, Dimension, Json, TensorSpec, shape_text
from tvmflow.runtime.arrays import match_inputs, match_outputs, read_dynamic_tensors
from tvmflow.runtime.image_files import list_images, read_pixels
from tvmflow.runtime.images import Preprocessing, read_preprocessing
from tvmflow.runtime.labels import BEST, Prediction, read_labels
from tvmflow.runtime.programs import Program
from tvmflow.runtime.samples import image_samples, run_samples

if TYPE_CHECKING:
    from tvmflow.runtime.sessions import Session


class OperatorTime(NamedTuple):
    """The time of one operator in a run of a model: its calls, and their seconds in total."""

    name: str
    calls: int
    seconds: float


class KernelRun(NamedTuple):
    """A kernel or another step of a call: its start on the clock of the trace, and its time."""

    name: str
    began_s: float
    seconds: float


class CallTrace(NamedTuple):
    """A call of a model: start and end on a clock that starts with the first call, and kernels."""

    began_s: float
    ended_s: float
    kernels: tuple[KernelRun, ...]


class Module:
    """A loaded model, which several threads may call.

    The C runtime runs calls concurrently, each with its own memory; TVM's virtual machine runs one call at a time.

    Attributes:
        inputs: Name, shape and dtype of each input.
        outputs: Name, shape and dtype of each output. The size along `bounded_axis` is data-dependent; the shape has its
            upper bound.
        dimensions: The dynamic dimensions.
        images: The preprocessing of each input that takes images, by name.
        classes: The names of the classes, and the meaning of their scores; None if the model has none.
        dynamic_tensors: The inputs and outputs of a model with dynamic shapes; None for a model of fixed shapes.
        parts: The parts of a partitioned model by name, in order; empty for any other model.
        program: The model's code.
    """

    def __init__(
        self,
        program: Program,
        signature: Mapping[str, Json],
        manifest: Mapping[str, Json],
        parts: Mapping[str, Module] | None = None,
    ):
        self.manifest = dict(manifest)
        self._signature = signature
        self.inputs = tuple(TensorSpec.from_json(entry) for entry in signature["inputs"])
        self.outputs = tuple(TensorSpec.from_json(entry) for entry in signature["outputs"])
        self.dimensions = Dimension.list_of(signature)
        self.images = read_preprocessing(manifest, self.inputs)
        self.classes = read_labels(manifest)
        self.parts = dict(parts or {})
        self.dynamic_tensors = read_dynamic_tensors(signature)
        self.program = program
        self._output_names = [spec.name for spec in self.outputs]

    @property
    def threads(self) -> int:
        """The number of threads that a call uses at most, the calling one included."""
        return self.program.threads

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the first output; empty if the model has none."""
        return self.classes.names if self.classes else ()

    def __str__(self) -> str:
        def show(specs: tuple[TensorSpec, ...]) -> str:
            return ", ".join(
                f"{spec.name}: {spec.dtype}{shape_text(spec.to_json())}" for spec in specs
            )

        return f"{self.manifest['name']} ({show(self.inputs)}) -> ({show(self.outputs)})"

    def __repr__(self) -> str:
        package = type(self).__module__.partition(".")[0]
        return f"<{package}.{type(self).__name__} {self}>"

    def run(self, feed: Any, out: Mapping[str, Any] | None = None) -> dict[str, Array]:
        """Run the model.

        Tensors are NumPy arrays, or objects in the CPU's memory that support DLPack or the buffer protocol, such as
        torch tensors. Inputs that are dense in C order are not copied.

        Args:
            feed: A tensor for each input by name, with the shape and dtype of the signature; dynamic dimensions have
                any size in their range. For a model with one input, it may be the tensor itself.
            out: Tensors that receive outputs, by name. Other outputs are new arrays.

        Returns:
            An array for each output, which shares the memory of the tensor in `out` if there is one.

        Raises:
            BundleError: a ValueError that names every tensor that does not fit.
        """
        inputs = self._match(feed)
        outputs = self.outputs
        if out is not None and self.dynamic_tensors is not None:
            outputs = self.dynamic_tensors.tensors_of(inputs).outputs
        results = self.program.run(inputs, match_outputs(outputs, out, self))
        return dict(zip(self._output_names, results, strict=True))

    def session(self) -> Session:
        """Return a sequence of steps, between which the library holds the states that the recipe names.

        Raises:
            BundleError: The model has no states, or is not run by the C runtime.
        """
        from tvmflow.runtime.sessions import Session

        return Session(self.program, self._signature)

    def preprocess(self, images: Any, name: str = "") -> Array:
        """Return the input for an image, by the preprocessing that is part of the bundle.

        Args:
            images: A path, a Pillow image, or a uint8 array (`[height, width]`, or `[height, width, channels]`: gray, RGB
                or RGBA). Or several of them, up to a batch: a list, or an array `[images, height, width, channels]`.
                The last image is repeated to fill the batch.
            name: The input; needed if several inputs take images.

        Raises:
            BundleError: when an image cannot be read, or the model takes no images.
            EnvironmentProblem: when Pillow is needed and not installed.
        """
        preprocessing = self.find_preprocessing(name)
        fitted = [preprocessing.fit(read_pixels(image)) for image in list_images(images)]
        return preprocessing.tensor(fitted)

    def classify(self, images: Any, top: int = BEST) -> list[list[Prediction]]:
        """Return the best classes for each image, the best first, with their probabilities.

        Scores that are not probabilities yet are converted by softmax.

        Args:
            images: One or several images as for `preprocess`, which may exceed a batch.
            top: How many classes to return for each image.

        Raises:
            BundleError: as `preprocess`, or when the model has no labels.
        """
        preprocessing = self.find_preprocessing()
        if self.classes is None:
            raise BundleError(
                "the model has no names of classes", fix="name them in the recipe: `labels: FILE`"
            )
        fitted = [preprocessing.fit(read_pixels(image)) for image in list_images(images)]
        if not fitted:
            return []
        outputs = run_samples(self.run, image_samples(preprocessing, fitted))
        return self.classes.rank(outputs[self.outputs[0].name], top)

    def find_preprocessing(self, name: str = "") -> Preprocessing:
        """Return the preprocessing of an input, by default the only image input; BundleError if none."""
        if name in self.images:
            return self.images[name]
        if not name and len(self.images) == 1:
            return next(iter(self.images.values()))
        if self.images:
            names = ", ".join(self.images)
            text, fix = f"the inputs that take images are {names}", "name one of them"
        else:
            text = "no input of the model takes images"
            fix = "describe them in the recipe: `inputs: {NAME: {image: …}}`"
        raise BundleError(text, fix=fix)

    def latency(self, feed: Any, *, repeat: int = 10, min_seconds: float = 0.05) -> list[float]:
        """Return the seconds per call for each of `repeat` repeats, after a warm-up.

        Inputs are on the device before the clock starts, and outputs are not copied from it. A repeat takes at least
        `min_seconds`, and ends when its last call has ended.
        """
        _check_repeat(repeat)
        wait = self.program.wait
        with self.program.bound(self._match(feed)) as call:
            started = time.perf_counter()
            call()
            wait()
            once = time.perf_counter() - started
            calls = max(1, int(min_seconds / max(once, 1e-7)))
            seconds = []
            for _ in range(repeat):
                started = time.perf_counter()
                for _ in range(calls):
                    call()
                wait()
                seconds.append((time.perf_counter() - started) / calls)
            return seconds

    def profile(self, feed: Any, *, repeat: int = 10) -> list[OperatorTime]:
        """Return the median time of `repeat` runs of each kernel or step (see `trace`), slowest first."""
        from statistics import median

        runs: list[dict[str, list[float]]] = []
        for traced in self.trace(feed, repeat=repeat):
            runs.append({})
            for kernel in traced.kernels:
                runs[-1].setdefault(kernel.name, []).append(kernel.seconds)
        totals = {name: median(sum(run[name]) for run in runs) for name in runs[0]}
        times = [OperatorTime(name, len(runs[0][name]), total) for name, total in totals.items()]
        return sorted(times, key=lambda operator: -operator.seconds)

    def trace(self, feed: Any, *, repeat: int = 10) -> list[CallTrace]:
        """Time each kernel of `repeat` calls, or each step if TVM's virtual machine runs the model.

        A C library calls a hook after each kernel, which takes the calling thread about a microsecond; the virtual
        machine's hook is slower. On a GPU, each call is waited for. One further call warms up.
        """
        _check_repeat(repeat)
        clock = time.perf_counter
        kernels: list[tuple[str, float, float]] = []
        calls: list[CallTrace] = []

        def record(name: str, seconds: float) -> None:
            kernels.append((name, clock(), seconds))

        with self.program.profiled(self._match(feed), record) as call:
            call()
            start_s = clock()
            for _ in range(repeat):
                kernels.clear()
                began_s = clock()
                call()
                ended_s = clock()
                runs = (
                    KernelRun(name, end_s - seconds - start_s, seconds)
                    for name, end_s, seconds in kernels
                )
                calls.append(CallTrace(began_s - start_s, ended_s - start_s, tuple(runs)))
        return calls

    def _match(self, feed: Any) -> list[Array]:
        # the check for dict is first, because the check for a Mapping takes as long as a small kernel
        if type(feed) is not dict and not isinstance(feed, Mapping):
            if len(self.inputs) != 1:
                names = ", ".join(spec.name for spec in self.inputs)
                raise BundleError(
                    f"one tensor is given, and the model has {len(self.inputs)} inputs: {names}",
                    fix=f"give them by name; this model takes {self}",
                )
            feed = {self.inputs[0].name: feed}
        arrays = match_inputs(self.inputs, feed, self)
        if self.dynamic_tensors is not None:
            self.dynamic_tensors.tensors_of(arrays)
        return arrays


def _check_repeat(repeat: object) -> None:
    if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
        raise BundleError(
            f"repeat is {repeat!r}, which is not a number of measurements",
            fix="give a whole number of at least 1",
        )
