import csv
import io

import pytest

from mtkit.experiments.folder import Folder
from mtkit.experiments.report import caption, csv_text, latex, markdown, text
from mtkit.experiments.table import build
from mtkit.experiments.trials import Plan
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row
from tests.experiments.test_table import filled

ROW = ["full", "98.76", "-", "100.76", "1.250", "1,234,567", "7.14 M", "20 KiB", "45,679", "1,234", "812 MiB", "1,000"]


def one(tiny: Made, opened: Opened, **changed: object) -> Folder:
    folder, plan, data = opened(tiny("full"))
    for trial in plan.due([]):
        folder.add(trial, data[None])
        folder.keep(trial.name, None, **row(98.76, **changed))
    return folder


def test_every_number_stands_in_its_column(tiny: Made, opened: Opened) -> None:
    folder = one(tiny, opened)
    study, table, rows = folder.study(), build(folder), folder.rows()
    head, line = text(study, table, rows).split("\n")[-2:]
    assert [cell.strip() for cell in line.split("  ") if cell.strip()] == ROW
    for name, cell in zip(("BLEU", "training tokens/s", "peak memory", "updates"), (1, 8, 10, 11), strict=True):
        assert head.index(name) + len(name) == line.index(ROW[cell]) + len(ROW[cell])
    last = markdown(study, table, rows).rstrip("\n").split("\n")[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == ROW


def test_csv_has_unrounded_numbers(tiny: Made, opened: Opened) -> None:
    (record,) = csv.DictReader(io.StringIO(csv_text(build(one(tiny, opened)))))
    assert float(record["BLEU"]) == 98.76
    assert float(record["flops"]) == 7.14e6
    assert record["entry"] == "full"


def test_latex_is_a_booktabs_table_with_escaped_text(tiny: Made, opened: Opened) -> None:
    wrong = {"full.seed-1": 2, "band-window_radius-3.seed-1": 1}
    folder = filled(opened, tiny("full", "band[window_radius=3]", "linear"), wrong)
    shown = latex(folder.study(), build(folder), folder.rows())
    assert r"band[window\_radius=3] & 87.50" in shown
    assert all(
        word in shown for word in (r"\toprule", r"\midrule", r"\bottomrule", r"95\% interval", r"\caption{Preset")
    )
    rows = [line for line in shown.split("\n") if line.endswith(r"\\")]
    assert {line.count("&") for line in rows} == {rows[0].count("&")}
    assert "seed 1: diverged" in rows[-1]


def test_latex_has_the_signs_that_its_first_fonts_lack(tiny: Made, opened: Opened) -> None:
    folder, _, _ = opened(tiny({"name": "a|b>c<d", "attention": "full"}))
    folder.add(Plan(folder.study(), {None: {}}, {}).due([])[0], "data")
    folder.keep("a-b-c-d.seed-1", None, **row(5.0))
    assert r"a$|$b$>$c$<$d & 5.00" in latex(folder.study(), build(folder), folder.rows())


def test_seeds_have_a_deviation_and_p_values(tiny: Made, opened: Opened) -> None:
    wrong = {"full.seed-1": 2, "full.seed-2": 4, "band.seed-1": 1, "band.seed-2": 2}
    folder = filled(opened, tiny("full", "band", seeds=2), wrong)
    shown = text(folder.study(), build(folder, ["exact"]), folder.rows())
    assert shown.split("\n")[-3].split() == [
        "entry", "seeds", "exact", "match", "sd", "95%", "interval", "p",
    ]  # fmt: skip
    assert shown.split("\n")[-1].split()[:4] == ["full", "2", "62.50", "17.68"]
    assert "Student's t over seeds" in shown
    assert "Holm" in shown
    assert "do not cover the variation between trainings" not in shown


def test_lines_without_statistics_of_segments_are_named(tiny: Made, opened: Opened) -> None:
    wrong = {"full.seed-1": 2, "full.seed-2": 4, "band.seed-1": 1, "band.seed-2": 2}
    folder = filled(opened, tiny("full", "band", seeds=2), wrong)
    assert "Without statistics" not in caption(folder.study(), build(folder), folder.rows())
    (folder.path / "results" / "band.seed-1.safetensors").unlink()
    shown = caption(folder.study(), build(folder), folder.rows())
    assert "Without statistics of segments, these intervals are over seeds only: band." in shown


def test_one_seed_says_what_it_does_not_cover(tiny: Made, opened: Opened) -> None:
    folder = filled(opened, tiny("full", "band"), {"full.seed-1": 2, "band.seed-1": 1})
    shown = caption(folder.study(), build(folder), folder.rows())
    assert "do not cover the variation between trainings" in shown


def test_the_caption_says_what_all_have_in_common(tiny: Made, opened: Opened) -> None:
    settings = {"training": {"max_updates": 1_000_000, "max_minutes": 2.5}, "decoding": {"method": "beam", "beam": 3}}
    folder, plan, data = opened(tiny("full", "band", "linear", settings=settings, match="parameters"))
    for trial, precision in zip(plan.due([]), ("bfloat16", "float32", "bfloat16"), strict=True):
        folder.add(trial, data[None])
        training = row(1.0)["training"] | {"precision": precision}
        folder.keep(
            trial.name, None, **row(1.0, side="valid", scores={"valid": row(1.0)["scores"]["test"]}, training=training)
        )
    shown = caption(folder.study(), build(folder), folder.rows())
    for words in (
        "Preset tiny", "until 1,000,000 updates or 2.5 minutes", "beam 3", "nrefs:1|tok:13a", "validation side",
        "1 thread", "bfloat16 (full, linear), float32 (band)", "parameters within 1%",
    ):  # fmt: skip
        assert words in shown


def test_a_search_is_described_with_all_its_trials(tiny: Made, opened: Opened) -> None:
    search = {"settings": {"peak_rate": [1e-3, 3e-3]}, "share": 0.5}
    folder, plan, data = opened(tiny("full", "band", search=search))
    for number, trial in enumerate(plan.due([])):
        folder.add(trial, data[None])
        if number == 3:
            folder.fail(trial.name, "why")
        else:
            folder.keep(trial.name, None, **row(number))
    for trial in plan.due(folder.rows())[2:3]:
        folder.add(trial, data[None])
        folder.keep(trial.name, None, **row(50.0))
    study, table, rows = folder.study(), build(folder), folder.rows()
    shown = text(study, table, rows)
    assert "training.peak_rate: the best of 2 trials per entry with 50% of the budget" in shown
    assert "grid search, 4 trials, 1 failed" in shown
    assert "peak_rate=0.003" in shown
    assert table.records()[0]["point"] == "peak_rate=0.003"


def test_what_makes_the_scores_doubtful_is_said_once(tiny: Made, opened: Opened) -> None:
    folder = one(tiny, opened, doubt="BLEU 1.00 but chrF 60")
    assert text(folder.study(), build(folder), folder.rows()).count("BLEU 1.00 but chrF 60") == 1


def test_shared_timings_are_marked(tiny: Made, opened: Opened) -> None:
    folder = one(tiny, opened, shared=True)
    shown = text(folder.study(), build(folder), folder.rows())
    assert "45,679*" in shown
    assert "1,234,567*" not in shown
    assert "* Timed while other trials ran" in shown


@pytest.mark.parametrize("written", [text, markdown, latex])
def test_a_folder_without_rows_has_an_empty_table(written: object, tiny: Made, opened: Opened) -> None:
    folder, _, _ = opened(tiny("full"))
    shown = written(folder.study(), build(folder), folder.rows())  # type: ignore[operator]
    assert "entry" in shown
