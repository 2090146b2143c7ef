"""Old phrases stay away: code, messages and docs use the field's terms."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
KINDS: Final = frozenset(".py .md .c .cc .cpp .cu .h .hpp .yaml .toml".split())
SEARCHED: Final = tuple(
    path
    for folder in ("tvmflow", "tests", "benchmarks", "docs", "pipelines", "recipes")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in KINDS and path != Path(__file__).resolve()
)

EVERYWHERE: Final = ""
PACKAGE: Final = "tvmflow/"

OLD_PHRASES: Final = (
    # where, the old phrase, the term
    (EVERYWHERE, r"nurser(y|ies)", "fork server"),
    (EVERYWHERE, r"misfits?", "incompatibility"),
    (EVERYWHERE, r"farm of", "device pool"),
    (EVERYWHERE, r"openness|moving sizes?|sizes? that moves?", "dynamic shape"),
    (EVERYWHERE, r"(?<!\.)open sizes?", "dynamic dimension"),
    (PACKAGE, r"(?<!tvmflow\.)(?<!tf_)open_sizes?", "dynamic_shapes"),
    (EVERYWHERE, r"representative sizes?", "tuning size"),
    (EVERYWHERE, r"operators? of one's own|(?<!tvmflow's )(?<!tvm's )own[ _]operators?", "custom operator"),
    (EVERYWHERE, r"byte[ _]tables?", "lookup table"),
    (PACKAGE, r"place reductions?|pairs? of (place and number|number and place)", "argmax, (index, value) pairs"),
    (PACKAGE, r"in[ _]turns", "interleaved"),
    (PACKAGE, r"to blame|blam(es?|ed|ing)", "culprit, fault localization"),
    (EVERYWHERE, r"sizes that are known (only )?after a call", "data-dependent output shapes"),
    (EVERYWHERE, r"factor[ _]lanes|as a factor", "by-element FMA lanes"),
    (EVERYWHERE, r"products of matrices of bytes", "int8 matrix multiply"),
    (PACKAGE, r"products? of bytes|multipl(y|ies) bytes", "int8 products, int8 dot products"),
    (PACKAGE, r"sums in registers|number of sums", "accumulators"),
    (EVERYWHERE, r"integers whose digits are bytes", "int8 limbs with int32 accumulation"),
    (EVERYWHERE, r"tap[ _]weights?", "weights of kernel positions"),
    (PACKAGE, r"last[ _]tiles?", "tail tile"),
    (EVERYWHERE, r"points of (a|the) tile", "rows of the register tile"),
    (PACKAGE, r"(?<!tvmflow\.)grouped[ _]weights|weights in groups", "block-quantized weights"),
    (PACKAGE, r"widen(s|ed|ing)? (float|int|to)", "promote"),
    (PACKAGE, r"in place of open (ones|sizes)|left open by", "tuning size, dynamic dimension"),
    (EVERYWHERE, r"fastest estimate first", "ranked by estimated cost"),
    (EVERYWHERE, r"selection of boxes", "non-maximum suppression (NMS)"),
    (PACKAGE, r"carr(y|ies|ied) (records|trials)", "export and import records"),
    (PACKAGE, r"brings? a (delivery|release) to", "push"),
    (EVERYWHERE, r"as the recipe has them", "from the recipe"),
    (PACKAGE, r"float(16|32|64) numbers?|number by number", "values, elements"),
)  # fmt: skip
"""Each phrase is a regular expression for lower case. It stays out of the whole repository, or of the package."""


@pytest.mark.parametrize(
    ("where", "phrase", "term"), OLD_PHRASES, ids=[term for _, _, term in OLD_PHRASES]
)
def test_old_phrases_stay_away(where: str, phrase: str, term: str) -> None:
    """A reader searches for the field's term, which a failure shows."""
    old = re.compile(rf"(?<![a-z0-9])({phrase})(?![a-z0-9])")
    assert {
        f"{path.relative_to(ROOT)}:{number}": term
        for path in SEARCHED
        if path.is_relative_to(ROOT / where)
        for number, line in enumerate(_read(path), 1)
        if old.search(line)
    } == {}


@functools.cache
def _read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").lower().splitlines()
