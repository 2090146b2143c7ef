"""A page with every section."""

from __future__ import annotations

from typing import Any

from tvmflow.engine.builds import Build, Peer, SizeResult, Speedup
from tvmflow.engine.report import StageReport
from tvmflow.pages.content import (
    Gate,
    Kernel,
    Library,
    LibraryKernels,
    Page,
    Progress,
    RecipeText,
    StageEntry,
)
from tvmflow.stages.quantize import LayerFacts, QuantizeFacts


def library(target: str, name: str = "net", **fields: Any) -> Library:
    build = Build(name, target, verdict="verified", latency_s=1e-3, size_bytes=1000, error=1e-6)
    return Library(build._replace(**fields), name)


def full_page(text: str = "net") -> Page:
    """Return a page with every section, in which every name is `text`."""
    peer = Peer(text, 2e-3, Speedup(2.0, 1.9, 2.1, 9))
    build: dict[str, Any] = {"peers": (peer,), "tuning_speedup": Speedup(1.5, 1.4, 1.6, 9)}
    build |= {"reference": text, "accuracy": 0.9, "untuned_latency_s": 2e-3}
    build |= {"sizes": (SizeResult(text, True, 1e-6, 1e-3, 2e-3),), "measured_at": text}
    kernels = tuple(
        Kernel(f"{text}{number}", (text,), 1, 1e6, 1e3 * number, 2e-4, 1e-4, 5e-5, (2e-4, 1e-4), 2)
        for number in (1, 2)
    )
    progress = (Progress(0, 0.0, 4e-4), Progress(2, 1.5, 2e-4))
    return Page(
        kind="Run",
        title=text,
        about=((text, text),),
        previous=text,
        libraries=(
            library(text, text, **build)._replace(
                previous=Build(text, text, latency_s=2e-3, accuracy=0.8), files={text: 5}
            ),
            library(f"{text}2", text, **{**build, "latency_s": 2e-3, "size_bytes": 500}),
        ),
        notes=(text,),
        links=((text, "report.html"),),
        gates=(Gate(text, text, "95%", "99%", "passed"),),
        kernels=(LibraryKernels(text, kernels, 100.0, progress, (text,)),),
        quantized={
            text: QuantizeFacts(
                layers=(
                    LayerFacts(text, "conv2d", 8, 8, damage=0.01, gain=0.2),
                    LayerFacts(text, "matmul", 32, 32, reason=text, damage=0.3),
                ),
                error=0.02,
                float_accuracy=0.99,
                accuracy=0.98,
            )
        },
        stages=(StageEntry(StageReport(f"{text}:build/{text}", "ran", text, 1.0)),),
        recipes=(RecipeText(text, text, text),),
        provenance=((text, ((text, text),)),),
    )
