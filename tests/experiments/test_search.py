"""Random and Bayesian search: which points are tried."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from mtkit.errors import MtkitError
from mtkit.experiments.compare import compare
from mtkit.experiments.rows import chosen_point
from mtkit.experiments.search import points, size_of
from mtkit.experiments.study import SearchSettings
from mtkit.experiments.trials import Plan
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row
from tests.experiments.test_compare import Recorded

pytest.importorskip("optuna")

RATE = {"training.peak_rate": {"low": 1e-5, "high": 1e-1}}
Point = dict[str, Any]


def search(settings: dict[str, Any], *, method: str = "bayesian", trials: int = 8, **changed: Any) -> SearchSettings:
    return SearchSettings.model_validate({"settings": settings, "method": method, "trials": trials, **changed})


def measured(point: Point, score: float) -> Point:
    return {"point": point, **row(0.0, valid={"bleu": score, "best_by": "bleu"})}


def tried(chosen: SearchSettings, score: Callable[[Point], float]) -> list[Point]:
    """The points of a search whose trials end one after the other, in the order of their trials."""
    rows: list[Point] = []
    while True:
        new = [point for point in points(chosen, rows, []) if point not in [row["point"] for row in rows]]
        if not new:
            return [row["point"] for row in rows]
        assert len(new) == 1
        rows.append(measured(new[0], score(new[0])))


def by_rate(point: Point) -> float:
    """A quadratic in the logarithm of the rate, whose optimum is 3e-3."""
    return -((math.log10(point["training.peak_rate"]) - math.log10(3e-3)) ** 2)


@pytest.mark.parametrize("method", ["random", "bayesian"])
def test_the_same_trials_give_the_same_next_point(method: str) -> None:
    chosen = search(RATE, method=method)
    rows = [measured(point, by_rate(point)) for point in tried(search(RATE, method=method, trials=7), by_rate)]
    assert points(chosen, rows, [])[-1] == points(chosen, rows[::-1], rows)[-1]
    better = [*rows[:-1], measured(rows[-1]["point"], 99.0)]
    assert (points(chosen, better, [])[-1] == points(chosen, rows, [])[-1]) == (method == "random")


def test_the_loss_orders_equal_scores() -> None:
    rows = [measured(point, 0.0) for point in tried(search(RATE, trials=7), by_rate)]
    nexts = [
        points(
            search(RATE), [each | {"valid": {"bleu": 0.0, "nll": nll, "best_by": "bleu"}} for each, nll in pairs], []
        )
        for pairs in (zip(rows, range(7), strict=True), zip(rows, range(7, 0, -1), strict=True))
    ]
    assert nexts[0][-1] != nexts[1][-1]


def test_points_are_in_their_ranges() -> None:
    settings = {
        **RATE,
        "model.dropout": {"low": 0, "high": 1, "log": False},
        "model.feed_forward": {"low": 16, "high": 64},
        "training.optimizer": ["adamw", "muon"],
        "training.betas": [[0.9, 0.98], [0.9, 0.999]],
    }
    found = tried(search(settings, method="random", trials=60), lambda point: 0.0)
    rates = [point["training.peak_rate"] for point in found]
    assert all(1e-5 <= rate <= 1e-1 for rate in rates)
    assert 15 < sum(rate < 1e-3 for rate in rates) < 45  # half of the range's logarithms
    dropouts = [point["model.dropout"] for point in found]
    assert all(0 <= dropout <= 1 for dropout in dropouts)
    assert 15 < sum(dropout < 0.5 for dropout in dropouts) < 45
    assert any(0 < dropout < 1 for dropout in dropouts)
    assert {type(point["model.feed_forward"]) for point in found} == {int}
    assert {point["training.optimizer"] for point in found} == {"adamw", "muon"}
    assert {tuple(point["training.betas"]) for point in found} == {(0.9, 0.98), (0.9, 0.999)}


def test_whole_numbers_are_drawn_between_ends_written_as_1e2() -> None:
    settings = {
        "training.warmup_updates": {"low": 1e2, "high": 1e3},
        "attention.options.window_radius": {"low": 1, "high": 4},
        "attention.options.dropout": {"low": 0.0, "high": 1.0, "log": False},
    }
    (point,) = points(search(settings, method="random"), [], [])
    assert [type(value) for value in point.values()] == [int, int, float]


def test_a_range_narrower_than_its_digits_is_kept() -> None:
    narrow = {"training.peak_rate": {"low": 0.00123456781, "high": 0.00123456789}}
    (point,) = points(search(narrow, method="random", trials=1), [], [])
    assert 0.00123456781 <= point["training.peak_rate"] <= 0.00123456789


@pytest.mark.parametrize("method", ["random", "bayesian"])
def test_points_of_lists_do_not_repeat_and_end_with_all_combinations(method: str) -> None:
    lists = {"training.optimizer": ["adamw", "muon"], "training.betas": [[0.9, 0.98], [0.9, 0.999], [0.9, 0.9]]}
    chosen = search(lists, method=method, trials=50)
    assert size_of(chosen) == 6
    found = tried(chosen, lambda point: 1.0)
    assert len({str(point) for point in found}) == len(found) == 6


def test_a_range_of_few_whole_numbers_ends_with_all_of_them() -> None:
    chosen = search({"training.optimizer": ["adamw", "muon"], "model.heads": {"low": 1, "high": 3}}, trials=50)
    found = tried(chosen, lambda point: 1.0)
    assert sorted((point["training.optimizer"], point["model.heads"]) for point in found) == [
        (optimizer, heads) for optimizer in ("adamw", "muon") for heads in (1, 2, 3)
    ]


def test_a_search_does_not_list_all_combinations(tiny: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"training.warmup_updates": list(range(30)), "training.clip_norm": list(range(1, 31))}
    study = tiny("full", search={"settings": lists, "method": "random", "trials": 5})
    monkeypatch.delattr(SearchSettings, "grid")
    assert len(Plan(study, {None: {}}, {}).due([])) == 1


def test_failed_and_pruned_trials_count_and_are_not_chosen() -> None:
    found = tried(search(RATE, trials=6), by_rate)
    rows = [measured(point, 0.0) for point in found]
    about = {"stage": "final", "seed": 1}
    rows[0] = {"point": found[0], "failed": "out of memory"}
    rows[1] = {"point": found[1], "pruned": True, "valid": {"bleu": 99.0}, "curve": [{"bleu": 99.0}]}
    assert points(search(RATE, trials=6), rows, []) == points(search(RATE, trials=6), [], rows)
    assert len(points(search(RATE, trials=7), rows, [])) == 7
    assert chosen_point([about | row for row in rows], "final", 1) not in found[:2]


def test_trials_without_a_validation_score_do_not_end_the_search() -> None:
    (first,) = points(search(RATE), [], [])
    assert len(points(search(RATE), [{"point": first, **row(0.0, valid={})}], [])) == 2


@pytest.mark.parametrize("method", ["random", "bayesian"])
def test_running_trials_have_different_points(method: str) -> None:
    chosen = search(RATE, method=method)
    rows = [measured(point, by_rate(point)) for point in tried(search(RATE, method=method, trials=5), by_rate)]
    begun: list[Point] = []
    for _ in range(3):
        begun.append({"point": points(chosen, rows, begun)[-1]})
    rates = [each["point"]["training.peak_rate"] for each in (*rows, *begun)]
    assert len(set(rates)) == 8
    assert len(points(chosen, rows, begun)) == 8  # none is named twice, and there is no ninth


def test_more_trials_go_on_with_the_search() -> None:
    few, many = tried(search(RATE, trials=6), by_rate), tried(search(RATE, trials=9), by_rate)
    assert many[:6] == few


def test_bayesian_search_is_nearer_to_the_optimum_than_random_search() -> None:
    """Over many quadratics of two settings: their optima stand for seeds."""
    settings = {**RATE, "model.dropout": {"low": 0.0, "high": 0.5, "log": False}}
    losses: dict[str, list[float]] = {"random": [], "bayesian": []}
    for number in range(12):
        optimum = (-4.5 + 3 * number / 11, 0.05 + 0.4 * (number * 5 % 12) / 11)

        def score(point: Point, optimum: tuple[float, float] = optimum) -> float:
            rate, dropout = math.log10(point["training.peak_rate"]), point["model.dropout"]
            return -((rate - optimum[0]) ** 2) - ((dropout - optimum[1]) * 8) ** 2

        for method, found in losses.items():
            found.append(-max(map(score, tried(search(settings, method=method, trials=20), score))))
    assert sum(losses["bayesian"]) < 0.6 * sum(losses["random"])


def test_without_optuna_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MtkitError, match=r"bayesian search needs Optuna; install it: pip install 'mtkit\[search\]'"):
        points(search(RATE), [], [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.d_model": {"low": 32.5, "high": 64}}, "d_model"),
        ({"training.peak_rate": {"low": -1, "high": 1, "log": False}}, "peak_rate"),
        ({"training.optimizer": ["adamw", "sgd"]}, "optimizer"),
    ],
)
def test_values_are_checked_before_anything_trains(tiny: Made, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MtkitError, match=message):
        tiny("full", search={"settings": settings, "method": "random", "trials": 3})


class Scored(Recorded):
    """A runner whose trials have the validation score of their points."""

    def ended(self) -> list[tuple[str, str]]:
        names, self._running = self._running, []
        for name in names:
            score = by_rate(self.folder.trial(name)["point"])
            self.folder.keep(name, None, **row(50.0, valid={"bleu": score, "best_by": "bleu"}))
        return [(name, "ended") for name in names]


class KilledError(Exception):
    """Stands for SIGKILL of the comparison."""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_study_tries_as_many_points_of_every_entry(
    tiny: Made, opened: Opened, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.experiments.compare.LOOK_SECONDS", 0.0)
    study = tiny("full", "band", seeds=2, search={"settings": RATE, "method": "bayesian", "trials": 6, "share": 0.5})
    folder, plan, data = opened(study)
    counted: list[str] = []

    def killing(name: str) -> None:
        counted.append(name)
        if len(counted) == 4:
            raise KilledError

    with pytest.raises(KilledError):
        compare(folder, plan, data, Scored(folder, slots=jobs), show=str, done=killing)
    begun = {trial["trial"] for trial in folder.begun()}
    assert len(folder.rows()) in (4, 5)
    runner = Scored(folder, slots=jobs)
    compare(folder, plan, data, runner, show=str, done=str)
    rows = folder.rows()
    for entry in ("full", "band"):
        searched = [each for each in rows if each["entry"] == entry and each["stage"] == "search"]
        assert len({str(each["point"]) for each in searched}) == len(searched) == 6
        finals = [each for each in rows if each["entry"] == entry and each["stage"] == "final"]
        assert [each["point"] for each in finals] == [max((each["point"] for each in searched), key=by_rate)] * 2
    assert begun <= {each["trial"] for each in rows}  # what was begun is not given up for another point
    assert len(runner.started) == len(set(runner.started))


def test_a_folder_keeps_its_search_and_takes_more_trials(tiny: Made, opened: Opened) -> None:
    def study(**changed: Any) -> Any:
        return tiny("full", search={"settings": RATE, "method": "random", "trials": 3, **changed})

    folder, plan, data = opened(study())
    compare(folder, plan, data, Scored(folder), show=str, done=str)
    folder, plan, data = opened(study(trials=5))
    compare(folder, plan, data, runner := Scored(folder), show=str, done=str)
    assert len(runner.started) == 2
    for changed, message in (
        ({"trials": 3}, r"search\.trials: 5 -> 3"),
        ({"method": "bayesian", "trials": 5}, r"search\.method: random -> bayesian"),
        ({"settings": {"peak_rate": [1e-3]}, "trials": 5}, r"search\.settings\.training\.peak_rate"),
    ):
        with pytest.raises(MtkitError, match=message):
            folder.open(study(**changed))
    with pytest.raises(MtkitError, match="only one of the two has a search"):
        folder.open(tiny("full"))


def test_a_grid_takes_more_values_and_loses_none(tiny: Made, opened: Opened) -> None:
    def study(*rates: float) -> Any:
        return tiny("full", search={"settings": {"peak_rate": list(rates)}})

    folder, _, _ = opened(study(1e-3))
    folder.open(study(3e-3, 1e-3))
    with pytest.raises(MtkitError, match="peak_rate"):
        folder.open(study(1e-3))
