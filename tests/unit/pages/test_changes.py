"""What changed since what a page is compared with: kernels with words and signs, and everything else."""

from __future__ import annotations

from tvmflow.pages.content import Change, KernelChange, Page
from tvmflow.pages.document import render_page


def test_a_kernel_is_new_gone_slower_or_faster() -> None:
    rows = (
        KernelChange("net/host", "conv", 1e-3, 2e-3),
        KernelChange("net/host", "pool", 1e-3, 5e-4),
        KernelChange("net/host", "fused", None, 1e-3),
        KernelChange("net/host", "relu", 1e-3, None),
    )
    html = render_page(Page("Run", "net", previous="run a", kernel_changes=rows))
    assert '<span class="bad">▲ slower, +100%</span>' in html
    assert '<span class="good">▼ faster, -50%</span>' in html
    assert '<span class="faint">+ new</span>' in html
    assert '<span class="faint">− gone</span>' in html


def test_of_many_changes_a_page_shows_some_and_counts_all() -> None:
    rows = tuple(Change(f"net/t{number}", "trace", "a -> b") for number in range(120))
    html = render_page(Page("Run", "net", previous="run a", changes=rows))
    assert "<details><summary>120 differences</summary>" in html
    assert html.count("a → b") == 100 and "20 more rows" in html
