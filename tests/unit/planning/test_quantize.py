"""Plans of recipes with `quantize`: the stage takes the place of `import`, and what it cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import joined_target, plan_of, planned, recipe, target
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Need

VNNI = target()._replace(features=("avx512_vnni", "avx512vl"))
DATA: dict[str, Any] = {"verify": {"data": "test.npz"}}
OWN: dict[str, Any] = {"quantize": {"data": "own.npz"}}


def test_the_stage_takes_the_place_of_import() -> None:
    """All stages but it read the quantized model; it reads the data of both sections. Without it nothing changes."""
    plan = plan_of(planned(recipe(**DATA, **OWN), VNNI))
    specs = {spec.id.partition(":")[2]: spec for spec in plan.stages}
    assert "quantize/host" in specs
    for label, spec in specs.items():
        makers = {need.stage_id for need in spec.needs if need.stage == "import"}
        own = "net:import" if label == "quantize/host" else "net:quantize/host"
        assert makers <= {own}, label
    assert [file.role for file in specs["quantize/host"].files] == ["data", "calibration"]
    assert specs["verify/host"].settings["quantized"] is True
    plain = plan_of(planned(recipe(**DATA), VNNI))
    assert all(spec.stage != "quantize" for spec in plain.stages)
    assert all("quantized" not in spec.settings for spec in plain.stages)
    [lower] = [spec for spec in plain.stages if spec.stage == "lower"]
    assert lower.needs == (Need("import", "net:import", ("model.json",)),)


def test_a_variant_is_quantized_by_itself() -> None:
    """Fields of a variant come over those of the recipe; other variants stay float."""
    made = recipe(**DATA, variants={"full": {}, "small": {"quantize": {"skip": ["head/*"]}}})
    assert made.for_variant("full").quantize is None
    quantized = made.for_variant("small").quantize
    assert quantized is not None and quantized.skip == ("head/*",)


@pytest.mark.parametrize(
    ("fields", "subject", "text"),
    [
        (
            OWN,
            target(),
            "/recipes/net.yaml:quantize: quantize: the target 'host' has no int8 dot products "
            "(x86-64: AVX2 or VNNI), so that int8 data would only make it slower; set `activations: none`",
        ),
        (OWN, joined_target(), "the target 'split' is in parts, each of which would need data of its own"),
        ({"quantize": {}}, VNNI, "there are no data to calibrate with; set `data` here, or `verify.data`"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: Any, subject: Any, text: str) -> None:
    """Each with its place and a remedy."""
    with pytest.raises(RecipeError) as raised:
        plan_of(planned(recipe(**fields), subject))
    assert text in raised.value.problems[0]


def test_weights_alone_need_no_instructions_and_no_data() -> None:
    """A CPU without products of bytes has a smaller library."""
    made = recipe(quantize={"activations": "none"})
    assert any(s.stage == "quantize" for s in plan_of(planned(made, target())).stages)
