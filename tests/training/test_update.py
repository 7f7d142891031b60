from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.kernels.cpu import training_products
from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared
from mtkit.errors import RunError
from mtkit.model.build import build_model
from mtkit.training.data_loader import UpdateBatches, count_tokens
from mtkit.training.objective import EXTRA, LOSS, NLL, REWARD, SEGMENTS
from mtkit.training.precision import Precision
from mtkit.training.update import Updater, seed_generators
from mtkit.training.world import World
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
        self.most_rows = 1_000
        """Segments that fit in memory at a time."""
        self.calls: list[int] = []
        self.register_buffer("seen", torch.zeros(()))

    @property
    def output_weight(self) -> Tensor:
        return self.table.weight

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self.table.weight

    def forward(self, source: Tensor, target_in: Tensor, **_: Tensor | None) -> Output:
        self.calls.append(len(source))
        self.seen += len(source)
        if len(source) > self.most_rows:
            torch.empty(1 << 50)  # no memory holds that
        output = Output(self.table(target_in))
        if self.loss_weight:
            output.losses = {"size": self.loss_weight * self.table.weight.square().mean()}
        if self.samples:
            output.log_prob = self.choice.expand(len(source))
        return output

    def after_update(self, update: int, total_updates: int) -> None:
        self.followed.append((update, total_updates))


def work_of(prepared: Prepared, *rows: list[int]) -> UpdateBatches:
    arrays = [np.array(each) for each in rows]
    batches = [make_batch(prepared.train, each) for each in arrays]
    return UpdateBatches(batches, count_tokens(prepared.train, arrays), arrays, 0, len(rows))


def updater(prepared: Prepared, **training: object) -> tuple[Updater, StandIn]:
    model = StandIn(prepared.tokenizers.target.size)
    recipe = tiny(training={"clip_norm": 0.0, "ema": 0.0, **training})
    return Updater(model, recipe, World("cpu"), Precision("float32", CPU)), model  # type: ignore[arg-type]


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


def _mean_nll(model: StandIn, work: UpdateBatches) -> Tensor:
    """Of each segment, per token."""
    batch = work.batches[0]
    with torch.no_grad():
        logits = model.table(batch.target_in) @ model.output_weight.T
        nll = F.cross_entropy(logits.transpose(1, 2), batch.target_out, reduction="none")
    return (nll * batch.target_valid).sum(1) / batch.target_valid.sum(1)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_what_the_attentions_of_a_real_model_sample_is_trained_by_reward(prepared: Prepared, weight: float) -> None:
    options = {"edges": 2, "hidden": 4, "share": "model", "weight": weight}
    recipe = tiny(training={"clip_norm": 0.0}, attention={"name": "sac", "options": options})
    size = prepared.tokenizers.target.size
    model = build_model(recipe, source_vocabulary=size, target_vocabulary=size).train()
    steps = Updater(model, recipe, World("cpu"), Precision("float32", CPU))
    steps.run(work_of(prepared, [0, 1, 2], [3]), 1, rate=0.0, total_updates=2)
    predictors = [parameter for name, parameter in model.named_parameters() if "predictor" in name]
    assert predictors
    assert all((parameter.grad.abs().max() > 0) == (weight > 0) for parameter in predictors)
    sums = steps.read()
    assert sums[SEGMENTS] == 4
    assert sums[REWARD] < 0


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
    assert sums[-1] == 2
    assert steps.read() == [0.0] * 8


def test_a_step_that_float16_skips_has_no_gradient_norm(prepared: Prepared) -> None:
    model = StandIn(prepared.tokenizers.target.size)
    model.loss_weight = 1e6
    precision = Precision("float16", CPU)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    steps = Updater(model, tiny(), World("cpu"), precision)  # type: ignore[arg-type]
    steps.run(work_of(prepared, [0]), 1, rate=0.0, total_updates=9)
    assert (steps.read()[-2:], steps.first_failed()) == ([0.0, 0.0], None)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    steps.run(work_of(prepared, [0]), 2, rate=0.0, total_updates=9)
    norms, made = steps.read()[-2:]
    assert norms > 0
    assert made == 1


def test_a_loss_that_is_not_finite_is_noticed_and_not_applied(prepared: Prepared) -> None:
    steps, model = updater(prepared)
    steps.run(work_of(prepared, [0]), 1, rate=0.1, total_updates=9)
    assert steps.first_failed() is None
    before = model.table.weight.detach().clone()
    model.loss_weight = float("inf")
    for number in (2, 3):
        steps.run(work_of(prepared, [1]), number, rate=0.1, total_updates=9)
    assert steps.first_failed() == 2
    assert torch.equal(model.table.weight, before)


def test_dropout_is_a_function_of_seed_update_and_process() -> None:
    def draw(*place: int) -> list[float]:
        seed_generators(*place)
        return torch.rand(4).tolist()

    assert draw(1, 5, 0) == draw(1, 5, 0)
    others = [draw(1, 5, 0), draw(2, 5, 0), draw(1, 6, 0), draw(1, 5, 1)]
    assert all(one != other for index, one in enumerate(others) for other in others[:index])


def test_each_update_has_a_seed_of_its_own_which_a_repetition_has_again(prepared: Prepared) -> None:
    steps, seeds = updater(prepared)[0], list[int]()
    for number in (1, 2, 1):
        steps.run(work_of(prepared, [0]), number, rate=0.0, total_updates=9)
        seeds.append(torch.initial_seed())
    assert seeds[0] == seeds[2] != seeds[1]


def test_the_real_model_trains_in_bfloat16_with_float32_weights(prepared: Prepared) -> None:
    size = prepared.tokenizers.target.size
    model = build_model(tiny(), source_vocabulary=size, target_vocabulary=size)
    seen = set()
    model.encoder_norm.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    steps = Updater(model, tiny(), World("cpu"), Precision("bfloat16", CPU))
    losses = []
    for number in range(1, 9):
        steps.run(work_of(prepared, [0, 1, 2, 3]), number, rate=0.01, total_updates=9)
        losses.append(steps.read()[NLL])
    assert steps.first_failed() is None
    assert losses[-1] < 0.8 * losses[0]
    assert seen == {torch.bfloat16}  # what passes between products too, which autocast alone leaves in float32
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


ROWS = ([0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13])


@pytest.mark.parametrize("most_rows", [1, 2, 3, 6])
def test_a_batch_that_memory_does_not_hold_is_split_to_the_same_gradient(prepared: Prepared, most_rows: int) -> None:
    whole, roomy = updater(prepared)
    parts, short = updater(prepared)
    roomy.loss_weight = short.loss_weight = 0.3
    short.most_rows = most_rows
    work = work_of(prepared, *ROWS)
    for steps in (whole, parts):
        steps.run(work, 1, rate=0.0, total_updates=1)
    torch.testing.assert_close(gradients(short)[0], gradients(roomy)[0])
    assert parts.read() == pytest.approx(whole.read(), rel=1e-5)
    assert max(roomy.calls) == 7
    assert parts.max_batch_size is not None
    # what forward passes gather is gathered once
    assert short.seen == roomy.seen == 14


class _FailsOnceInBackward(torch.autograd.Function):
    """Memory gives out in the backward pass of what comes before it."""

    armed = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        if _FailsOnceInBackward.armed:
            _FailsOnceInBackward.armed = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient


def test_gradients_of_a_backward_pass_that_ran_out_of_memory_do_not_count_twice(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, roomy = updater(prepared)
    parts, short = updater(prepared)
    forward = StandIn.forward

    def fragile(self: StandIn, *arguments: Tensor, **options: Tensor | None) -> Output:
        output = forward(self, *arguments, **options)
        return Output(_FailsOnceInBackward.apply(output.hidden))

    monkeypatch.setattr(StandIn, "forward", fragile)
    work = work_of(prepared, [0, 1], [2, 3])
    whole.run(work, 1, rate=0.0, total_updates=1)
    _FailsOnceInBackward.armed = True
    parts.run(work, 1, rate=0.0, total_updates=1)
    assert not _FailsOnceInBackward.armed
    torch.testing.assert_close(gradients(short)[0], gradients(roomy)[0])
    assert short.seen == roomy.seen


def test_batches_too_large_for_the_memory_are_split_ahead_from_then_on(prepared: Prepared) -> None:
    said: list[str] = []
    model = StandIn(prepared.tokenizers.target.size)
    steps = Updater(model, tiny(), World("cpu"), Precision("float32", CPU), say=said.append)  # type: ignore[arg-type]
    model.most_rows = 4
    steps.run(work_of(prepared, ROWS[0]), 1, rate=0.0, total_updates=2)
    assert model.calls[:2] == [7, 4]
    model.calls.clear()
    steps.run(work_of(prepared, ROWS[0]), 2, rate=0.0, total_updates=2)
    assert model.calls == [4, 3]
    (line,) = said
    assert "at a batch of 7 segments" in line


def test_a_single_segment_that_memory_does_not_hold_is_one_clear_error(prepared: Prepared) -> None:
    steps, model = updater(prepared)
    model.most_rows = 0
    with pytest.raises(RunError, match=r"a single segment of \d+ source and \d+ target pieces \(line \d+ of") as error:
        steps.run(work_of(prepared, [4, 5]), 1, rate=0.0, total_updates=1)
    assert "\n" not in str(error.value)
    assert model.calls == [2, 1]


def test_a_dry_run_changes_only_the_largest_batch_size(prepared: Prepared) -> None:
    size = prepared.tokenizers.target.size

    def trained(dry_run_first: bool) -> dict[str, Tensor]:
        attention = {"attention": {"encoder": "routing", "options": {"clusters": 2}}}
        model = build_model(tiny(**attention), source_vocabulary=size, target_vocabulary=size)
        steps = Updater(model, tiny(), World("cpu"), Precision("float32", CPU))
        torch.manual_seed(5)
        for number in (1, 2):
            if dry_run_first:
                steps.dry_run(work_of(prepared, [5, 6, 7, 8]).batches)
            steps.run(work_of(prepared, [0, 1, 2, 3]), number, rate=0.01, total_updates=9)
        assert steps.max_batch_size is None
        return {**model.state_dict(), "random": torch.rand(3)}

    plain, dry_run_first = trained(False), trained(True)
    assert all(torch.equal(plain[name], dry_run_first[name]) for name in plain)


def test_a_dry_run_finds_the_largest_batch_size_before_the_first_update(prepared: Prepared) -> None:
    steps, model = updater(prepared)
    model.most_rows = 3
    steps.dry_run(work_of(prepared, [0, 1, 2, 3, 4]).batches)
    assert steps.max_batch_size is not None
    assert model.calls == [5, 3, 2]
    assert model.seen == 0
    assert not gradients(model)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
@pytest.mark.parametrize("r_drop", [0.0, 1.0])
def test_updates_by_onednn_are_those_by_pytorch(
    r_drop: float, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, gradients, shapes = prepared.tokenizers.target.size, list[dict[str, Tensor | None]](), list[torch.Size]()
    multiply = training_products._multiply

    def counted(rows: Tensor, *others: Tensor) -> Tensor:
        shapes.append(rows.shape)
        return multiply(rows, *others)

    monkeypatch.setattr(training_products, "_multiply", counted)
    for faster in (False, True):
        monkeypatch.setattr(training_products, "packs_float32", lambda faster=faster: faster)
        recipe = tiny(training={"r_drop": r_drop, "ema": 0.0})
        torch.manual_seed(1)
        model = build_model(recipe, source_vocabulary=size, target_vocabulary=size)
        once = Updater(model, recipe, World("cpu"), Precision("float32", CPU))
        once.run(work_of(prepared, [0, 1, 2]), 1, rate=0.01, total_updates=1)
        assert bool(shapes) == faster
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert len(shapes) > 2 * sum(type(module) is nn.Linear for module in model.modules())
