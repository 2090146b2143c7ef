"""The base class of backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from tvmflow.core.types import Json
from tvmflow.targets.host import Host
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple


class Backend(ABC):
    """One kind of code; the defaults are for a GPU whose code TVM generates.

    A method whose name ends in `_reason` returns why something is impossible, as a clause for a message; it returns an
    empty string if the thing is possible.

    Attributes:
        KIND: TVM's target kind.
        DEVICE: The name of its device, in TVM, in device locks and in reports.
        DLPACK_DEVICE_TYPE: DLPack's code of this device type.
        RUNS_ON_HOST_CPU: True if kernels run on the CPU that calls them. Otherwise a library needs a runtime in the
            process that loads it, and is delivered only in forms that load this runtime.
        IS_BESIDE_HOST: True if its code is delivered beside the host's, which runs instead if there is no device.
        HAS_INT64: True if kernels may use 64-bit integers.
        EXECUTOR: The file in `targets.c_runtime` that launches kernels in a C library; empty if there is none.
        TOOLS: Distributions that affect compiled code; they are in the keys of all stages that compile.
        PYTHON_REQUIREMENTS: pip requirements of a program that loads a library, besides TVM.
        ENVIRONMENT_VARIABLES: Environment variables that decide which device this machine has.
        SEARCH_RULES: The name of MetaSchedule's rules for its kernels; empty if TVM chooses them by target.
        LIMITS: Default limits of its devices, which a search needs to know.
        INTRINSICS: The modules of `tvm.s_tir.tensor_intrin` whose intrinsics schedules may name.
        NO_FLOAT16: Why kernels cannot compute in float16; empty if they can.
        NO_BFLOAT16: Why kernels cannot multiply bfloat16; empty if they can.
        NO_RPC: Why no device behind RPC runs its code; empty if one may.
    """

    KIND: ClassVar[str]
    DEVICE: ClassVar[str]
    DLPACK_DEVICE_TYPE: ClassVar[int]
    RUNS_ON_HOST_CPU: ClassVar[bool] = False
    IS_BESIDE_HOST: ClassVar[bool] = False
    HAS_INT64: ClassVar[bool] = True
    EXECUTOR: ClassVar[str] = ""
    TOOLS: ClassVar[tuple[str, ...]] = ()
    PYTHON_REQUIREMENTS: ClassVar[tuple[str, ...]] = ()
    ENVIRONMENT_VARIABLES: ClassVar[tuple[str, ...]] = ()
    SEARCH_RULES: ClassVar[str] = ""
    LIMITS: ClassVar[Mapping[str, Json]] = MappingProxyType({})
    INTRINSICS: ClassVar[tuple[str, ...]] = ()
    NO_FLOAT16: ClassVar[str] = (
        "kernels for GPUs add products of float16 to float32 (precision: mixed)"
    )
    NO_BFLOAT16: ClassVar[str] = ""
    NO_RPC: ClassVar[str] = ""

    def target_problem(self, tvm: TvmTarget) -> str:
        """Return the problem of a target of this kind, or an empty string."""
        return ""

    def complete_target(self, tvm: TvmTarget) -> dict[str, Json]:
        """Return a target with the fields that tuning needs."""
        return {**self.LIMITS, **tvm}

    def device(self, tvm: TvmTarget, host: Host, *, runs_here: bool) -> dict[str, str]:
        """Return the device that measures kernels: `{"kind": …}`, with `class` if known."""
        return {"kind": self.DEVICE}

    @abstractmethod
    def has_device(self) -> bool:
        """Return whether this machine has a usable device."""

    def unbuildable_reason(self, tvm: TvmTarget) -> str:
        """Return why this machine cannot build code for a target."""
        return ""

    @abstractmethod
    def unrunnable_reason(self, tvm: TvmTarget, *, in_this_process: bool) -> str:
        """Return why this machine's device cannot run code for a target; its CPU is already checked.

        With `in_this_process`, the device's driver is started in this process, which must not be forked afterwards.
        """

    def slow_float16_reason(self, tvm: TvmTarget, features: Iterable[str]) -> str:
        """Return why float16 weights would only slow a library; `features` are named as in /proc/cpuinfo."""
        # Every GPU has vector conversions of float16.
        return ""

    def no_float16_reason(self, tvm: TvmTarget, features: Iterable[str]) -> str:
        """Return why kernels cannot compute in float16; `features` are named as in /proc/cpuinfo."""
        return self.NO_FLOAT16

    def no_bfloat16_reason(self, tvm: TvmTarget, features: Iterable[str]) -> str:
        """Return why kernels cannot multiply bfloat16; `features` are named as in /proc/cpuinfo."""
        return self.NO_BFLOAT16

    def remote_device_mismatch(self, tvm: TvmTarget, device: Any) -> str:
        """Return how a device behind RPC (TVM's `Device`) differs from the target's; empty if it fits."""
        return self.NO_RPC

    def tensor_intrinsics(self, tvm: TvmTarget) -> tuple[str, ...]:
        """Return the modules of `tvm.s_tir.tensor_intrin` whose intrinsics schedules may name."""
        return self.INTRINSICS

    def no_tvm_runtime_reason(self, tvm: TvmTarget) -> str:
        """Return why TVM's wheel has no runtime for a target; a target with only a kind means typical devices."""
        return f"TVM's wheel has no runtime for {self.KIND}"

    def lowering_target(self, target: Any) -> Any:
        """Return the TVM target for which a target's kernels are lowered to device functions."""
        return target

    def generate_device_code(self, mod: Any, target: Any) -> bytes:
        """Return the code of device functions in the driver's format; empty for a CPU."""
        import tvm

        build = tvm.get_global_func(f"target.build.{self.KIND}")
        return str(build(mod, target).inspect_source()).encode()

    def load_runtime(self) -> None:  # noqa: B027 - most have nothing to load
        """Load the device's runtime, besides TVM's; EnvironmentProblem when that is not possible."""

    def load_compiler(self, *, runs: bool) -> None:  # noqa: B027 - TVM mostly does it automatically
        """Prepare this process to compile kernels, and with `runs` to run them; else EnvironmentProblem.

        The process may still be forked, until the first kernel runs.
        """

    def call_builder(self, function: Callable[..., Json], *arguments: Json) -> Json:
        """Call a module's function that compiles, in a process in which this backend can compile.

        The function must be at the top level of its module; arguments and result are JSON.

        Raises:
            TvmflowError: as raised by the function.
            StageError: when the other process ends without a result.
        """
        return function(*arguments)

    def place_arguments(self, arguments: Sequence[Any]) -> list[Any]:
        """Return TVM tensors in the memory of this machine's device."""
        return list(arguments)


def find_host_problem(tvm: TvmTarget) -> str:
    """Return the problem that a GPU target names no host CPU; otherwise an empty string."""
    host = tvm.get("host")
    if isinstance(host, dict) and cpu_triple(host):
        return ""
    return (
        "needs the CPU that runs the GPU, such as `host: {kind: llvm, mtriple: x86_64-linux-gnu}`"
    )
