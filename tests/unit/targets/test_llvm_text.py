"""LLVM's IR of a user's C, made ready to become part of a kernel."""

from __future__ import annotations

import pytest

from tvmflow.compiler.c_sources import UnsupportedFunction, read_functions

TEXT = """\
target triple = "x86_64-unknown-linux-gnu"

@table = dso_local constant [2 x i32] [i32 1, i32 2]
@.str = private unnamed_addr constant [2 x i8] c"a\\00"

define dso_local void @pool(ptr noundef %0, i64 noundef %1, double noundef %2) #0 {
  %4 = call float @square(float noundef 1.0)
  %5 = load i32, ptr @table, align 4
  %6 = call float @expf(float noundef %4) #4
  ret void
}

define internal float @square(float noundef %0) #0 {
  ret float %0
}

declare float @expf(float noundef) #2

attributes #0 = { nounwind "target-cpu"="x86-64" "target-features"="+sse2" "no-builtins" }
!llvm.module.flags = !{!0}
!0 = !{i32 1, !"wchar_size", i32 4}
"""


def test_names_are_those_of_this_file_alone() -> None:
    """Functions and variables get the suffix; those of the C library keep their names."""
    functions = read_functions(TEXT, "_1f")
    assert functions.names == {"pool": "pool_1f"}
    assert functions.parameters == {"pool": ("ptr", "i64", "double")}
    text = functions.text
    assert "@table_1f = internal constant" in text
    assert "define dso_local void @pool_1f(" in text
    assert "call float @square_1f(" in text
    assert "call float @expf(" in text
    assert "@.str_1f = private" in text


def test_the_cpu_is_the_kernels() -> None:
    text = read_functions(TEXT, "_1f").text
    assert 'attributes #0 = { nounwind "no-builtins" }' in text
    assert "!llvm." not in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ret float %0", "%2 = call float @square(float %0)", "the function square calls itself"),
        ("ret float %0", "call void @pool(ptr null)", "the function pool calls itself"),
        (
            "ret void",
            "call void @qsort(ptr @square)",
            "the address of the function square is taken",
        ),
        ("[i32 1, i32 2]", "[ptr @square]", "the address of the function square is taken"),
    ],
)
def test_what_cannot_be_copied_into_a_kernel_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UnsupportedFunction, match=message):
        read_functions(TEXT.replace(old, new), "_1f")
