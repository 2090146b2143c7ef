"""Comparisons of runs, lock files and deliveries."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.support.facts import VERDICT
from tests.unit.release.locks import lock
from tvmflow.cli import main
from tvmflow.core.errors import UsageError
from tvmflow.engine.builds import Build
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.run_records import record_run
from tvmflow.pages.content import Change
from tvmflow.recipe.yaml_files import write_yaml
from tvmflow.release.comparison import Side, compare_sides, load_side
from tvmflow.store.local import LocalStore

NET = Build("net", "host", verdict="verified", latency_s=1e-3, size_bytes=1000, error=1e-6)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def side(*builds: Build) -> Side:
    return Side("x", {build.name: build for build in builds})


def texts(before: Build, after: Build, store: LocalStore) -> dict[str, str]:
    comparison = compare_sides(side(before), side(after), store)
    return {figure.what: figure.text for figure in comparison.figures}


def record(store: LocalStore, *, error: float, message: str = "", recipe: str = "net") -> None:
    verdict = {**VERDICT, "outputs": {"y": {**VERDICT["outputs"]["y"], "max_abs_error": error}}}
    with record_run(store, ["run", "net.yaml"]) as recording:
        stage = StageReport(f"{recipe}:verify/host", "ran", "", 1.0, verdict, message)
        recording.report, recording.exit_code = RunReport((stage,), (), (), 1.0), 0


def test_figures_have_both_values_and_the_change(store: LocalStore) -> None:
    """A figure that is the same on both sides has one."""
    after = NET._replace(latency_s=0.5e-3, size_bytes=1100, accuracy=0.5)
    assert texts(NET, after, store) == {
        "result": "verified",
        "latency": "1 ms -> 500 µs (-50.0%)",
        "library": "1.0 kB -> 1.1 kB (+10.0%)",
        "error": "1.0e-06",
        "accuracy": "unknown -> 50.00%",
    }


@pytest.mark.parametrize(
    ("latency_s", "std_s", "is_noise"),
    [(1.01e-3, None, True), (1.03e-3, None, False), (1.03e-3, 2e-5, True), (1.1e-3, 2e-5, False)],
)
def test_a_latency_within_the_noise_is_no_regression(
    store: LocalStore, latency_s: float, std_s: float | None, is_noise: bool
) -> None:
    """The noise is the spread of both measurements, and at least what a machine varies by."""
    before = side(NET._replace(latency_std_s=std_s))
    after = side(NET._replace(latency_s=latency_s, latency_std_s=std_s))
    comparison = compare_sides(before, after, store)
    (latency,) = [figure for figure in comparison.figures if figure.what == "latency"]
    assert latency.is_noise == is_noise
    assert bool(comparison.list_regressions(0.0)) == (not is_noise)
    assert not comparison.list_regressions(50.0)


def test_a_large_difference_is_never_called_noise(store: LocalStore) -> None:
    """With a wide spread nothing is known of it: the machine was too noisy to compare."""
    before = side(NET._replace(latency_std_s=4e-4, untuned_latency_s=2e-3))
    slower = NET._replace(latency_s=1.548e-3, latency_std_s=6e-4, untuned_latency_s=2.1e-3)
    comparison = compare_sides(before, side(slower), store)
    texts = {figure.what: figure.text for figure in comparison.figures}
    assert texts["latency"] == "1 ms -> 1.55 ms (+54.8%, too noisy to compare)"
    assert texts["untuned"] == "2 ms -> 2.1 ms (+5.0%, within the noise)"
    assert comparison.list_regressions(0.0) == []


def test_a_larger_or_no_longer_verified_library_is_a_regression(store: LocalStore) -> None:
    """However little the percentage allows."""
    after = NET._replace(verdict="not verified", size_bytes=1200)
    comparison = compare_sides(side(NET), side(after), store)
    assert [row.what for row in comparison.list_regressions(10.0)] == ["result", "library"]
    assert [row.what for row in comparison.list_regressions(30.0)] == ["result"]


def test_builds_of_one_side_are_named(store: LocalStore) -> None:
    """They have no figures."""
    edge = NET._replace(target="edge")
    comparison = compare_sides(side(NET), side(edge), store)
    assert comparison.figures == ()
    assert comparison.changes == (
        Change("net/edge", "build", "added"),
        Change("net/host", "build", "removed"),
    )


def test_builds_of_two_recipes_are_compared_by_target(store: LocalStore) -> None:
    """As of a float and an int8 recipe: side by side, not as one that came and one that went."""
    before = side(NET, NET._replace(target="edge"))
    small = NET._replace(recipe="net-int8", size_bytes=300, quantization_error=0.0155)
    comparison = compare_sides(before, side(small), store)
    assert {figure.build for figure in comparison.figures} == {"net/host -> net-int8/host"}
    texts = {figure.what: figure.text for figure in comparison.figures}
    assert texts["library"] == "1.0 kB -> 300 B (-70.0%)"
    assert texts["error vs float"] == "unknown -> 1.55%"
    assert comparison.changes == (Change("net/edge", "build", "removed"),)


def test_two_recipes_stand_for_what_they_delivered_last(store: LocalStore, tmp_path: Path) -> None:
    """Another run of the recipe that delivered nothing is passed over; one that never did is an error."""
    for name in ("net", "other", "new"):
        text = f"recipe: 1\nname: {name}\nmodel: {{onnx: m.onnx}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "m.onnx").touch()
    stages = {
        name: StageReport(f"{name}:verify/host", "ran", "", 1.0, VERDICT, "")
        for name in ("net", "other")
    }
    for name, stage in stages.items():
        with record_run(store, ["run", f"{name}.yaml"]) as recording:
            paths = (f"dist/{name}/host/{name}.tvmflow",)
            recording.report, recording.exit_code = RunReport((stage,), paths, (), 1.0), 0
    record(store, error=1.0)
    sides = [load_side(str(tmp_path / f"{name}.yaml"), store) for name in stages]
    figures = compare_sides(sides[0], sides[1], store).figures
    assert {figure.build for figure in figures} == {"net/host -> other/host"}
    with pytest.raises(UsageError, match=r"no run in .* has delivered anything of this recipe"):
        load_side(str(tmp_path / "new.yaml"), store)


def test_a_delivery_is_compared_with_a_run(store: LocalStore, tmp_path: Path) -> None:
    """The folder of a target, of a recipe, or all of `dist`."""
    folder = tmp_path / "dist" / "net" / "host"
    folder.mkdir(parents=True)
    (folder / "measurements.json").write_text(json.dumps(VERDICT))
    with zipfile.ZipFile(folder / "net.tvmflow", "w") as archive:
        archive.writestr("lib/net.so", b"x" * 500)
    record(store, error=4e-6)
    run = load_side("latest", store)
    for path in (folder, folder.parent, folder.parent.parent):
        delivery = load_side(str(path), store)
        assert delivery.builds["net/host"].size_bytes == 500
        figures = {f.what: f.text for f in compare_sides(delivery, run, store).figures}
        assert figures["latency"] == "1 ms"
        assert figures["error"] == "2.0e-06 -> 4.0e-06"


def test_what_cannot_be_compared_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    """A folder without measurements, and measurements that are none."""
    with pytest.raises(UsageError, match="is in this folder, nor"):
        load_side(str(tmp_path), store)
    for content in ("[]", '{"outputs": 3}', "{"):
        (tmp_path / "measurements.json").write_text(content)
        with pytest.raises(UsageError):
            load_side(str(tmp_path), store)


def test_a_name_of_nothing_is_told_from_a_store_without_runs(store: LocalStore) -> None:
    """The message says what a name may be."""
    for name in ("dist/net", "A"):
        with pytest.raises(UsageError) as caught:
            load_side(name, store)
        assert (
            f"there is no file or folder {name}, and no run of this name in "
            in caught.value.message
        )
        assert "`latest`" in caught.value.fix and "a lock file" in caught.value.fix
    with pytest.raises(UsageError, match="has no record of a run"):
        load_side("latest", store)


def test_a_gate_without_a_common_build_is_a_mistake(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of other recipes nothing can become worse, whatever was built: a gate in CI would always be open."""
    record(store, error=2e-6)
    record(store, error=2e-6, recipe="other")
    line = ["compare", "latest~1", "latest", "--store", store.root]
    assert main.main(line) == 0
    capsys.readouterr()
    assert main.main([*line, "--fail-on-regression", "5"]) == 2
    assert "no build of A is in B" in capsys.readouterr().err


def test_the_command_ends_with_3_for_a_regression(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, as Markdown and as JSON."""
    record(store, error=2e-6)
    record(store, error=4e-6, message="it differs")
    line = ["compare", "latest~1", "latest", "--store", store.root]
    assert main.main(line) == 0
    assert "  error     2.0e-06 -> 4.0e-06\n" in capsys.readouterr().out
    assert main.main([*line, "--md"]) == 0
    assert "| net/host | error | 2.0e-06 → 4.0e-06 |\n" in capsys.readouterr().out
    assert main.main([*line, "--json", "--fail-on-regression", "5%"]) == 0
    assert json.loads(capsys.readouterr().out)["regressions"] == []
    assert main.main([*line, "--fail-on-regression", "no"]) == 2


def write_release(folder: Path, *, before: str = "", **measured: object) -> str:
    """Write the lock file and the measurements of a release, and return its folder."""
    folder.mkdir()
    locked = lock(recipes__net__targets__host__measured={"bytes": {"net.whl": 900}})
    (folder / "release.lock.yaml").write_text(write_yaml(locked.model_dump(exclude_defaults=True)))
    target = {"measured": {}, "previous": {}, "library_bytes": 1000, **measured}
    value = {"measurements": 1, "compared_with": before, "added": [], "removed": []}
    value |= {"recipes": {"net": {"host": target}}, "verification": {"net": {"host": VERDICT}}}
    (folder / "measurements.json").write_text(json.dumps(value))
    return str(folder)


def test_a_release_counts_with_what_it_measured_interleaved(
    store: LocalStore, tmp_path: Path
) -> None:
    """The verdict and the sizes of libraries are compared, too; what is slower or larger is a regression."""
    first = write_release(tmp_path / "net-1.0")
    pair = {"previous_s": 2e-3, "current_s": 3e-3, "library_bytes": 1300}
    second = write_release(tmp_path / "net-1.1", before="net-1.0", **pair)
    sides = [load_side(path, store) for path in (first, second)]
    comparison = compare_sides(sides[0], sides[1], store)
    figures = {figure.what: figure.text for figure in comparison.figures}
    assert figures["result"] == "verified"
    assert figures["latency"] == "2 ms -> 3 ms (+50.0%), interleaved"
    assert figures["library"] == "1.0 kB -> 1.3 kB (+30.0%)"
    assert [row.what for row in comparison.list_regressions(10.0)] == ["latency", "library"]
    # the other way round, nothing was measured interleaved
    back = compare_sides(sides[1], sides[0], store)
    assert {figure.what: figure.text for figure in back.figures}["latency"] == "1 ms"


def test_the_same_library_is_as_fast_as_itself(store: LocalStore, tmp_path: Path) -> None:
    """Whatever the machine did when the second release was measured."""
    slow = {**VERDICT, "latency": {"library": {**VERDICT["latency"]["library"], "median": 9e-3}}}
    first = write_release(tmp_path / "net-1.0")
    second = write_release(tmp_path / "net-1.1", before="net-1.0", is_same_library=True)
    path = tmp_path / "net-1.1" / "measurements.json"
    value = json.loads(path.read_text()) | {"verification": {"net": {"host": slow}}}
    path.write_text(json.dumps(value))
    sides = [load_side(path, store) for path in (first, second)]
    comparison = compare_sides(sides[0], sides[1], store)
    (latency,) = [figure for figure in comparison.figures if figure.what == "latency"]
    assert latency.text == "1 ms -> 9 ms (+800.0%, too noisy to compare): the same library"
    assert comparison.list_regressions(5.0) == []


def test_what_is_on_one_side_is_named_once(store: LocalStore, tmp_path: Path) -> None:
    """As a build, and not as a target of the lock file as well."""
    first, second = (write_release(tmp_path / name) for name in ("net-1.0", "net-1.1"))
    path = tmp_path / "net-1.0" / "release.lock.yaml"
    path.write_text(path.read_text().replace("host:", "edge:"))
    sides = [load_side(path, store) for path in (first, second)]
    changes = compare_sides(sides[0], sides[1], store).changes
    assert Change("net/edge", "build", "removed") in changes
    assert "target" not in {change.what for change in changes}


def test_lock_files_have_sizes(store: LocalStore, tmp_path: Path) -> None:
    """That of the library, or else of all delivered files."""
    sizes = [{"a.so": 100, "a.h": 5}, {"a.so": 150, "a.h": 5}, {"a.whl": 100}, {"a.whl": 120}]
    for number, own in enumerate(sizes):
        locked = lock(recipes__net__targets__host__measured={"bytes": own})
        text = write_yaml(locked.model_dump(exclude_defaults=True))
        (tmp_path / f"{number}.lock.yaml").write_text(text)
    sides = [load_side(str(tmp_path / f"{number}.lock.yaml"), store) for number in range(4)]
    libraries = compare_sides(sides[0], sides[1], store)
    assert [(row.what, row.text) for row in libraries.list_regressions(5.0)] == [
        ("library", "100 B -> 150 B (+50.0%)")
    ]
    files = compare_sides(sides[2], sides[3], store)
    assert [(row.what, row.text) for row in files.list_regressions(5.0)] == [
        ("files", "100 B -> 120 B (+20.0%)")
    ]
