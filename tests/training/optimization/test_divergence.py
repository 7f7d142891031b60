import pytest
import torch

from mtkit.training.optimization.divergence import Divergence
from mtkit.training.progress import Progress


def follow(losses: list[float], progress: Progress | None = None, begin: int = 1) -> Divergence:
    """Losses of updates from `begin` on, for 10 pieces: a uniform guess has 2.3."""
    divergence = Divergence(10, torch.device("cpu"), progress or Progress())
    for number, nll in enumerate(losses, start=begin):
        divergence.follow(torch.tensor(nll), number)
    return divergence


@pytest.mark.parametrize(
    "losses",
    [
        [2.4, *[4.5] * 500],  # a plateau above a uniform guess
        [2.4, *[9.0, 1.0] * 200],  # batches that alternate
        [2.4, *[1.0] * 20, *[1e6] * 49, *[1.0] * 20, *[1e6] * 49],  # spikes
        [50.0, *[60.0] * 300],  # a beginning from weights that do not fit the data
    ],
)
def test_training_that_learns_slowly_or_recovers_is_no_divergence(losses: list[float]) -> None:
    assert follow(losses).since() is None


def test_a_loss_that_stays_far_above_a_uniform_guess_is_divergence_also_over_a_resume() -> None:
    losses = [2.4, *[1.0] * 9, *[2.1 * 2.4] * 50]
    assert follow(losses[:-1]).since() is None
    divergence = follow([*losses, 1.0])
    assert divergence.since() == 11
    assert divergence.describe() == (
        "training has diverged: from update 11 on, the loss is above 4.8 nats per target token, "
        "2 times the loss of the first update"
    )
    assert "above 4.6 nats per target token, 2 times the loss of a uniform guess" in str(
        follow([1.0, *losses[1:]]).describe()
    )
    halfway = follow(losses[:30]).save_state(Progress(update=30))
    assert halfway.diverging == 20
    assert follow(losses[30:], halfway, begin=31).since() == 11
    assert follow([float("nan"), 2.4]).save_state(Progress()).first_nll == pytest.approx(2.4)
