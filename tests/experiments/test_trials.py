from typing import Any

import pytest

from mtkit.experiments.rows import chosen_point, final_rows, validation_score
from mtkit.experiments.trials import Plan, Trial, slug
from tests.experiments.conftest import Made
from tests.experiments.results import row

RATES = {"training.peak_rate": [1e-3, 3e-3]}


def result(trial: Trial, valid: float, **changed: Any) -> dict[str, Any]:
    about = {"trial": trial.name, "entry": trial.entry, "task": trial.task, "seed": trial.seed, "stage": trial.stage}
    measured = row(50.0, valid={"bleu": valid, "best_by": "bleu"}, **changed)
    return {**about, "point": dict(trial.point), **measured}


def names(trials: list[Trial]) -> list[str]:
    return [trial.name for trial in trials]


def test_every_entry_has_every_seed_on_every_task(tiny: Made) -> None:
    study = tiny("full", "band[window_radius=3]", seeds=[1, 5])
    assert names(Plan(study, {None: {}}, {}).due([])) == [
        "full.seed-1", "full.seed-5", "band-window_radius-3.seed-1", "band-window_radius-3.seed-5",
    ]  # fmt: skip
    data = {"copy": {"data": {"folder": "there"}}, "sort": {}}
    due = Plan(study, data, {("copy", "full"): 77}).due([])
    assert names(due)[:2] == ["copy.full.seed-1", "copy.full.seed-5"]
    assert len(due) == 8
    assert due[0].recipe["seed"] == 1
    assert due[0].recipe["data"]["folder"] == "there"
    assert due[0].recipe["model"]["feed_forward"] == 77
    assert due[2].recipe["model"]["feed_forward"] == 32


def test_a_search_with_the_whole_budget_is_a_seed_of_its_best_point(tiny: Made) -> None:
    plan = Plan(tiny("full", seeds=2, search={"settings": RATES}), {None: {}}, {})
    first = plan.due([])
    assert names(first) == ["full.peak_rate-0.001.seed-1", "full.peak_rate-0.003.seed-1"]
    assert [trial.recipe["training"]["peak_rate"] for trial in first] == [1e-3, 3e-3]
    rows = [result(first[0], 10.0), result(first[1], 20.0)]
    assert names(plan.due(rows[:1])) == names(first)
    due = plan.due(rows)
    assert names(due) == [*names(first), "full.peak_rate-0.003.seed-2"]
    rows.append(result(due[-1], 5.0))
    assert [each["trial"] for each in final_rows(rows, 1)] == names(due)[1:]


def test_a_search_with_a_share_of_the_budget_is_not_in_the_table(tiny: Made) -> None:
    study = tiny("full", "band", seeds=2, search={"settings": RATES, "share": 0.5})
    plan = Plan(study, {None: {}}, {})
    search = plan.due([])
    assert names(search)[:2] == ["full.peak_rate-0.001.seed-1.search", "full.peak_rate-0.003.seed-1.search"]
    assert {trial.recipe["training"]["max_updates"] for trial in search} == {1}
    rows = [result(search[0], 30.0), result(search[1], 20.0)]
    due = plan.due(rows)
    assert names(due)[2:4] == ["full.peak_rate-0.001.seed-1", "full.peak_rate-0.001.seed-2"]
    assert due[2].recipe["training"]["max_updates"] == 2
    assert len(due) == 6  # band is still searched
    rows += [result(trial, 1.0) for trial in due[2:4]]
    assert [each["trial"] for each in final_rows(rows, 1)] == names(due)[2:4]


def test_failed_points_are_not_chosen_and_an_entry_may_fail(tiny: Made) -> None:
    plan = Plan(tiny("full", search={"settings": RATES, "share": 0.5}), {None: {}}, {})
    one, two = plan.due([])
    lost = {key: value for key, value in result(two, 0).items() if key not in ("scores", "valid")} | {"failed": "why"}
    assert names(plan.due([result(one, 1.0), lost]))[2:] == ["full.peak_rate-0.001.seed-1"]
    failed = [lost | {"trial": each.name, "point": dict(each.point)} for each in (one, two)]
    assert names(plan.due(failed)) == names([one, two])


def test_more_points_may_change_the_choice(tiny: Made) -> None:
    old = Plan(tiny("full", seeds=2, search={"settings": RATES}), {None: {}}, {})
    rows = [result(trial, valid) for trial, valid in zip(old.due([]), (10.0, 20.0), strict=True)]
    rows.append(result(old.due(rows)[-1], 15.0))
    more = {"training.peak_rate": [1e-3, 3e-3, 9e-3]}
    new = Plan(tiny("full", seeds=2, search={"settings": more}), {None: {}}, {})
    rows.append(result(new.due(rows)[2], 40.0))
    assert names(new.due(rows))[-1] == "full.peak_rate-0.009.seed-2"
    assert [each["trial"] for each in final_rows(rows, 1)] == ["full.peak_rate-0.009.seed-1"]


@pytest.mark.parametrize(("best_by", "score", "value"), [("bleu", 3.0, 3.0), ("loss", 3.0, -3.0), ("ter", 3.0, -3.0)])
def test_a_lower_loss_is_better(best_by: str, score: float, value: float) -> None:
    valid = {"best_by": best_by, "bleu": 3.0, "nll": 3.0, best_by: score}
    assert validation_score({"valid": valid}) == value


def test_the_choice_by_loss_is_the_lowest(tiny: Made) -> None:
    plan = Plan(tiny("full", search={"settings": RATES}), {None: {}}, {})
    rows = [
        result(trial, 0.0) | {"valid": {"best_by": "loss", "nll": loss, "bleu": bleu}}
        for trial, loss, bleu in zip(plan.due([]), (2.0, 1.0), (50.0, 1.0), strict=True)
    ]
    assert chosen_point(rows, "final", 1) == {"training.peak_rate": 3e-3}


def test_of_equal_scores_the_lower_loss_is_chosen(tiny: Made) -> None:
    plan = Plan(tiny("full", search={"settings": RATES}), {None: {}}, {})
    rows = [
        result(trial, 0.0) | {"valid": {"best_by": "exact", "exact": 0.0, "nll": loss}}
        for trial, loss in zip(plan.due([]), (2.0, 1.0), strict=True)
    ]
    assert chosen_point(rows, "final", 1) == {"training.peak_rate": 3e-3}


def test_points_of_other_signs_have_other_names(tiny: Made) -> None:
    search = {"settings": {"attention.options.gate_bias": [1, -1]}}
    assert len(set(names(Plan(tiny("forgetting", search=search), {None: {}}, {}).due([])))) == 2


def test_a_point_written_in_another_way_is_the_trial_that_has_begun(tiny: Made) -> None:
    first = Plan(tiny("full", search={"settings": {"dropout": [0, 0.1], "peak_rate": [1e-3]}}), {None: {}}, {})
    begun = [{"entry": each.entry, "task": None, "stage": each.stage, "point": each.point} for each in first.due([])]
    settings = {"peak_rate": [1e-3], "dropout": [0.0, 0.1, 0.2]}
    second = Plan(tiny("full", search={"settings": settings}), {None: {}}, {})
    assert names(second.due([], begun))[:2] == names(first.due([]))
    assert len(second.due([], begun)) == 3


def test_long_names_leave_room_for_temporary_files(tiny: Made) -> None:
    search = {"settings": {"peak_rate": [0.001], "dropout": [0.1], "label_smoothing": [0.123456789]}, "share": 0.5}
    study = tiny({"name": "n" * 150, "attention": "full"}, search=search)
    task = "mqar-" + "t" * 80
    found = Plan(study, {task: {}}, {}).due([])
    assert all(len(trial.name) <= 200 for trial in found)
    assert len(set(names(found))) == len(found)


def test_names_are_file_names() -> None:
    assert slug("band[window_radius=16]") == "band-window_radius-16"
    assert slug("linear@encoder@cross") == "linear-encoder-cross"
    assert slug("中文") != slug("日本")
    assert len(slug("a=1 " * 100)) <= 100
    assert "/" not in slug("../../etc/passwd")
    assert not slug("../x").startswith(".")
