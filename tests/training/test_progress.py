import pytest

from mtkit.recipe.settings import BestBy
from mtkit.training.progress import Progress


def validated(scores: list[float], best_by: BestBy = "bleu", least: float = 0.0, nll: float = 1.0) -> list[int]:
    """The validations without improvement after each of the validations with these scores."""
    progress, stale = Progress(best_by=best_by), []
    for score in scores:
        progress = progress.after_validation(0.0, nll, score, least)
        stale.append(progress.stale)
    return stale


@pytest.mark.parametrize("best_by", ["bleu", "chrf", "exact", "loss", "ter"])
def test_patience_follows_the_score_that_chooses_the_best_checkpoint(best_by: BestBy) -> None:
    rising = validated([1.0, 2.0, 2.0, 1.5, 3.0], best_by)
    assert rising == ([0, 1, 2, 3, 4] if best_by in ("loss", "ter") else [0, 0, 1, 2, 0])
    falling = validated([3.0, 2.0, 2.0, 2.5, 1.0], best_by)
    assert falling == ([0, 0, 1, 2, 0] if best_by in ("loss", "ter") else [0, 1, 2, 3, 4])


def test_small_improvements_reset_patience_once_their_sum_is_the_least_improvement() -> None:
    assert validated([10.0, 10.25, 10.5, 10.75, 11.0, 11.25], least=0.5) == [0, 1, 0, 1, 0, 1]
    assert validated([10.0, 9.75, 9.5, 9.25], "loss", least=0.5) == [0, 1, 0, 1]
    assert validated([10.0, 12.0, 10.0, 11.0, 12.25], least=0.5) == [0, 0, 1, 2, 3]


def test_the_best_score_is_the_best_whatever_the_least_improvement() -> None:
    progress = Progress().after_validation(10.0, 2.0, 10.0, 0.5).after_validation(10.25, 3.0, 10.25, 0.5)
    assert (progress.best_score, progress.best_nll, progress.patience_score, progress.stale) == (10.25, 3.0, 10.0, 1)
    assert not progress.is_bettered_by(10.25, 3.0)
    assert progress.is_bettered_by(10.25, 2.5)
