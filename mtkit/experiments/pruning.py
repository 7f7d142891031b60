"""Early stopping of a search's trials by Optuna's pruners: bad ones make room for others.

A trial is compared with the other trials in the search for its entry on its task, at the same number of validations.
Trials with the full budget of a chosen point's other seeds are never stopped.

Sources: Golovin et al., 2017, "Google Vizier", section 3.2.1 (median); Li et al., 2020, "A system for massively
parallel hyperparameter tuning" (asynchronous successive halving).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mtkit.experiments.folder import Folder
from mtkit.experiments.rows import belongs_to, curve, search_score
from mtkit.experiments.search import require_optuna
from mtkit.experiments.study import Study
from mtkit.experiments.trials import Trial
from mtkit.storage.files import inside
from mtkit.training.metrics import read_metrics

Curve = Sequence[Mapping[str, Any]]
"""Learning curve: a point per validation."""


class Pruning:
    """Decides which running trials of a study's search to stop; none without a pruner."""

    def __init__(self, study: Study, folder: Folder) -> None:
        """Raises: MtkitError if the study has a pruner and Optuna is not installed."""
        self._search, self._seed = study.settings.search, study.seeds[0]
        self._folder = folder
        self._seen: dict[str, int] = {}
        """Number of validations of each running trial at the last look."""
        self.active = self._search is not None and self._search.pruner != "none"
        if self.active:
            require_optuna(f"the pruner {self._search.pruner}" if self._search else "")

    def stops(self, trial: Trial) -> bool:
        """Return whether to stop a trial that has a validation which the last call did not see."""
        if not self.active or not self._is_searched(trial.seed, trial.stage):
            return False
        mine = self.curve(trial.name)
        if len(mine) <= self._seen.get(trial.name, 0):
            return False
        self._seen[trial.name] = len(mine)
        rows = {row["trial"]: row for row in self._folder.rows()}
        complete: list[Curve] = []
        others: list[Curve] = []
        for begun in self._folder.begun():
            name = begun["trial"]
            is_other = name != trial.name and belongs_to(begun, trial.entry, trial.task)
            if is_other and self._is_searched(begun["seed"], begun["stage"]):
                row = rows.get(name, {})
                points = row.get("curve") or self.curve(name)
                (complete if "scores" in row else others).append(points)
        assert self._search is not None
        return is_worse(self._search.pruner, mine, complete, others)

    def curve(self, name: str) -> list[dict[str, Any]]:
        """Return the validations of a trial so far."""
        return curve(read_metrics(inside(self._folder.run(name), "metrics.jsonl")))

    def _is_searched(self, seed: int, stage: str) -> bool:
        assert self._search is not None
        return seed == self._seed and stage == ("search" if self._search.share < 1 else "final")


def is_worse(pruner: str, mine: Curve, complete: Sequence[Curve], others: Sequence[Curve] = ()) -> bool:
    """Return whether a pruner stops a trial after the last validation of its curve.

    `complete` are the curves of trials that were trained to their ends, `others` of trials that were stopped, failed or
    still run. The median pruner stops a trial whose best score is below the median of the complete trials' scores at
    the same validation, if five are complete. Successive halving compares at validations 1, 2, 4, 8, ...: a trial goes
    on if its score is in the better half of all that have got there, or the best of fewer than four.
    """
    import optuna

    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    study = optuna.create_study(
        direction="maximize", pruner=halving if pruner == "halving" else optuna.pruners.MedianPruner()
    )
    for points, state in (
        *((points, optuna.trial.TrialState.COMPLETE) for points in complete if points),
        *((points, optuna.trial.TrialState.FAIL) for points in others if points),
    ):
        trial = study.ask()
        _reported(trial, points)
        best = max(search_score({"valid": point}) for point in points)
        study.tell(trial, best if state == optuna.trial.TrialState.COMPLETE else None, state)
    return _reported(study.ask(), mine)


def _reported(trial: Any, points: Curve) -> bool:
    """Report a curve to Optuna, which keeps its scores at the steps of halving; return the decision at its end."""
    stop = False
    for step, point in enumerate(points, start=1):
        trial.report(search_score({"valid": point}), step)
        stop = trial.should_prune()
    return stop
