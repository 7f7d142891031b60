from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.errors import RecipeError
from mtkit.model.build import build_model
from mtkit.runs import Run
from mtkit.training.checkpoint import verified_tensors
from mtkit.training.data_loader import DataLoader
from mtkit.training.device_batch import DeviceBatch
from mtkit.training.loss import r_drop_loss, token_loss
from mtkit.training.metrics import read_metrics
from mtkit.training.objective import DIVERGENCE, LOSS, NLL, REWARD, SEGMENTS, doubled
from mtkit.training.precision import Precision
from mtkit.training.train import train
from mtkit.training.update import Updater
from mtkit.training.validation import validation_loss
from mtkit.training.world import World
from tests.processes import together
from tests.training.conftest import tiny
from tests.training.test_loss import Largest
from tests.training.test_update import CPU, Output, StandIn, gradients, updater, work_of

TOKENS, WIDTH, PIECES = 23, 6, 10


def naive(hidden: Tensor, weight: Tensor, target: Tensor, *, smoothing: float, alpha: float) -> tuple[Tensor, Tensor]:
    """Half of the paper's equation 4, and the divergence in it."""
    one, other = (hidden @ weight.T).log_softmax(1).chunk(2)
    there, back = (F.kl_div(q, p, reduction="sum", log_target=True) for p, q in ((one, other), (other, one)))
    first, second = (F.nll_loss(each, target, reduction="sum") for each in (one, other))
    if smoothing:
        first, second = (
            F.cross_entropy(each, target, label_smoothing=smoothing, reduction="sum") for each in (one, other)
        )
    divergence = (there + back) / 2
    return (first + second + alpha * divergence) / 2, divergence


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2 * TOKENS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(PIECES, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(PIECES, (TOKENS,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.3, 5.0])
@pytest.mark.parametrize("chunk_rows", [1, 7, 23, 100])
def test_equals_the_equation_with_its_gradients(
    case: tuple[Tensor, Tensor, Tensor], smoothing: float, alpha: float, chunk_rows: int
) -> None:
    hidden, weight, target = case
    loss = r_drop_loss(hidden, weight, target.repeat(2), smoothing=smoothing, alpha=alpha, chunk_rows=chunk_rows)
    reference, divergence = naive(hidden, weight, target, smoothing=smoothing, alpha=alpha)
    assert divergence > 1.0
    torch.testing.assert_close(loss.objective, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss.divergence, divergence, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss.nll, F.cross_entropy(hidden @ weight.T, target.repeat(2), reduction="none"))
    assert loss.tokens == TOKENS
    assert not loss.nll.requires_grad
    assert not loss.divergence.requires_grad
    ours = torch.autograd.grad(loss.objective * 0.3, (hidden, weight))
    theirs = torch.autograd.grad(reference * 0.3, (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_sums_are_float32_and_near_the_exact_loss(
    case: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> None:
    hidden, weight = (tensor.detach().float().requires_grad_() for tensor in case[:2])
    with torch.autocast("cpu", dtype):
        loss = r_drop_loss(hidden.to(dtype), weight, case[2].repeat(2), smoothing=0.1, alpha=5.0, chunk_rows=5)
    assert loss.objective.dtype == loss.nll.dtype == loss.divergence.dtype == torch.float32
    ours = torch.autograd.grad(loss.objective, (hidden, weight))
    reference, _ = naive(hidden, weight, case[2], smoothing=0.1, alpha=5.0)
    torch.testing.assert_close(loss.objective, reference, rtol=0.01, atol=0.0)
    for one, other in zip(ours, torch.autograd.grad(reference, (hidden, weight)), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_passes_that_agree_have_the_plain_loss(case: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, target = case
    same = hidden[:TOKENS].repeat(2, 1)
    ours = r_drop_loss(same, weight, target.repeat(2), smoothing=0.1, alpha=5.0)
    plain = token_loss(hidden[:TOKENS], weight, target, smoothing=0.1)
    assert ours.divergence == 0
    torch.testing.assert_close(ours.objective, plain.objective)
    found, expected = (torch.autograd.grad(each.objective, hidden, retain_graph=True)[0] for each in (ours, plain))
    torch.testing.assert_close(found, expected)


def test_no_tensor_is_larger_than_one_chunk_of_logits() -> None:
    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    target = torch.randint(50, (200,)).repeat(2)
    with Largest() as chunked:
        r_drop_loss(hidden, weight, target, smoothing=0.1, alpha=5.0, chunk_rows=20).objective.backward()
    with Largest() as whole:
        naive(hidden, weight, target[:200], smoothing=0.1, alpha=5.0)[0].backward()
    assert whole.elements == 400 * 50, "the probe sees tensors inside backward passes"
    assert chunked.elements == 2 * 20 * 50


def test_a_batch_given_twice_holds_each_segment_in_both_halves(prepared: Prepared) -> None:
    batch = make_batch(prepared.train, np.arange(4))
    inputs = DeviceBatch.of(batch, CPU)
    twice = doubled(replace(inputs, task=torch.arange(4)))
    for name in ("source", "source_valid", "source_lengths", "target_in", "target_valid", "target", "task"):
        first, second = getattr(twice, name).chunk(2)
        assert torch.equal(first, second), name
    assert torch.equal(twice.target_in.flatten()[twice.places], inputs.target_in.flatten()[inputs.places].repeat(2))
    assert torch.equal(twice.segments, torch.cat([inputs.segments, inputs.segments + 4]))


class Differing(StandIn):
    """Its passes differ as if by dropout, but as a function of the tokens alone: the second half is scaled."""

    def forward(self, source: Tensor, target_in: Tensor, **rest: Tensor | None) -> Output:
        output = super().forward(source, target_in, **rest)
        scale = torch.ones(len(source), 1, 1)
        scale[len(source) // 2 :] = 0.5
        return Output(output.hidden * scale, output.losses, output.log_prob)


def differing(prepared: Prepared, *, most_rows: int = 1_000) -> tuple[Updater, Differing]:
    model = Differing(prepared.tokenizers.target.size)
    model.most_rows = most_rows
    recipe = tiny(training={"clip_norm": 0.0, "ema": 0.0, "r_drop": 5.0})
    return Updater(model, recipe, World("cpu"), Precision("float32", CPU)), model  # type: ignore[arg-type]


def test_each_token_of_an_update_weighs_the_same_whatever_batch_it_is_in(prepared: Prepared) -> None:
    found = []
    for rows, most_rows in (([[0, 1, 2, 3]], 1_000), ([[3], [2, 0, 1]], 1_000), ([[0, 1, 2, 3]], 2)):
        steps, model = differing(prepared, most_rows=most_rows)
        model.loss_weight = 0.3
        steps.run(work_of(prepared, *rows), 1, rate=0.0, total_updates=1)
        sums = steps.read()
        assert sums[DIVERGENCE] > 0
        found.append((gradients(model)[0], torch.tensor(sums)))
    assert model.calls[-1] == 2, "halved to one segment, given twice"
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
    batch = work_of(prepared, [0, 1, 2, 3]).batches[0]
    hidden = model.table(batch.target_in)[batch.target_valid]
    target = batch.target_out[batch.target_valid]
    reference, divergence = naive(torch.cat([hidden, hidden / 2]), model.table.weight, target, smoothing=0.1, alpha=5.0)
    size = 0.3 * model.table.weight.square().mean()
    expected = torch.autograd.grad(reference / len(target) + size, model.table.weight)[0]
    torch.testing.assert_close(found[0][0], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[0][1][[LOSS, DIVERGENCE]], torch.stack([reference, divergence]))


def test_sampled_choices_of_either_pass_are_rewarded_by_its_own_loss(prepared: Prepared) -> None:
    """Choices that do not change the loss have, over both passes, the term that one pass has."""
    found = []
    for steps, model in (updater(prepared), updater(prepared, r_drop=5.0)):
        model.samples = True
        for number, rows in enumerate(([0], [5, 9]), 1):
            steps.run(work_of(prepared, rows), number, rate=0.0, total_updates=2)
        sums = steps.read()
        found.append((model.choice.grad, sums[REWARD] / sums[SEGMENTS], sums[NLL]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("name", "precision", "reversible"),
    [
        ("sac", "float32", False),
        ("sac", "bfloat16", True),
        ("disagreement", "float16", False),
        ("routing", "bfloat16", False),
    ],
)
def test_real_models_train_with_it(prepared: Prepared, name: str, precision: str, reversible: bool) -> None:
    recipe = tiny(model={"reversible": reversible}, attention={"encoder": name}, training={"r_drop": 5.0})
    size = prepared.tokenizers.target.size
    model = build_model(recipe, source_vocabulary=size, target_vocabulary=size).train()
    steps = Updater(model, recipe, World("cpu"), Precision(precision, CPU))
    losses = []
    for number in range(1, 9):
        steps.run(work_of(prepared, [0, 1, 2, 3]), number, rate=0.01, total_updates=9)
        losses.append(steps.read())
    assert steps.first_failed() is None
    assert losses[-1][NLL] < 0.9 * losses[0][NLL]
    assert all(each[DIVERGENCE] > 0 for each in losses)


def test_a_run_tells_the_divergence_validates_without_it_and_resumes_bit_for_bit(
    prepared: Prepared, tmp_path: Path
) -> None:
    training = {"r_drop": 2.0, "precision": "float32"}

    def trained(name: str, *limits: int) -> Path:
        for limit in limits:
            recipe = tiny(training={**training, "max_updates": limit})
            train(recipe, prepared, tmp_path / name, command=["mtkit"], device="cpu")
        return tmp_path / name

    whole, resumed = trained("whole", 16), trained("resumed", 8, 16)
    for file in ("model", "optimizer", "ema"):
        one, other = (verified_tensors(each / "checkpoints" / "update-00000016", file) for each in (whole, resumed))
        assert all(torch.equal(one[key], other[key]) for key in one)
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if row["kind"] == "train"]
    assert all(row["r_drop"] > 0 for row in rows)  # type: ignore[typeddict-item]
    validations = [row for row in read_metrics(whole / "metrics.jsonl") if row["kind"] == "validation"]
    assert validations
    assert not any("r_drop" in row for row in validations)
    model, precision, world = Run(whole).load_model(), Precision("float32", CPU), World("cpu")
    with_it, without = (
        validation_loss(model, recipe, prepared, precision, world) for recipe in (Run(whole).recipe, tiny())
    )
    assert with_it == without == pytest.approx(validations[-1]["nll"], rel=1e-5)


def test_without_dropout_it_is_refused_and_zero_is_none() -> None:
    with pytest.raises(RecipeError, match=r"training\.r_drop = 5 needs dropout"):
        tiny(model={"dropout": 0.0}, training={"r_drop": 5.0})
    assert tiny(model={"dropout": 0.0}, training={"r_drop": 0.0}) == tiny(model={"dropout": 0.0})
    assert tiny(model={"dropout": 0.0, "attention_dropout": 0.1}, training={"r_drop": 5.0}).training.r_drop == 5.0


def three_updates(folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after them, and what they came to."""
    prepared = open_prepared(folder)
    recipe = tiny(training={"r_drop": 5.0, "clip_norm": 0.0, "ema": 0.0, "batch_tokens": 60, "accumulate": 2})
    with World("cpu") as world:
        model = Differing(prepared.tokenizers.target.size)
        updater = Updater(model, recipe, world, Precision("float32", world.device))
        updates = DataLoader(recipe, prepared, 1024, world).updates(0, 0)
        for number in (1, 2, 3):
            updater.run(next(updates), number, rate=0.01, total_updates=3)
        updates.close()
        return {name: each.detach() for name, each in model.state_dict().items()}, updater.read()


def test_two_processes_give_what_one_gives(prepared: Prepared) -> None:
    one, sums = three_updates(prepared.folder)
    two, sums_of_two = together(2, three_updates, prepared.folder)[0]
    assert sums[DIVERGENCE] > 0
    assert sums_of_two == pytest.approx(sums, rel=1e-4)
    torch.testing.assert_close(two["table.weight"], one["table.weight"], rtol=0.0, atol=1e-5)
