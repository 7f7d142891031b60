"""Random and Bayesian search of a study's settings by Optuna: the next point from the trials so far."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtkit.errors import MtkitError
from mtkit.experiments.entries import is_whole
from mtkit.experiments.rows import Row, is_measured, search_score
from mtkit.experiments.study import Range, SearchSettings
from mtkit.storage.files import json_text

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

STARTUP = 5
"""Trials of a Bayesian search that are random; Optuna's own 10 are most of a usual search."""
DRAWS = 100
"""Points that Optuna may draw before one is new; then an untried one is chosen at random."""


def points(search: SearchSettings, rows: Sequence[Row], begun: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the points of an entry's trials so far, and the next one if there are fewer than `size_of(search)`.

    `rows` are results of the entry's trials, `begun` the trials that were started. The next point is new, and depends
    only on these trials and their validation scores.

    Raises: MtkitError if Optuna is not installed.
    """
    require_optuna(f"{search.method} search")
    import optuna

    results = {_key(row["point"]): row for row in rows}
    tried = dict(sorted((_key(trial["point"]), dict(trial["point"])) for trial in (*rows, *begun)))
    if len(tried) >= size_of(search):
        return list(tried.values())
    distributions = {key: _distribution(key, values) for key, values in search.settings.items()}
    seed = len(tried)  # each place in the sequence has its own
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
    if search.method == "bayesian":
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for key, point in tried.items():
        params = {name: _internal(value) for name, value in point.items()}
        outcome = _outcome(results.get(key))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, **outcome))
    for _ in range(DRAWS):
        parameters = study.ask(distributions).params
        point = {key: _external(search.settings[key], parameters[key]) for key in search.settings}
        if _key(point) not in tried:
            return [*tried.values(), point]
    choices = [_choices(key, values) or [parameters[key]] for key, values in search.settings.items()]
    shape = [len(values) for values in choices]
    first = int(np.random.default_rng(seed).integers(math.prod(shape)))
    for number in range(first, first + len(tried) + 1):  # one of these combinations is new
        places = np.unravel_index(number % math.prod(shape), shape)
        point = {key: values[int(place)] for key, values, place in zip(search.settings, choices, places, strict=True)}
        if _key(point) not in tried:
            break
    return [*tried.values(), point]


def _outcome(row: Row | None) -> dict[str, Any]:
    """Return the state of a trial for Optuna, and its validation score or those before it was pruned."""
    from optuna.trial import TrialState

    if row is None:
        return {"state": TrialState.RUNNING}
    scores = [search_score({"valid": point}) for point in row.get("curve", [])]
    if row.get("pruned") and np.isfinite(scores).all():
        return {"state": TrialState.PRUNED, "intermediate_values": dict(enumerate(scores, start=1))}
    if is_measured(row) and np.isfinite(score := search_score(row)):
        return {"state": TrialState.COMPLETE, "value": score}
    return {"state": TrialState.FAIL}


def size_of(search: SearchSettings) -> int:
    """Return the number of trials per entry: `search.trials`, or all combinations if there are fewer."""
    assert search.trials is not None
    choices = [_choices(key, values) for key, values in search.settings.items()]
    return min(search.trials, math.prod(map(len, filter(None, choices)))) if all(choices) else search.trials


def require_optuna(what: str) -> None:
    """Import Optuna, without its messages. Raises: MtkitError if it is not installed."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise MtkitError(f"{what} needs Optuna; install it: pip install 'mtkit[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _distribution(place: str, values: Sequence[Any] | Range) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution([_internal(value) for value in values])
    if is_whole(place, values.low, values.high):
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _choices(place: str, values: Sequence[Any] | Range) -> Sequence[Any] | None:
    """Return all values of a setting; None for a range of real numbers."""
    if not isinstance(values, Range):
        return values
    return range(int(values.low), int(values.high) + 1) if is_whole(place, values.low, values.high) else None


def _internal(value: Any) -> Any:
    """Return a value as Optuna takes it: a number, a boolean or a string; lists and mappings as JSON."""
    return value if value is None or isinstance(value, bool | int | float | str) else json_text(value)


def _external(values: Sequence[Any] | Range, chosen: Any) -> Any:
    if not isinstance(values, Range):
        return next(value for value in values if _internal(value) == chosen)
    if isinstance(chosen, int):
        return chosen
    return min(max(float(f"{chosen:.6g}"), values.low), values.high)  # a number that a person can write


def _key(point: Mapping[str, Any]) -> str:
    return json_text(point, sort_keys=True)
