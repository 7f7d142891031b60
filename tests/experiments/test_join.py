from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import MtkitError
from mtkit.experiments import compare as comparing
from mtkit.experiments.children import Children
from mtkit.experiments.compare import compare
from mtkit.experiments.folder import Folder
from mtkit.experiments.join import Reproduced, join, reproduce
from mtkit.experiments.table import build
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row, statistics


def filled(opened: Opened, study: Any, name: str, score: float) -> Folder:
    folder, plan, data = opened(study, name)
    for trial in plan.due([]):
        folder.add(trial, data[None])
        folder.keep(trial.name, statistics(2), **row(score))
    return folder


def test_rows_of_two_folders_are_one_table(tiny: Made, opened: Opened) -> None:
    one = filled(opened, tiny("full", seeds=[1]), "one", 10.0)
    two = filled(opened, tiny("full", "band", seeds=[2]), "two", 20.0)
    assert join(one, [two]) == (2, 0)
    assert [each["trial"] for each in one.rows()] == ["full.seed-1", "full.seed-2", "band.seed-2"]
    assert one.statistics("band.seed-2").keys() == {"test/exact"}
    assert one.study().seeds == (1, 2)
    assert [(line.entry, len(line.rows)) for line in build(one).lines] == [("band", 1), ("full", 2)]


def test_what_both_have_is_kept_and_a_failure_is_replaced(tiny: Made, opened: Opened) -> None:
    one = filled(opened, tiny("full", "band"), "one", 10.0)
    one.fail("band.seed-1", "why")
    two = filled(opened, tiny("full", "band"), "two", 20.0)
    assert join(one, [two]) == (1, 1)
    assert [each["scores"]["test"]["BLEU"]["value"] for each in one.rows()] == [10.0, 20.0]


def test_a_new_folder_takes_everything(tiny: Made, opened: Opened, tmp_path: Path) -> None:
    two = filled(opened, tiny("full", "band"), "two", 20.0)
    new = Folder(tmp_path / "new")
    assert join(new, [two]) == (2, 0)
    assert len(build(new).lines) == 2


def test_a_file_of_rows_goes_on_elsewhere(tiny: Made, opened: Opened, tmp_path: Path) -> None:
    study = tiny("full", "band")
    two = filled(opened, study, "two", 20.0)
    two.forget("band.seed-1")
    rows = two.write_rows()
    new = Folder(tmp_path / "new")
    with pytest.raises(MtkitError, match=r"no study for the rows of .*two/results\.jsonl; give --study"):
        join(new, [rows])
    new, plan, data = opened(study, "new")
    assert join(new, [rows]) == (1, 0)
    assert new.rows() == two.rows()
    assert [trial.name for trial in plan.due([]) if new.row(trial.name) is None] == ["band.seed-1"]
    new.add(plan.due([])[0], data[None])  # the same settings: the finished trial is kept
    assert build(new).lines[0].values["BLEU"].mean == 20.0
    changed = opened(tiny("full", "band", settings={"training": {"max_updates": 3}}), "changed")[0]
    changed.add(opened(tiny("full", settings={"training": {"max_updates": 3}}), "plan")[1].due([])[0], data[None])
    with pytest.raises(MtkitError, match=r"training\.max_updates: 3 -> 2"):
        join(changed, [rows])


def test_other_settings_are_refused_before_anything_is_copied(tiny: Made, opened: Opened) -> None:
    one = filled(opened, tiny("full"), "one", 10.0)
    two = filled(opened, tiny("band", "full", settings={"training": {"max_updates": 3}}), "two", 20.0)
    with pytest.raises(MtkitError, match=r"training\.max_updates: 2 -> 3"):
        join(one, [two])
    assert [each["trial"] for each in one.rows()] == ["full.seed-1"]
    with pytest.raises(MtkitError, match="no results to join"):
        join(one, [opened(tiny("full"), "empty")[0]])


def test_folders_with_different_settings_leave_no_new_folder(tiny: Made, opened: Opened, tmp_path: Path) -> None:
    one = filled(opened, tiny("full"), "one", 10.0)
    two = filled(opened, tiny("band", settings={"training": {"max_updates": 3}}), "two", 20.0)
    with pytest.raises(MtkitError, match=r"training\.max_updates: 2 -> 3"):
        join(Folder(tmp_path / "new"), [one, two])
    assert not (tmp_path / "new").exists()


def test_rows_of_a_file_with_other_settings_or_data_are_refused(tiny: Made, opened: Opened) -> None:
    two = filled(opened, tiny("full", "band"), "two", 20.0)
    rows = two.write_rows()
    longer, _, _ = opened(tiny("full", "band", settings={"training": {"max_updates": 999}}), "longer")
    with pytest.raises(
        MtkitError, match=r"full\.seed-1 was trained with other settings \(training\.max_updates: 999 -> 2"
    ):
        join(longer, [rows])
    assert longer.rows() == []
    one = filled(opened, tiny("full"), "one", 10.0)
    rows.write_text(rows.read_text().replace(two.begun()[0]["data"], "f" * 64))
    with pytest.raises(MtkitError, match="the prepared data differs"):
        join(one, [rows])
    rows.write_text("".join(line for line in rows.read_text().splitlines(keepends=True) if '"band' in line))
    with pytest.raises(MtkitError, match=r"band\.seed-1 was trained on other prepared data than the rows in .*one"):
        join(one, [rows])
    assert len(one.rows()) == 1


def test_a_search_and_matched_widths_do_not_hinder_a_join(tiny: Made, opened: Opened, tmp_path: Path) -> None:
    search = {"settings": {"peak_rate": [1e-3, 2e-3]}, "share": 0.5}
    study = tiny("full", "band", search=search, match="parameters")
    rows = filled(opened, study, "two", 20.0).write_rows()
    assert join(opened(study, "new")[0], [rows]) == (4, 0)


def test_columns_and_sides_of_the_folder_stay(tiny: Made, opened: Opened) -> None:
    one = filled(opened, tiny("full", columns=["loss"]), "one", 10.0)
    assert join(one, [filled(opened, tiny("band"), "two", 20.0)]) == (1, 0)
    assert one.study().settings.columns == ("loss",)
    with pytest.raises(MtkitError, match="sides"):
        join(one, [filled(opened, tiny("linear", sides=["valid"]), "three", 20.0)])


def test_a_finished_trial_of_other_data_is_refused_before_any_training(tiny: Made, opened: Opened) -> None:
    filled(opened, tiny("full"), "out", 10.0)
    folder, plan, _ = opened(tiny("full", "band"))
    with pytest.raises(MtkitError, match="the prepared data differs"), Children(folder, "cpu", 1) as children:
        compare(folder, plan, {None: "f" * 64}, children, show=lambda line: None, done=lambda name: None)
    assert [trial["trial"] for trial in folder.begun()] == ["full.seed-1"]


def test_a_row_comes_back(tiny: Made, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "LOOK_SECONDS", 0.02)
    folder, plan, data = opened(tiny("full", "band[window_radius=2]"))
    with Children(folder, "cpu", 1) as children:
        compare(folder, plan, data, children, show=lambda line: None, done=lambda name: None)
    rows = folder.write_rows()
    found = reproduce(rows, 2, Folder(tmp_path / "again"), device="cpu", threads=1, show=lambda line: None)
    assert isinstance(found, Reproduced)
    assert found.after["entry"] == "band[window_radius=2]"
    assert found.differences == []
    assert found.circumstances == []
    assert found.after["scores"] == found.before["scores"]
    assert not found.earlier
    found = reproduce(rows, 2, Folder(tmp_path / "again"), device="cpu", threads=1, show=lambda line: None)
    assert isinstance(found, Reproduced)
    assert found.earlier


def test_differences_are_named() -> None:
    before, after = row(10.0), row(11.0, threads=2)
    found = Reproduced(before, after)
    assert found.differences[0] == "test BLEU: 10.0 -> 11.0"
    assert found.circumstances == ["threads: 1 -> 2"]


def test_a_row_that_cannot_be_computed_is_refused(tiny: Made, opened: Opened, tmp_path: Path) -> None:
    folder, plan, data = opened(tiny("full"))
    folder.add(plan.due([])[0], data[None])
    folder.fail("full.seed-1", "diverged")
    rows = folder.write_rows()
    for number, message in ((2, "no row 2; it has rows 1 to 1"), (1, "the trial failed \\(diverged\\)")):
        with pytest.raises(MtkitError, match=message):
            reproduce(rows, number, Folder(tmp_path / "again"), device="cpu", threads=1, show=print)
    assert not (tmp_path / "again").exists()
