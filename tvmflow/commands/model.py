"""`tvmflow run-model`: runs a delivered library on a file's inputs or on random ones, and times it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.commands.words import count, say, say_json
from tvmflow.errors import EXIT_OK, StageError, UsageError
from tvmflow.spread import spread_of

if TYPE_CHECKING:
    from tvmflow.runtime import Module
    from tvmflow.samples import Array, Samples

_FILLS = {"random": None, "zeros": 0, "ones": 1}


def run_model(args: argparse.Namespace) -> int:
    """Run a bundle: on the arrays of an npz file, or on random ones."""
    from tvmflow import runtime, samples

    module = runtime.load(args.bundle)
    found = _samples(module, args)
    outputs = samples.outputs_of(module.run, found)
    if args.output:
        samples.write_arrays(Path(args.output), outputs)
    report: dict[str, Any] = {
        "model": module.manifest["name"],
        "target": module.manifest["target"]["name"],
        "samples": found.real,
        "outputs": {name: list(array.shape) for name, array in outputs.items()},
    }
    if args.top:
        report["top"] = {name: _top(array, args.top) for name, array in outputs.items()}
    if args.print_time:
        times = module.latency(found.batches[0], repeat=args.repeat)
        report["ms"] = spread_of([each * 1e3 for each in times])
    if args.profile:
        report["operators"] = [
            {"name": each.name, "calls": each.calls, "us": each.seconds * 1e6}
            for each in module.profile(found.batches[0], repeat=args.repeat)
        ]
    if args.json:
        say_json(report)
    else:
        say(*_lines(report, module, args))
    return EXIT_OK


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run-model` to the command line."""
    text = (run_model.__doc__ or "").strip()
    sub = commands.add_parser("run-model", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=run_model)
    sub.add_argument("bundle", metavar="BUNDLE", help="a delivered .tvmflow file")
    sub.add_argument(
        "--input",
        metavar="NPZ",
        help="an array for each input, named like it; samples beyond one batch run in batches",
    )
    sub.add_argument(
        "--fill",
        choices=tuple(_FILLS),
        default="random",
        help="what inputs hold when there is no --input (random)",
    )
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random inputs (0)")
    sub.add_argument("--output", metavar="NPZ", help="write the outputs here, by name")
    sub.add_argument(
        "--top", type=count, metavar="N", help="show the places of each sample's N largest outputs"
    )
    sub.add_argument("--print-time", action="store_true", help="show what a call takes")
    sub.add_argument(
        "--repeat", type=count, default=10, metavar="N", help="repeats of a measurement (10)"
    )
    sub.add_argument("--profile", action="store_true", help="show what each operator takes")
    sub.add_argument("--json", action="store_true", help="the same as one line of JSON")


def _samples(module: Module, args: argparse.Namespace) -> Samples:
    from tvmflow import samples

    if args.input is None:
        value = _FILLS[args.fill]
        if value is None:
            return samples.drawn(module.inputs, {}, batches=1, seed=args.seed)
        return samples.filled(module.inputs, value)
    path = Path(args.input)
    if not path.is_file():
        raise UsageError(f"--input: there is no file {path}")
    try:
        return samples.recorded(module.inputs, path, what=f"--input {path}")
    except StageError as misfit:
        raise UsageError(misfit.message, fix=f"this model is {module!r}") from misfit


def _top(array: Array, count: int) -> list[list[list[float]]]:
    """For each sample `[place, value]` of its largest elements, the largest first; NaN is never among them."""
    import numpy as np

    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    order = np.argsort(np.where(np.isnan(rows), -np.inf, rows), axis=1)[:, ::-1][:, :count]
    return [
        [[int(place), float(row[place])] for place in places]
        for row, places in zip(rows, order, strict=True)
    ]


def _lines(report: Mapping[str, Any], module: Module, args: argparse.Namespace) -> list[str]:
    lines = [repr(module)]
    many = report["samples"] > 1
    lines.append(f"ran on {report['samples']} samples" if many else "ran once")
    if args.output:
        lines.append(f"outputs: {args.output}")
    for name, rows in report.get("top", {}).items():
        lines.append(f"{name}:")
        for row in rows:
            lines.append("  " + "  ".join(f"{place}: {value:.6g}" for place, value in row))
    if "ms" in report:
        times = report["ms"]
        lines.append("milliseconds a call:")
        lines.append("  ".join(f"{name:>10}" for name in times))
        lines.append("  ".join(f"{value:>10.4f}" for value in times.values()))
    if "operators" in report:
        lines += _operators(report["operators"])
    return lines


def _operators(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    total = sum(row["us"] for row in rows) or 1.0
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'operator':<{width}}  {'calls':>5}  {'µs':>10}  share"]
    for row in rows:
        share = row["us"] / total
        lines.append(f"{row['name']:<{width}}  {row['calls']:>5}  {row['us']:>10.1f}  {share:5.1%}")
    return lines
