"""Times steps of a language model at several lengths of its KV cache, beside ONNX Runtime.

    python benchmarks/latency/decoding.py BUNDLE.tvmflow MODEL.onnx [--threads N] [--lengths 16,256,1024,2000]

The bundle is a build of the model with `state:` (docs/howto/language-models.md). tvmflow takes steps of a session, and
truncates it after each; ONNX Runtime runs with IO binding, its caches bound to arrays that are there. Both in one
process, interleaved; the figures are the least CPU time of the process with one thread, else the least time, in ms.
The last row of each length is a prefill of 128 tokens. Prints the ratio of tvmflow to ONNX Runtime.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime

import tvmflow
from tvmflow.core.types import State

PREFILL = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", default="16,256,1024,2000")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    session = tvmflow.load(options.bundle).session()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    peer = onnxruntime.InferenceSession(options.model, settings, providers=["CPUExecutionProvider"])
    print(f"{'cache':>6} {'tokens':>6} {'tvmflow':>9} {'ONNX RT':>9} {'ratio':>6}  error")
    assert session.length_dimension is not None, "the model has no cache"
    limit = session.length_dimension.max
    for length in map(int, options.lengths.split(",")):
        for count in (1, PREFILL):
            if length + count > limit:
                continue
            ours, theirs = make_calls(session, peer, length, count)
            error = np.abs(ours() - theirs()).max() / np.abs(theirs()).max()
            best = [float("inf"), float("inf")]
            for _ in range(options.rounds if count == 1 else max(3, options.rounds // 6)):
                for place, call in enumerate((ours, theirs)):
                    began = clock()
                    call()
                    best[place] = min(best[place], clock() - began)
            times = " ".join(f"{seconds * 1e3:9.3f}" for seconds in best)
            print(f"{length:6} {count:6} {times} {best[0] / best[1]:6.3f}  {error:.1e}", flush=True)


def make_calls(
    session: Any, peer: Any, length: int, count: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the step of each, after a cache of some length."""
    rng = np.random.default_rng(length)
    tokens = [int(token) for token in rng.integers(0, 100, length)]
    session.reset()
    list(session.generate(tokens, max_tokens=1))
    session.truncate(length)
    held = session.states
    given = rng.integers(0, 100, (1, count))
    values = {
        "mask": np.ones((1, length + count), np.int64),
        "position": np.arange(length, length + count)[None],
    }
    feed = {
        spec.name: next((v for word, v in values.items() if word in spec.name), given)
        for spec in session.inputs
    }
    binding = peer.io_binding()
    for name, array in {**feed, **held}.items():
        binding.bind_cpu_input(name, array)
    shapes = {spec.name: (1, count, spec.shape[-1]) for spec in session.outputs}
    pairs = {state.output: state.input for state in State.list_of(session.signature)}
    outputs = {}
    for output in peer.get_outputs():
        if output.name in pairs:
            shape = list(held[pairs[output.name]].shape)
            shape[2] += count
        else:
            shape = list(shapes[output.name])
        outputs[output.name] = np.empty(shape, np.float32)
        binding.bind_output(
            output.name, "cpu", 0, np.float32, shape, outputs[output.name].ctypes.data
        )
    logits = session.outputs[0].name

    def ours() -> Any:
        result = session.run(feed)[logits]
        session.truncate(length)
        return result

    def theirs() -> Any:
        peer.run_with_iobinding(binding)
        return outputs[logits]

    return ours, theirs


if __name__ == "__main__":
    main()
