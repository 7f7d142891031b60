import math
from itertools import pairwise

import pytest

from mtkit.errors import RecipeError
from mtkit.recipe import TrainingSettings
from mtkit.training.optimization.schedule import build_schedule


def rates(total: int, d_model: int = 512, **settings: object) -> list[float]:
    schedule = build_schedule(TrainingSettings.model_validate({"max_updates": total, **settings}), d_model)
    return [schedule(update, (update - 1) / total) for update in range(1, total + 1)]


def test_noam_is_the_formula_of_the_paper() -> None:
    d_model, warmup, factor = 512, 40, 2.0
    paper = [factor * d_model**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, 201)]
    assert rates(200, schedule="noam", warmup_updates=warmup, peak_rate=factor) == pytest.approx(paper, rel=1e-12)


def test_noam_equals_inverse_sqrt_with_its_peak() -> None:
    noam = rates(300, schedule="noam", warmup_updates=50, peak_rate=1.0)
    inverse = rates(300, schedule="inverse-sqrt", warmup_updates=50, peak_rate=(512 * 50) ** -0.5)
    assert noam == pytest.approx(inverse, rel=1e-12)


@pytest.mark.parametrize("schedule", ["inverse-sqrt", "cosine"])
def test_the_warm_up_rises_linearly_to_the_peak(schedule: str) -> None:
    found = rates(100, schedule=schedule, warmup_updates=10, peak_rate=0.5)
    assert found[:10] == pytest.approx([0.05 * update for update in range(1, 11)])
    assert max(found) == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(found[10:]))


def test_the_cosine_falls_by_half_a_period() -> None:
    found = rates(1_010, schedule="cosine", warmup_updates=10, peak_rate=1.0)
    expected = [0.5 * (1 + math.cos(math.pi * (update - 11) / 1_000)) for update in range(11, 1_011)]
    assert found[10:] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["noam", "inverse-sqrt", "cosine"])
def test_no_warm_up_is_legal(schedule: str) -> None:
    found = rates(20, schedule=schedule, warmup_updates=0, peak_rate=1.0)
    assert found[0] == max(found)
    assert all(math.isfinite(rate) and rate > 0 for rate in found)


def test_the_cooldown_falls_linearly_to_zero_over_the_last_share_only() -> None:
    plain = rates(100, warmup_updates=5)
    cooled = rates(100, warmup_updates=5, cooldown=0.2)
    assert cooled[:80] == plain[:80]
    ratios = [one / other for one, other in zip(cooled[80:], plain[80:], strict=True)]
    assert ratios == pytest.approx([1 - step / 20 for step in range(20)])


def test_the_cooldown_also_goes_by_time() -> None:
    settings = TrainingSettings(max_minutes=10, cooldown=0.5, warmup_updates=0, schedule="inverse-sqrt")
    schedule = build_schedule(settings, 512)
    assert schedule(4, 0.75) == pytest.approx(schedule(4, 0.5) / 2)
    assert schedule(4, 1.0) == 0.0


@pytest.mark.parametrize("settings", [{"schedule": "cosine"}, {"cooldown": 0.1}])
def test_an_end_that_nothing_sets_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match="set max_updates, max_epochs, max_tokens, max_flops or max_minutes"):
        build_schedule(TrainingSettings.model_validate(settings), 512)
