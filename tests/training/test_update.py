from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared
from mtkit.model.build import build_model
from mtkit.training.distributed import World
from mtkit.training.feed import Work, count_tokens
from mtkit.training.optimizer import Precision
from mtkit.training.update import EXTRA, LOSS, NLL, SEGMENTS, Updater, seed_generators
from tests.training.conftest import tiny

CPU = torch.device("cpu")


@dataclass
class Output:
    hidden: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    log_prob: Tensor | None = None


class StandIn(nn.Module):
    """The model's interface over one embedding; what attentions would add can be set."""

    def __init__(self, vocabulary: int, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(vocabulary, width)
        self.choice = nn.Parameter(torch.zeros(()))
        self.loss_weight = 0.0
        self.samples = False
        self.followed: list[tuple[int, int]] = []

    @property
    def output_weight(self) -> Tensor:
        return self.table.weight

    def forward(self, source: Tensor, target_in: Tensor, **_: Tensor | None) -> Output:
        output = Output(self.table(target_in))
        if self.loss_weight:
            output.losses = {"size": self.loss_weight * self.table.weight.square().mean()}
        if self.samples:
            output.log_prob = self.choice.expand(len(source))
        return output

    def after_update(self, update: int, total_updates: int) -> None:
        self.followed.append((update, total_updates))


def work_of(prepared: Prepared, *rows: list[int]) -> Work:
    arrays = [np.array(each) for each in rows]
    batches = [make_batch(prepared.train, each) for each in arrays]
    return Work(batches, count_tokens(prepared.train, arrays), arrays, 0, len(rows))


def updater(prepared: Prepared, **training: object) -> tuple[Updater, StandIn]:
    model = StandIn(prepared.tokenizers.target.size)
    recipe = tiny(training={"clip_norm": 0.0, "ema": 0.0, **training})
    return Updater(model, recipe, World(CPU), Precision("float32", CPU)), model  # type: ignore[arg-type]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_each_token_of_an_update_weighs_the_same_whatever_batch_it_is_in(prepared: Prepared) -> None:
    steps, model = updater(prepared, label_smoothing=0.1)
    work = work_of(prepared, [0, 1, 2], [3])
    steps.run(work, 1, rate=0.0, total_updates=1)
    found = gradients(model)[0]
    model.zero_grad()
    losses = []
    for batch in work.batches:
        logits = (model.table(batch.target_in) @ model.output_weight.T)[batch.target_valid]
        losses.append(
            F.cross_entropy(logits, batch.target_out[batch.target_valid], label_smoothing=0.1, reduction="none")
        )
    torch.cat(losses).mean().backward()
    torch.testing.assert_close(found, model.table.weight.grad)


def test_splitting_an_update_into_batches_changes_nothing(prepared: Prepared) -> None:
    found = []
    for rows in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [2, 0, 1]]):
        steps, model = updater(prepared)
        model.loss_weight = 0.5
        steps.run(work_of(prepared, *rows), 1, rate=0.0, total_updates=1)
        found.append(gradients(model)[0])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_losses_of_the_attentions_are_means_per_token(prepared: Prepared) -> None:
    plain, model = updater(prepared)
    plain.run(work_of(prepared, [0, 1], [2]), 1, rate=0.0, total_updates=1)
    without = gradients(model)[0]
    steps, model = updater(prepared)
    model.loss_weight = 0.7
    steps.run(work_of(prepared, [0, 1], [2]), 1, rate=0.0, total_updates=1)
    (expected,) = torch.autograd.grad(0.7 * model.table.weight.square().mean(), model.table.weight)
    torch.testing.assert_close(gradients(model)[0] - without, expected, rtol=1e-4, atol=1e-7)
    tokens = work_of(prepared, [0, 1], [2]).tokens
    assert steps.read()[EXTRA] / tokens == pytest.approx(0.7 * model.table.weight.square().mean().item(), rel=1e-5)


def test_sampled_choices_are_rewarded_against_the_moving_baseline(prepared: Prepared) -> None:
    steps, model = updater(prepared)
    model.samples = True
    first, second = work_of(prepared, [0]), work_of(prepared, [5, 9])
    steps.run(first, 1, rate=0.0, total_updates=2)
    baseline = -_mean_nll(model, first)[0]
    steps.run(second, 2, rate=0.0, total_updates=2)
    lengths = second.batches[0].target_valid.sum(1)
    rewards = -_mean_nll(model, second)
    expected = -((rewards - baseline) * lengths).sum() / lengths.sum()
    assert model.choice.grad is not None
    assert model.choice.grad.item() == pytest.approx(expected.item(), rel=1e-4)
    assert steps.read()[SEGMENTS] == 3


def _mean_nll(model: StandIn, work: Work) -> Tensor:
    """Of each segment, per token."""
    batch = work.batches[0]
    with torch.no_grad():
        logits = model.table(batch.target_in) @ model.output_weight.T
        nll = F.cross_entropy(logits.transpose(1, 2), batch.target_out, reduction="none")
    return (nll * batch.target_valid).sum(1) / batch.target_valid.sum(1)


def test_the_model_hears_of_every_update_and_measurements_add_up(prepared: Prepared) -> None:
    steps, model = updater(prepared, label_smoothing=0.0)
    work = work_of(prepared, [0, 1])
    for number in (1, 2):
        steps.run(work, number, rate=0.0, total_updates=9)
    assert model.followed == [(1, 9), (2, 9)]
    sums = steps.read()
    assert sums[LOSS] == pytest.approx(sums[NLL])
    assert sums[NLL] / (2 * work.tokens) == pytest.approx(
        (_mean_nll(model, work) * work.batches[0].target_valid.sum(1)).sum().item() / work.tokens, rel=1e-5
    )
    assert steps.read() == [0.0] * 6


def test_a_loss_that_is_not_finite_is_noticed_and_not_applied(prepared: Prepared) -> None:
    steps, model = updater(prepared)
    steps.run(work_of(prepared, [0]), 1, rate=0.1, total_updates=9)
    assert steps.failed() is None
    before = model.table.weight.detach().clone()
    model.loss_weight = float("inf")
    for number in (2, 3):
        steps.run(work_of(prepared, [1]), number, rate=0.1, total_updates=9)
    assert steps.failed() == 2
    assert torch.equal(model.table.weight, before)


def test_dropout_is_a_function_of_seed_update_and_process() -> None:
    def draw(*place: int) -> list[float]:
        seed_generators(*place)
        return torch.rand(4).tolist()

    assert draw(1, 5, 0) == draw(1, 5, 0)
    others = [draw(1, 5, 0), draw(2, 5, 0), draw(1, 6, 0), draw(1, 5, 1)]
    assert all(one != other for index, one in enumerate(others) for other in others[:index])


def test_the_real_model_trains_in_bfloat16_with_float32_weights(prepared: Prepared) -> None:
    size = prepared.tokenizers.target.size
    model = build_model(tiny(), source_vocabulary=size, target_vocabulary=size)
    steps = Updater(model, tiny(), World(CPU), Precision("bfloat16", CPU))
    losses = []
    for number in range(1, 9):
        steps.run(work_of(prepared, [0, 1, 2, 3]), number, rate=0.01, total_updates=9)
        losses.append(steps.read()[NLL])
    assert steps.failed() is None
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
