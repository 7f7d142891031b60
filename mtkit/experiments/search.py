"""Random and Bayesian search of a study's settings by Optuna: the next point from the trials so far."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtkit.errors import MtkitError
from mtkit.experiments.rows import Row, validation_score
from mtkit.experiments.study import Range, SearchSettings

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def points(search: SearchSettings, rows: Sequence[Row], begun: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the points of an entry's trials so far, and the next one if there are fewer than `search.trials`.

    `rows` are results of the entry's trials, `begun` the trials that were started. The same trials give the same next
    point.

    Raises: MtkitError if Optuna is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise MtkitError(
            f"{search.method} search needs Optuna; install it: pip install 'mtkit[search]', or use method = grid"
        ) from error
    assert search.trials is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(values) for key, values in search.settings.items()}
    results = {_key(row["point"]): row for row in rows}
    tried = list({_key(trial["point"]): dict(trial["point"]) for trial in (*rows, *begun)}.values())[: search.trials]
    if len(tried) == search.trials:
        return tried
    samplers = {"bayesian": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    # each place in the sequence has its own seed
    study = optuna.create_study(direction="maximize", sampler=samplers[search.method](seed=len(tried)))
    for point in tried:
        row = results.get(_key(point))
        score = None if row is None or "failed" in row else validation_score(row)
        state = optuna.trial.TrialState.RUNNING if row is None else optuna.trial.TrialState.FAIL
        if score is not None:
            state = optuna.trial.TrialState.COMPLETE
        params = {key: _internal(value) for key, value in point.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=score, state=state))
    asked = study.ask(distributions)
    return [*tried, {key: _external(search.settings[key], asked.params[key]) for key in search.settings}]


def _distribution(values: Sequence[Any] | Range) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(values, Range):
        return FloatDistribution(values.low, values.high, log=values.log)
    return CategoricalDistribution([_internal(value) for value in values])


def _internal(value: Any) -> Any:
    """Return a value as Optuna takes it: a number, a boolean or a string; lists and mappings as JSON."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _external(values: Sequence[Any] | Range, chosen: Any) -> Any:
    if isinstance(values, Range):
        return float(f"{chosen:.6g}")  # a number that a person can write
    return next(value for value in values if _internal(value) == chosen)


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)
