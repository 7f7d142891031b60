from typing import Any

import pytest

from mtkit.evaluation.ranks import rank
from mtkit.experiments import outputs
from mtkit.experiments.outputs import _point, _ranks, write_outputs
from mtkit.experiments.table import build
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row

SCORES = {"full": (50.0, 60.0), "band": (70.0, 40.0), "linear": (30.0, 20.0)}


def filled(tiny: Made, opened: Opened, *entries: str, **changed: Any) -> Any:
    folder, plan, data = opened(tiny(*entries, seeds=2))
    for trial in plan.due([]):
        folder.add(trial, data[None])
        folder.keep(trial.name, None, **row(SCORES[trial.entry][trial.seed - 1], **changed))
    return folder


def test_everything_is_written(tiny: Made, opened: Opened) -> None:
    pytest.importorskip("matplotlib")
    folder = filled(tiny, opened, "full", "band", "linear")
    _, written = write_outputs(folder)
    assert all(path.is_file() for path in written)
    names = {path.name for path in written}
    assert names >= {"results.jsonl", "compare.md", "compare.csv", "compare.tex", "compare.png", "compare-ranks.png"}
    assert {path.name for path in folder.path.glob("compare*")} | {"results.jsonl"} == names


def test_pictures_show_the_numbers_of_the_table(tiny: Made, opened: Opened) -> None:
    table = build(filled(tiny, opened, "full", "band"))
    full = next(line for line in table.lines if line.entry == "full")
    point = _point(full, table)
    assert (point.name, point.values, point.family) == ("full", (50.0, 60.0), "scoring")
    assert point.costs["state"] == 20480
    assert point.costs["decoding-speed"] == 1234.5
    assert point.curves[0][0]["flops"] == 1000 * 7.14e6


def test_shared_timings_are_not_drawn(tiny: Made, opened: Opened) -> None:
    table = build(filled(tiny, opened, "full", shared=True))
    point = _point(table.lines[0], table)
    assert point.costs["decoding-speed"] is None
    assert point.curves[0][0]["seconds"] is None
    assert point.costs["memory"] == 812 * 2**20


def test_failed_trials_are_counted_by_row(tiny: Made, opened: Opened) -> None:
    folder = filled(tiny, opened, "full")
    folder.fail("full.seed-2", "the seed 2 and the seed 1 differ")
    table = build(folder)
    assert _point(table.lines[0], table).failed == 1


def test_unknown_flops_have_no_curve(tiny: Made, opened: Opened) -> None:
    table = build(filled(tiny, opened, "full", flops_per_token=None))
    assert _point(table.lines[0], table).curves[0][0]["flops"] is None


def test_ranks_are_over_seeds_and_tasks_that_all_have(tiny: Made, opened: Opened) -> None:
    folder = filled(tiny, opened, "full", "band", "linear")
    table = build(folder)
    ranks = _ranks([table.lines], table, "BLEU", "full")
    assert ranks is not None
    assert dict(zip(ranks.names, ranks.means, strict=True)) == {"full": 1.5, "band": 1.5, "linear": 3.0}
    assert ranks.critical == rank([[SCORES[name][seed] for name in ranks.names] for seed in (0, 1)]).critical
    folder.fail("linear.seed-2", "why")
    table = build(folder)
    ranks = _ranks([table.lines], table, "BLEU", "full")
    assert ranks is not None
    assert set(ranks.names) == {"full", "band"}
    assert (ranks.first, ranks.unranked) == ("full", ["linear"])


def test_a_first_entry_without_trials_is_not_another_entry(
    tiny: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    folder, plan, data = opened(tiny("full", "band", seeds=1))
    for trial in plan.due([]):
        if trial.entry == "band":
            folder.add(trial, data[None])
            folder.keep(trial.name, None, **row(40.0))
    drawn: list[Any] = []
    monkeypatch.setattr(outputs, "draw_all", lambda points, *_, **__: drawn.extend(points) or [])
    write_outputs(folder)
    assert [(point.name, point.values) for point in drawn] == [("full", ()), ("band", (40.0,))]
