import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.errors import MtkitError
from mtkit.experiments.folder import Folder, read_rows
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row, statistics


def test_a_row_is_its_trial_and_what_was_measured(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band", seeds=2))
    trial = plan.due([])[1]
    folder.add(trial, data[None])
    folder.keep(trial.name, statistics(3), **row(12.5))
    found = folder.row("full.seed-2")
    assert found is not None
    assert (found["entry"], found["seed"], found["stage"], found["task"]) == ("full", 2, "final", None)
    assert found["scores"]["test"]["BLEU"]["value"] == 12.5
    assert found["data"] == data[None]
    kept = folder.statistics("full.seed-2")
    assert list(kept) == ["test/exact"]
    assert np.array_equal(kept["test/exact"], statistics(3)["test/exact"])
    assert folder.trial("full.seed-2")["recipe"]["seed"] == 2
    assert [line["trial"] for line in read_rows(folder.write_rows())] == ["full.seed-2"]


def test_reading_the_rows_does_not_visit_the_runs(tiny: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = opened(tiny("full"))
    monkeypatch.setattr("mtkit.experiments.folder.check_regular", lambda path: pytest.fail(f"{path} was walked"))
    assert folder.rows() == []


def test_entries_and_seeds_are_added(tiny: Made, opened: Opened) -> None:
    folder, _, _ = opened(tiny("full", seeds=2))
    folder.open(tiny("band[window_radius=3]", seeds=[1, 4]))
    study = folder.study()
    assert [entry.name for entry in study.entries] == ["full", "band[window_radius=3]"]
    assert study.seeds == (1, 2, 4)
    folder.open(tiny("full"))
    assert folder.study().seeds == (1, 2, 4)


def test_other_settings_are_refused_by_name(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band"))
    with pytest.raises(MtkitError, match=r"training\.max_updates: 2 -> 3"):
        folder.open(tiny("full", settings={"training": {"max_updates": 3}}))
    with pytest.raises(MtkitError, match=r"band\.attention\.name: band -> linear"):
        folder.open(tiny({"name": "band", "attention": "linear"}))
    trial = plan.due([])[0]
    folder.add(trial, data[None])
    folder.add(trial, data[None])
    with pytest.raises(MtkitError, match="the prepared data differs"):
        folder.add(trial, "other")


def test_commands_that_add_entries_at_the_same_time_keep_all(tiny: Made, opened: Opened) -> None:
    folder, _, _ = opened(tiny("full"))
    studies = [tiny(f"band[window_radius={number}]") for number in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda study: Folder(folder.path).open(study), studies))
    assert len(folder.study().entries) == 9


def test_matched_and_unmatched_entries_are_not_mixed(tiny: Made, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.open(tiny("full", match="parameters"))
    with pytest.raises(MtkitError, match="match: parameters -> None"):
        folder.open(tiny("band"))
    folder.open(tiny("band", match="parameters"))
    assert [entry.name for entry in folder.study().entries] == ["full", "band"]


def test_a_null_is_not_a_missing_setting(tiny: Made, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.open(tiny("full", settings={"training": {"patience": 5}}))
    with pytest.raises(MtkitError, match=r"training\.max_flops: unset -> None"):
        folder.open(tiny("full", settings={"training": {"patience": 5, "max_flops": None}}))


def test_scores_of_other_sides_are_not_mixed(tiny: Made, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.open(tiny("full", sides=["test"]))
    with pytest.raises(MtkitError, match="sides"):
        folder.open(tiny("full", sides=["valid"]))


def test_names_that_differ_in_capital_letters_are_refused(tiny: Made, tmp_path: Path) -> None:
    entries = [{"name": name, "attention": "full"} for name in ("Wide", "wide")]
    with pytest.raises(MtkitError, match="differ only in capital letters"):
        Folder(tmp_path / "out").open(tiny(*entries))


def test_entries_that_would_share_files_are_refused(tiny: Made, opened: Opened) -> None:
    first, second = {"name": "a/b", "attention": "full"}, {"name": "a-b", "attention": "full"}
    with pytest.raises(MtkitError, match="'a/b' and 'a-b' differ only"):
        opened(tiny(first, second))
    folder, _, _ = opened(tiny(first))
    with pytest.raises(MtkitError, match="another `name`"):
        opened(tiny(second))
    assert [entry.name for entry in folder.study().entries] == ["a/b"]
    opened(tiny({"name": "中文", "attention": "full"}, {"name": "日本", "attention": "full"}))


def test_a_study_edited_by_hand_is_one_line(tiny: Made, opened: Opened) -> None:
    folder, _, _ = opened(tiny("full"))
    path = folder.path / "study.json"
    path.write_text(path.read_text().replace('"seeds": [', '"seeds": [-1,'))
    with pytest.raises(MtkitError, match=r"study.json is damaged \(seeds.0 = -1.*\); choose another --output"):
        folder.study()


def test_a_folder_that_cannot_be_written_is_one_line(tiny: Made, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MtkitError, match=r"cannot lock .*/file/out/study.lock: .*/file is a file, not a folder;"):
        Folder(tmp_path / "file" / "out").open(tiny("full"))


def test_another_folder_of_the_same_data_is_no_other_setting(tiny: Made, opened: Opened) -> None:
    folder, _, _ = opened(tiny("full"))
    folder.open(tiny("full", settings={"data": {"folder": "moved"}}))


def test_a_search_keeps_its_first_seed(tiny: Made, opened: Opened) -> None:
    search = {"settings": {"peak_rate": [1e-3]}}
    folder, _, _ = opened(tiny("full", seeds=[3], search=search))
    with pytest.raises(MtkitError, match="searches with seed 3"):
        folder.open(tiny("full", seeds=[1, 3], search=search))


def test_a_foreign_folder_is_refused(tiny: Made, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(MtkitError, match="not the folder of a comparison"):
        Folder(tmp_path).open(tiny("full"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "study.json").write_text('{"format": 9, "mtkit": "9.9"}')
    with pytest.raises(MtkitError, match=r"format 9, as mtkit '9\.9' writes it"):
        Folder(other).open(tiny("full"))


@pytest.mark.parametrize("place", ["study.json", "trials", "results"])
def test_links_are_not_followed(place: str, tiny: Made, opened: Opened, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    os.symlink(target, out / place)
    with pytest.raises(MtkitError, match=r"is a link|not the folder of a comparison"):  # noqa: PT012
        folder, plan, data = opened(tiny("full"))
        folder.add(plan.due([])[0], data[None])
        folder.fail("full.seed-1", "why")
    assert list(target.iterdir()) == []


def test_a_damaged_row_is_no_row(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full"))
    folder.add(plan.due([])[0], data[None])
    folder.keep("full.seed-1", None, **row(12.5))
    path = folder.path / "results" / "full.seed-1.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"parameters": "many"}))
    assert folder.row("full.seed-1") is None
    assert folder.rows() == []


def test_damaged_results_are_named(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band", seeds=2))
    for trial in plan.due([]):
        folder.add(trial, data[None])
        folder.keep(trial.name, statistics(3), **row(12.5))
    assert folder.damaged() == []
    results = folder.path / "results"
    (results / "full.seed-1.json").write_text('{"trial": "ful')
    (results / "band.seed-1.safetensors").write_bytes(b"cut")
    (results / "band.seed-2.safetensors").unlink()  # as in a joined results.jsonl
    first, second = folder.damaged()
    assert "band.seed-1.safetensors is damaged, so intervals and tests leave it out; delete" in first
    assert "full.seed-1.json is damaged and left out" in second


def test_a_damaged_line_of_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"format": 2}\n{"format": 2}\n')
    with pytest.raises(MtkitError, match="line 1, is damaged"):
        read_rows(path)


def test_damaged_settings_of_a_trial_are_named_and_can_be_deleted(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full"))
    folder.add(plan.due([])[0], data[None])
    path = folder.path / "trials" / "full.seed-1.json"
    path.write_text('{"a": ')
    with pytest.raises(MtkitError, match=r"seed-1\.json is damaged .*; delete it, and the same command writes it"):
        folder.begun()
    path.unlink()
    folder.add(plan.due([])[0], data[None])
    assert [each["trial"] for each in folder.begun()] == ["full.seed-1"]


@pytest.mark.parametrize(
    "fault",
    [
        {"side": "test-2x"},
        {"scores": {"test": {}}},
        {"scores": {"test": {"exact": {"value": None, "signature": "s"}}}},
        {"scores": {"test": {"exact": {"value": 1.0}}}},
        {"valid": {"nll": "x"}},
        {"curve": [{"update": 1, "seconds": 1.0}]},
        {"hardware": 3},
        {"flops_per_token": "x"},
        {"state_bytes": 3},
        {"state_bytes": {"100": []}},
    ],
)
def test_a_row_edited_by_hand_is_no_row(fault: dict[str, Any], tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full"))
    (trial,) = plan.due([])
    folder.add(trial, data[None])
    folder.keep(trial.name, **row(80.0))
    assert folder.row(trial.name) is not None
    folder.keep(trial.name, **row(80.0) | fault)
    assert folder.row(trial.name) is None
    assert folder.rows() == []
