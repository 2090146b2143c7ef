"""Facts of stages as JSON, complete: a test says what it is about, and changes that."""

from __future__ import annotations

from typing import Any


def import_facts(**changes: Any) -> dict[str, Any]:
    return {"weights": 2, "weight_bytes": 400, "operators": {}, "nodes": [], **changes}


def extract_tasks_facts(**changes: Any) -> dict[str, Any]:
    return {"workloads": 1, "tunable": 1, "not_tunable": {}, "gflops": 0.5, **changes}


def workload_facts(name: str, **changes: Any) -> dict[str, Any]:
    facts = {
        "key": f"key of {name}",
        "name": name,
        "trials": 2,
        "measured": 2,
        "failed": 0,
        "calls": 1,
    }
    return {**facts, "untuned_us": 100.0, "best_us": 50.0, "roofline_us": 25.0, **changes}  # fmt: skip


def tune_facts(**changes: Any) -> dict[str, Any]:
    return {
        "trials": 64,
        "measured": 60,
        "reused": 4,
        "failed": 0,
        "exhausted": [],
        "untunable": [],
        "stopped": "budget",
        "seconds": 30.0,
        "drift": 0.0,
        "repairs": [],
        "workloads": [],
        **changes,
    }


def kernel_facts(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "calls": 1, "flops": 3e6, "untuned_us": 9.0, "tuned_us": 3.0, **changes}


def pick_best_facts(**changes: Any) -> dict[str, Any]:
    return {
        "tuned": 1,
        "tunable": 3,
        "untried": 0,
        "coverage": 0.9,
        "untuned_us": 200.0,
        "tuned_us": 50.0,
        "speedup": 4.0,
        "peak_gflops": 250.0,
        "kernels": [],
        "errors": {},
        **changes,
    }


def build_facts(**changes: Any) -> dict[str, Any]:
    rules = {"tuned": ["conv"], "elementwise": ["relu", "add"]}
    return {"kernels": 3, "schedule_rules": rules, "runtime": "c", **changes}


def seconds(median: float, std: float = 0.0) -> dict[str, float]:
    """The latency of one call."""
    return {"median": median, "mean": median, "min": median, "max": median, "std": std}


def verify_facts(**changes: Any) -> dict[str, Any]:
    return {"passed": True, "against": "reference", **changes}


def profile(**kernels: float) -> dict[str, Any]:
    """The shares of kernels in the time of a call."""
    return {"kernels": kernels, "rules": {}, "without_rule": {}}


def speedup(median: float, low: float, high: float) -> dict[str, Any]:
    return {"median": median, "low": low, "high": high, "pairs": 20, "is_slower": False}


VERDICT: dict[str, Any] = {
    "passed": True,
    "against": "reference",
    "samples": 3,
    "reference": "ONNX Runtime 1.30.1",
    "outputs": {
        "y": {"max_abs_error": 2e-6, "max_rel_error": 0.1, "rtol": 1e-3, "atol": 1e-5},
        "z": {"max_abs_error": 3e-7, "max_rel_error": 0.1, "rtol": 1e-3, "atol": 1e-4},
    },
    "accuracy": 0.75,
    "reference_accuracy": 0.76,
    "latency": {
        "library": seconds(1e-3, 2e-5),
        "untuned": seconds(3e-3),
        "reference": seconds(2.5e-3),
    },
    "speedup": speedup(3.0, 2.9, 3.1),
    "profile": {
        "kernels": {"conv": 0.7, "relu": 0.2, "add": 0.1},
        "rules": {"tuned": 0.7, "elementwise": 0.3},
        "without_rule": {},
    },
    "compared": {
        "onnxruntime": {
            "name": "ONNX Runtime 1.30.1",
            "latency": seconds(4.2e-3),
            "speedup": speedup(2.1, 2.0, 2.2),
        },
        "openvino": {"name": "OpenVINO", "not_timed": "it is not installed"},
    },
}
