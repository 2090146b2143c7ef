"""Platforms: triples in all spellings."""

from __future__ import annotations

import pytest

from tvmflow.targets.platforms import Platform, parse_triple


@pytest.mark.parametrize(
    ("triple", "platform", "shared", "static"),
    [
        ("x86_64-linux-gnu", Platform("x86_64", "linux", "gnu"), ".so", ".a"),
        ("x86_64-unknown-linux-musl", Platform("x86_64", "linux", "musl"), ".so", ".a"),
        ("aarch64-conda-linux-gnu", Platform("aarch64", "linux", "gnu"), ".so", ".a"),
        ("armv7a-linux-gnueabihf", Platform("armv7", "linux", "gnueabihf"), ".so", ".a"),
        ("riscv64-linux-gnu", Platform("riscv64", "linux", "gnu"), ".so", ".a"),
        ("aarch64-linux-android", Platform("aarch64", "android", ""), ".so", ".a"),
        ("arm64-apple-macos13", Platform("aarch64", "macos", ""), ".dylib", ".a"),
        ("x86_64-apple-darwin23.1", Platform("x86_64", "macos", ""), ".dylib", ".a"),
        ("x86_64-pc-windows-gnu", Platform("x86_64", "windows", "gnu"), ".dll", ".a"),
        ("x86_64-pc-windows-msvc", Platform("x86_64", "windows", "msvc"), ".dll", ".lib"),
        ("", Platform("", "", ""), ".so", ".a"),
        ("riscv64-none-elf", Platform("riscv64", "", ""), ".so", ".a"),
    ],
)
def test_a_triple_decides_the_suffixes_of_files(
    triple: str, platform: Platform, shared: str, static: str
) -> None:
    """Architecture, system and C library; suffixes follow from them."""
    parsed = parse_triple(triple)
    assert (parsed, parsed.shared_suffix, parsed.static_suffix) == (platform, shared, static)
