"""Trials of a search that are stopped early, compared with the rules written out."""

import json
import statistics as stats
from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import MtkitError
from mtkit.experiments import compare as comparing
from mtkit.experiments.children import Children
from mtkit.experiments.compare import compare
from mtkit.experiments.folder import Folder, read_rows
from mtkit.experiments.join import reproduce
from mtkit.experiments.pruning import Pruning, is_worse
from mtkit.experiments.report import caption
from mtkit.experiments.rows import chosen_point, curve, final_rows
from mtkit.experiments.table import build
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row
from tests.experiments.test_compare import Recorded

pytest.importorskip("optuna")

Points = list[dict[str, Any]]


def points(*scores: float, by: str = "bleu") -> Points:
    return [
        {
            "update": 10 * place,
            "tokens": 100 * place,
            "seconds": 1.0 * place,
            "bleu": score,
            "nll": score,
            "best_by": by,
        }
        for place, score in enumerate(scores, 1)
    ]


def test_the_median_is_of_complete_trials_at_the_same_validation() -> None:
    complete = [points(1, 30), points(2, 20), points(3, 10), points(4, 40), points(5, 50, 60)]
    assert stats.median((30, 20, 10, 40, 50)) == 30
    assert is_worse("median", points(1, 29), complete)
    assert not is_worse("median", points(1, 31), complete)
    assert not is_worse("median", points(31, 1), complete)  # its best is above
    assert is_worse("median", points(2), complete)
    assert not is_worse("median", points(3), complete)
    assert not is_worse("median", points(0), complete[:4], complete)  # fewer than five are complete
    assert is_worse("median", points(1, 1, 59), complete)  # one alone has three validations
    assert not is_worse("median", points(1, 1, 1, 1), complete)  # none has four


def test_a_lower_loss_is_better() -> None:
    complete = [points(loss, by="loss") for loss in (1, 2, 3, 4, 5)]
    assert is_worse("median", points(3.5, by="loss"), complete)
    assert not is_worse("median", points(2.5, by="loss"), complete)


def test_the_loss_orders_equal_scores() -> None:
    good, bad = ([{"update": 10, "bleu": 0.0, "nll": loss, "best_by": "bleu"}] for loss in (5.0, 6.0))
    assert is_worse("halving", bad, [], [good])
    assert not is_worse("halving", good, [], [bad])
    assert is_worse("median", bad, [good] * 3 + [bad] * 2)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_halving_keeps_the_better_half_at_powers_of_two(step: int) -> None:
    others = [points(*[value] * 4) for value in (1, 2, 3, 4, 5)]
    for value in (0.5, 1.5, 2.5, 3.5, 4.5, 5.5):
        better = sum(value < other for other in (1, 2, 3, 4, 5))
        stops = better >= 3  # of six, three go on
        assert is_worse("halving", points(*[value] * step), [], others) == (stops and step != 3)
    assert not is_worse("halving", points(0.0), [])  # the first goes on
    assert is_worse("halving", points(0.0), [points(1.0)])


class Live(Recorded):
    """A runner whose trials write one validation per look, and end after four or when they are stopped."""

    scores: dict[float, float]

    def ended(self) -> list[tuple[str, str]]:
        over = []
        for name in list(self._running):
            path = self.folder.run(name) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            score = self.scores[self.folder.trial(name)["point"]["training.peak_rate"]]
            with path.open("a") as file:
                lines = len(path.read_text().splitlines())
                about = {"kind": "validation", "update": lines + 1, "tokens": 9, "training_seconds": 1.0}
                file.write(json.dumps({**about, "nll": 1.0, "bleu": score, "best_by": "bleu"}) + "\n")
            if name in self.stopped or lines == 3:
                self._running.remove(name)
                over.append((name, "was stopped by SIGTERM"))
                if name not in self.stopped:
                    found = curve(json.loads(line) for line in path.read_text().splitlines())
                    self.folder.keep(name, None, **row(score, valid=found[-1], curve=found))
        return over


RATES = [0.001 * number for number in range(1, 9)]
SCORES = dict(zip(RATES, (10.0, 20.0, 30.0, 40.0, 50.0, 5.0, 60.0, 29.0), strict=True))


def pruned_study(tiny: Made, share: float, pruner: str = "median", seeds: int = 2) -> Any:
    settings = {"settings": {"peak_rate": RATES}, "share": share, "pruner": pruner}
    return tiny("full", seeds=seeds, search=settings)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_pruned_trials_are_kept_counted_and_not_chosen(
    tiny: Made, opened: Opened, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "LOOK_SECONDS", 0.0)
    study = pruned_study(tiny, share)
    folder, plan, data = opened(study)
    runner = Live(folder)
    runner.scores = SCORES
    done: list[str] = []
    compare(folder, plan, data, runner, show=str, done=done.append, pruning=Pruning(study, folder))
    rows = folder.rows()
    pruned = [each for each in rows if each.get("pruned")]
    # the median of the five complete trials is 30; 60 is above it, and then the median of six is 35
    assert [each["point"]["training.peak_rate"] for each in pruned] == [RATES[5], RATES[7]]
    assert [each["valid"]["bleu"] for each in pruned] == [5.0, 29.0]
    assert all("scores" not in each and len(each["curve"]) < 4 for each in pruned)
    assert len(done) == len(rows) == (10 if share < 1 else 9)
    stage = "search" if share < 1 else "final"
    assert chosen_point(rows, stage, 1) == {"training.peak_rate": RATES[6]}
    assert [each["seed"] for each in final_rows(rows, 1)] == [1, 2]
    folder.write_rows()
    table = build(folder)
    assert [line.rows[0]["point"]["training.peak_rate"] for line in table.lines] == [RATES[6]]
    shown = caption(folder.study(), table, rows)
    assert "the best of 8 trials per entry" in shown
    assert "(grid search, 8 trials, 2 stopped early by the median pruner)" in shown
    lines = read_rows(folder.path / "results.jsonl")
    number = next(place for place, each in enumerate(lines, 1) if each.get("pruned"))
    with pytest.raises(MtkitError, match=f"row {number} of .* the pruner stopped the trial early"):
        reproduce(folder.path / "results.jsonl", number, Folder(Path("none")), device="cpu", threads=1, show=str)


def test_a_study_killed_while_a_trial_is_stopped_resumes(
    tiny: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed comparison has stopped the trial, and has not written its row."""
    monkeypatch.setattr(comparing, "LOOK_SECONDS", 0.0)
    study = pruned_study(tiny, 0.5, seeds=1)
    folder, plan, data = opened(study)
    runner = Live(folder)
    runner.scores = SCORES
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "prune", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compare(folder, plan, data, runner, show=str, done=str, pruning=Pruning(study, folder))
    assert len(folder.rows()) == 5
    runner = Live(folder)
    runner.scores = SCORES
    compare(folder, plan, data, runner, show=str, done=str, pruning=Pruning(study, folder))
    rows = folder.rows()
    assert sum(each["stage"] == "search" for each in rows) == 8
    assert [each["point"]["training.peak_rate"] for each in rows if each.get("pruned")] == [RATES[5], RATES[7]]


def test_only_the_search_is_pruned_and_only_with_a_pruner(tiny: Made, opened: Opened) -> None:
    study = pruned_study(tiny, 1.0, "none")
    folder, plan, _ = opened(study)
    assert not Pruning(study, folder).active
    study = pruned_study(tiny, 1.0)
    trial = plan.trial(study.entries[0], None, 2, {"training.peak_rate": RATES[0]})
    assert not Pruning(study, folder).stops(trial)


def test_a_real_trial_is_stopped_and_saves(tiny: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "LOOK_SECONDS", 0.02)
    training = {"max_updates": 100_000, "validate_every": 3}
    search = {"settings": {"peak_rate": RATES[:6]}, "pruner": "median"}
    study = tiny("full", settings={"training": training}, search=search)
    folder, plan, data = opened(study)
    for trial in plan.due([])[:5]:
        folder.add(trial, data[None])
        folder.keep(trial.name, None, **row(50.0, curve=points(99.0)))
    with Children(folder, "cpu", 1) as children:
        pruning = Pruning(study, folder)
        assert compare(folder, plan, data, children, show=str, done=str, pruning=pruning) is None
    stopped = folder.rows()[-1]
    assert stopped["pruned"]
    assert stopped["curve"][0]["update"] == 3
    assert list((folder.run(stopped["trial"]) / "checkpoints").glob("update-*"))
