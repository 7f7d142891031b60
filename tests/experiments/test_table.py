from typing import Any

import numpy as np
import pytest

from mtkit.errors import MtkitError
from mtkit.evaluation.seeds import differences, score_seeds, summarise
from mtkit.experiments.folder import Folder
from mtkit.experiments.table import Table, build, choose_columns
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row, statistics


def filled(opened: Opened, study: Any, wrong: dict[str, int], **changed: Any) -> Folder:
    """A folder whose trials have so many wrong segments of 8, by the trial's name."""
    folder, plan, data = opened(study)
    for trial in plan.due([]):
        folder.add(trial, data[trial.task])
        if trial.name not in wrong:
            folder.fail(trial.name, "diverged")
            continue
        exact = {"value": 100 * (8 - wrong[trial.name]) / 8, "signature": "nrefs:1"}
        folder.keep(trial.name, statistics(wrong[trial.name]), **row(0, scores={"test": {"exact": exact}}) | changed)
    return folder


def table_of(folder: Folder, *columns: str) -> Table:
    return build(folder, columns)


def test_a_line_has_mean_deviation_interval_and_test(tiny: Made, opened: Opened) -> None:
    wrong = {"full.seed-1": 2, "full.seed-2": 4, "band.seed-1": 1, "band.seed-2": 2}
    table = table_of(filled(opened, tiny("full", "band", seeds=2), wrong))
    assert [line.entry for line in table.lines] == ["band", "full"]
    assert table.primary == "exact"
    band, full = table.lines
    assert full.values["exact"].mean == pytest.approx((75 + 50) / 2)
    assert full.values["exact"].sd == pytest.approx(np.std([75, 50], ddof=1))
    assert full.values["parameters"].mean == 1_234_567
    assert not full.tests
    # as the functions of statistics have it for the same segments
    from mtkit.experiments.table import _as_statistics

    entries = [
        [_as_statistics("exact", statistics(wrong[f"{name}.seed-{seed}"])["test/exact"]) for seed in (1, 2)]
        for name in ("full", "band")
    ]
    scores = score_seeds(entries)
    assert band.values["exact"] == summarise(scores)[1]
    assert band.tests["exact"] == differences(scores)[0]
    assert band.tests["exact"].value == pytest.approx(18.75)


def test_failed_seeds_and_entries_have_their_reasons(tiny: Made, opened: Opened) -> None:
    wrong = {"full.seed-1": 2, "full.seed-2": 4, "band.seed-1": 1}
    table = table_of(filled(opened, tiny("full", "band", "linear", seeds=2), wrong))
    assert [line.entry for line in table.lines] == ["band", "full", "linear"]
    band, _, linear = table.lines
    assert band.failed == "seed 2: diverged"
    assert len(band.rows) == 1
    assert linear.values == {}
    assert linear.failed == "seed 1: diverged; seed 2: diverged"


def test_without_the_first_entry_nothing_is_tested(tiny: Made, opened: Opened) -> None:
    table = table_of(filled(opened, tiny("full", "band"), {"band.seed-1": 1}))
    assert [line.entry for line in table.lines] == ["band", "full"]
    assert not any(line.tests for line in table.lines)


def test_before_the_first_entry_has_rows_nothing_is_tested(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band", "linear"))
    for trial in plan.due([])[1:]:
        folder.add(trial, data[None])
        exact = {"value": 75.0, "signature": "nrefs:1"}
        folder.keep(trial.name, statistics(2), **row(0, scores={"test": {"exact": exact}}))
    assert not any(line.tests for line in build(folder).lines)


def test_intervals_without_statistics_stay_within_the_metric(tiny: Made, opened: Opened) -> None:
    wrong = {"full.seed-1": 0, "full.seed-2": 6, "band.seed-1": 0, "band.seed-2": 0}
    folder = filled(opened, tiny("full", "band", seeds=2), wrong)
    for path in (folder.path / "results").glob("*.safetensors"):
        path.unlink()
    band, full = build(folder).lines
    assert (full.values["exact"].low, full.values["exact"].high) == (0.0, 100.0)
    assert (band.values["exact"].mean, band.values["exact"].low, band.values["exact"].high) == (100.0, None, None)


def test_without_statistics_of_the_first_entry_nothing_is_tested(tiny: Made, opened: Opened) -> None:
    folder = filled(opened, tiny("full", "band", "linear"), {"full.seed-1": 1, "band.seed-1": 2, "linear.seed-1": 4})
    (folder.path / "results" / "full.seed-1.safetensors").unlink()
    assert not any(line.tests for line in build(folder).lines)


def test_of_a_search_only_the_chosen_point_counts(tiny: Made, opened: Opened) -> None:
    study = tiny("full", search={"settings": {"training.peak_rate": [0.001, 0.003]}})
    folder = filled(opened, study, {"full.peak_rate-0.001.seed-1": 2, "full.peak_rate-0.003.seed-1": 6})
    (line,) = build(folder).lines
    assert line.chosen == "peak_rate=0.001"
    assert line.values["exact"].mean == 75


def test_another_point_does_not_stand_for_a_chosen_one_that_failed(tiny: Made, opened: Opened) -> None:
    study = tiny("full", search={"settings": {"training.peak_rate": [0.001, 0.003]}, "share": 0.5})
    folder, plan, data = opened(study)
    one, two = plan.due([])
    for trial, valid in ((one, 10.0), (two, 20.0)):
        folder.add(trial, data[None])
        folder.keep(trial.name, None, **row(0, valid={"bleu": valid, "best_by": "bleu"}))
    (final,) = plan.due(folder.rows())[2:]
    folder.add(final, data[None])
    folder.fail(final.name, "out of memory")
    earlier = plan.trial(study.entries[0], None, 1, one.point)  # the choice before the second trial of the search
    folder.add(earlier, data[None])
    folder.keep(earlier.name, None, **row(11.0))
    (line,) = build(folder).lines
    assert (line.values, line.failed) == ({}, "seed 1: out of memory")


def test_columns_are_chosen_by_the_data(tiny: Made, opened: Opened) -> None:
    scores = {metric: {"value": 50.0, "signature": "x"} for metric in ("BLEU", "chrF", "exact")}
    rows = [row(0, scores={"test": scores})]
    assert [column.key for column in choose_columns(rows)][:3] == ["BLEU", "chrF", "loss"]
    probe = [row(0, scores={"test": scores, "test-2x": scores}, task="copy")]
    assert [column.key for column in choose_columns(probe)][:4] == ["exact", "BLEU", "chrF", "exact@test-2x"]
    assert [column.key for column in choose_columns(rows, ["chrf", "LOSS"])] == ["chrF", "loss"]
    with pytest.raises(MtkitError, match="did you mean 'loss'"):
        choose_columns(rows, ["los"])


def test_lower_losses_and_error_rates_come_first(tiny: Made, opened: Opened) -> None:
    folder = filled(opened, tiny("full", "band"), {"full.seed-1": 0, "band.seed-1": 4})
    table = build(folder, ["parameters", "exact"])
    assert [line.entry for line in table.lines] == ["full", "band"]
    for name, loss in (("full.seed-1", 3.0), ("band.seed-1", 2.0)):
        folder.keep(name, None, **row(0, valid={"nll": loss}))
    table = build(folder, ["loss"])
    assert table.primary == "loss"
    assert [line.entry for line in table.lines] == ["band", "full"]
    for name, errors in (("full.seed-1", 40.0), ("band.seed-1", 30.0)):
        folder.keep(name, None, **row(0, scores={"test": {"TER": {"value": errors, "signature": "x"}}}))
    assert [line.entry for line in build(folder, ["TER"]).lines] == ["band", "full"]


def test_records_are_flat_and_all_have_the_same_keys(tiny: Made, opened: Opened) -> None:
    folder = filled(opened, tiny("full", "band", seeds=2), {"full.seed-1": 2, "full.seed-2": 4, "band.seed-1": 1})
    records = build(folder, ["exact", "parameters"]).records()
    assert {tuple(record) for record in records} == {tuple(records[0])}
    assert records[1]["exact"] == pytest.approx(62.5)
    assert records[0]["exact_p_holm"] is not None
    assert records[1]["exact_p_holm"] is None
    assert not any(isinstance(value, dict | list) for record in records for value in record.values())


def test_timings_of_shared_machines_are_marked(tiny: Made, opened: Opened) -> None:
    assert build(filled(opened, tiny("full"), {"full.seed-1": 1}, shared=True)).lines[0].shared


def test_rows_without_statistics_have_their_mean(tiny: Made, opened: Opened) -> None:
    folder = filled(opened, tiny("full", "band"), {"full.seed-1": 2, "band.seed-1": 4})
    (folder.path / "results" / "full.seed-1.safetensors").unlink()
    table = build(folder)
    assert table.lines[0].values["exact"].mean == pytest.approx(75)
    assert table.lines[0].values["exact"].low is None
