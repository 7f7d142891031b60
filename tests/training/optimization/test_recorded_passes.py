"""Updates whose passes are repeated from a recording: the same as computed ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels.fused import padding_bias
from mtkit.data.batches import Batch
from mtkit.device import to_device
from mtkit.model.build import build_model
from mtkit.recipe import Recipe, make_recipe, merged
from mtkit.recording import kept, recorded
from mtkit.training import precision_choice, update
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.loss import r_drop_loss, token_loss
from mtkit.training.optimization import recorded_passes
from mtkit.training.optimization.recorded_passes import RecordedPasses
from mtkit.training.precision import Precision, fast_and_repeatable
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.operations import record_operations

VOCABULARY = 50
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "model": {
        "d_model": 32, "heads": 4, "feed_forward": 48, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0,
        "max_length": 64,
    },
    "training": {"label_smoothing": 0.1},
}  # fmt: skip
SHAPES = [(6, 7, 9), (5, 12, 8), (6, 7, 9), (6, 7, 9), (5, 12, 8), (5, 12, 8), (6, 7, 9), (5, 12, 8)]
RATE = 2e-3


def batch(seed: int, rows: int, source: int, target: int) -> Batch:
    random = np.random.default_rng(seed)

    def side(width: int) -> tuple[Tensor, Tensor]:
        lengths = random.integers(2, width + 1, rows)
        lengths[0] = width
        valid = np.arange(width) < lengths[:, None]
        pieces = np.where(valid, random.integers(5, VOCABULARY, (rows, width)), 0)
        return torch.from_numpy(pieces), torch.from_numpy(valid)

    (sources, source_valid), (targets, target_valid) = side(source), side(target)
    tokens = int(target_valid.sum())
    return Batch(sources, source_valid, targets.roll(1, 1), targets, target_valid, tokens, np.arange(rows))


def work(number: int, together: int = 1) -> UpdateBatches:
    shapes = [SHAPES[(number + each) % len(SHAPES)] for each in range(together)]
    batches = [batch(100 * number + each, *shape) for each, shape in enumerate(shapes)]
    return UpdateBatches(batches, sum(each.target_tokens for each in batches), [], 0, 0)


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Tensor], list[float], Updater]]:
    """A function that updates a new model; returns its weights, the totals of all updates, and the updater."""

    def updated(
        recipe: Recipe,
        record: Any = None,
        *,
        precision: str = "float32",
        together: int = 1,
        say: Any = print,
        change: Callable[[Any], Any] = lambda model: None,
    ) -> tuple[dict[str, Tensor], list[float], Updater]:
        torch.manual_seed(3)
        model = build_model(recipe, source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY)
        change(model)
        monkeypatch.setattr(update, "RecordedPasses", partial(RecordedPasses, record=record))
        with World("cpu") as world, fast_and_repeatable(CPU):
            way = Precision(precision, CPU, graphs=record is not None)
            updater = Updater(model.train(), recipe, world, way, say=say)
            for number in range(1, len(SHAPES) + 1):
                updater.run(work(number, together), number, rate=RATE, total_updates=len(SHAPES))
        weights = {name: value.clone() for name, value in model.state_dict().items() if "k_proj.bias" not in name}
        return weights, updater.read(), updater  # the gradient of k_proj.bias is zero but for rounding

    return updated


def small(**groups: Any) -> Recipe:
    return make_recipe(merged(SMALL, groups))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("groups", "together"),
    [
        ({}, 1),
        ({"training": {"r_drop": 1.0}, "model": {"attention_dropout": 0.2}}, 2),
        ({"model": {"norm": "post", "tie": "none", "output_bias": True}, "training": {"optimizer": "muon"}}, 2),
        ({"model": {"positions": "none"}, "attention": {"options": {"positions": "rotary"}}}, 1),
        ({"attention": {"encoder": "disagreement", "cross": "linear", "decoder": "band"}}, 1),
    ],
    ids=str,
)
def test_repeated_updates_are_those_that_are_computed(
    updated: Any, groups: dict[str, Any], together: int, precision: str
) -> None:
    recipe = small(**groups)
    given = {"precision": precision, "together": together}
    wanted, totals, _ = updated(recipe, **given)
    found, repeated_totals, updater = updated(recipe, record_operations, **given)
    assert updater.recorded_shapes == 2
    # bfloat16: masked rows beside real ones change how a CPU sums a product
    limit = 1e-5 if precision == "float32" else 0.2 * RATE * len(SHAPES)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=limit, msg=name)
    np.testing.assert_allclose(repeated_totals, totals, rtol=1e-5 if precision == "float32" else 5e-3, atol=1e-5)


def test_each_graph_trains_the_parameters_that_its_passes_train(updated: Any) -> None:
    """A parameter without a gradient is not updated: its moments stay as they are."""

    def long_sources_do_not_train(model: Any) -> None:
        model.encoder[0].feed_forward.register_forward_hook(
            lambda layer, inputs, output: output.detach() if output.shape[1] == 12 else output
        )

    wanted, _, computed = updated(small(), change=long_sources_do_not_train)
    found, _, repeated = updated(small(), record_operations, change=long_sources_do_not_train)
    name = "encoder.0.feed_forward.outer.weight"
    steps = []
    for updater in (computed, repeated):
        weight = dict(updater.model.named_parameters())[name]
        steps.append(int(updater.optimizer.state[weight]["step"]))
    assert steps == [sum(source == 7 for _, source, _ in SHAPES)] * 2
    torch.testing.assert_close(found[name], wanted[name], rtol=0.0, atol=1e-5)


def test_passes_are_computed_if_they_cannot_be_recorded(updated: Any) -> None:
    def refuse(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        compute()
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")

    said: list[str] = []
    wanted, totals, _ = updated(small())
    found, other_totals, updater = updated(small(), refuse, say=said.append)
    assert said == ["training continues without CUDA graphs: operation not permitted when stream is capturing"]
    assert updater.recorded_shapes == 0
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-5)
    np.testing.assert_allclose(other_totals, totals, rtol=1e-5)


def test_graphs_are_given_up_before_a_batch_is_halved(updated: Any) -> None:
    """Their memory may be what a computed pass lacks."""
    said: list[str] = []
    passes = iter(range(100))

    def short_of_memory_once(model: Any) -> None:
        def fail(*given: Any) -> None:
            if next(passes) == 2:  # after a pass of the first shape and its recording
                raise torch.OutOfMemoryError("CUDA out of memory")

        model.encoder[0].register_forward_pre_hook(fail)

    wanted, _, _ = updated(small())
    found, _, updater = updated(small(), record_operations, say=said.append, change=short_of_memory_once)
    assert said == ["training continues without CUDA graphs: they take too much memory"]
    assert updater.max_batch_size is None
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-5)


def test_a_recording_that_lacks_memory_is_tried_again_after_a_release(updated: Any) -> None:
    attempts: list[int] = []

    def record(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        attempts.append(1)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return record_operations(compute)

    _, _, updater = updated(small(), record)
    assert updater.recorded_shapes == 2
    assert len(attempts) == 3


def test_only_so_many_shapes_are_recorded(updated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "MOST", 1)
    wanted, _, _ = updated(small())
    found, _, updater = updated(small(), record_operations)
    assert updater.recorded_shapes == 1
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-5)


def test_rows_that_are_not_real_do_not_count() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(40, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    target, real = torch.randint(0, 30, (20,)), torch.rand(20) < 0.6
    for twice in (False, True):
        rows = slice(None) if twice else slice(20)
        mask, gold = (each.repeat(2) if twice else each for each in (real, target))
        compute: Any = partial(r_drop_loss, alpha=2.0) if twice else token_loss
        gradients, losses = [], []
        for chosen, given in ((slice(None), {"real": mask}), (mask, {})):
            loss = compute(hidden[rows][chosen], weight, gold[chosen], smoothing=0.1, **given)
            gradients.append(torch.autograd.grad(loss.objective, (hidden, weight)))
            numbers = loss.objective.detach(), loss.nll.sum(), loss.tokens, loss.divergence
            losses.append([float(number) for number in numbers])
        np.testing.assert_allclose(*losses, rtol=1e-5)
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_kept_values_live_as_long_as_the_recording() -> None:
    made: list[int] = []

    @kept(1)
    def numbers(count: int) -> Tensor:
        made.append(count)
        return torch.arange(count)

    total = torch.zeros(3, dtype=torch.long)
    numbers(3)
    _, run = recorded(record_operations, lambda: total.add_(numbers(3)))
    place = numbers(3).data_ptr()
    numbers(4)  # drops the first
    others = [torch.full((3,), 9) for _ in range(50)]
    assert place not in {other.data_ptr() for other in others}
    run()
    run()
    assert total.tolist() == [0, 2, 4]
    with pytest.raises(RuntimeError, match="numbers has no kept result"):
        recorded(record_operations, lambda: total.add_(numbers(3)))
    assert numbers(3).tolist() == [0, 1, 2]  # what was made in the recording is not kept
    assert made == [3, 4, 3, 3]


def test_copies_from_the_host_are_not_recorded() -> None:
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        recorded(record_operations, lambda: to_device(torch.ones(2), CPU))
    assert to_device(torch.ones(2), CPU).tolist() == [1.0, 1.0]


def test_a_recording_shares_padding_only_within_itself() -> None:
    valid = torch.tensor([[True, True, False]])
    outside = padding_bias(valid, torch.float32)
    inside: list[Tensor] = []

    def compute() -> None:
        inside.extend(padding_bias(valid, torch.float32) for _ in range(2))

    recorded(record_operations, compute)
    after = padding_bias(valid, torch.float32)
    assert inside[0] is inside[1]
    assert outside is not inside[0]
    assert after.flatten().tolist() == [0.0, 0.0, -torch.inf]


@pytest.mark.parametrize("fault", ["", "inputs", "gradients"])
def test_graphs_are_used_only_with_the_gradient_of_computed_passes(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A recorder that does not see new inputs, or whose passes give another gradient, is not chosen."""

    def record(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        results, run = record_operations(compute)
        return results, (lambda: None) if fault == "gradients" else run

    model = build_model(small(), source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY)
    ways = [Precision("float32", CPU), Precision("float32", CPU, graphs=True)]
    monkeypatch.setattr(update, "RecordedPasses", partial(RecordedPasses, record=record))
    if fault == "inputs":
        monkeypatch.setattr(torch, "_foreach_copy_", lambda to, values: None)
    said: list[str] = []
    precision_choice.measure_precisions(small(), model, [work(1), work(1), work(2)], World("cpu"), ways, said.append)
    assert bool(said) == bool(fault)
