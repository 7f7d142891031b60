from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared
from mtkit.model.build import build_model
from mtkit.recipe import TrainingSettings
from mtkit.training.device_batch import DeviceBatch
from mtkit.training.loss import TokenLoss, r_drop_loss, token_loss
from mtkit.training.objective import Objective
from mtkit.training.precision import Precision
from tests.training.conftest import tiny

ROWS, WIDTH, PIECES = 23, 6, 10


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(PIECES, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(PIECES, (ROWS,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk_rows", [1, 7, 23, 100])
def test_equals_torch_cross_entropy_with_its_gradients(
    case: tuple[Tensor, Tensor, Tensor], smoothing: float, chunk_rows: int
) -> None:
    hidden, weight, target = case
    loss = token_loss(hidden, weight, target, smoothing=smoothing, chunk_rows=chunk_rows)
    reference = F.cross_entropy(hidden @ weight.T, target, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss.objective, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss.nll, F.cross_entropy(hidden @ weight.T, target, reduction="none"))
    assert not loss.nll.requires_grad
    assert loss.tokens == ROWS
    ours = torch.autograd.grad(loss.objective * 0.3, (hidden, weight))
    theirs = torch.autograd.grad(reference * 0.3, (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_batch_s_loss_is_that_of_its_real_tokens(prepared: Prepared) -> None:
    size = prepared.tokenizers.target.size
    model = build_model(tiny(), source_vocabulary=size, target_vocabulary=size).eval()
    batch = make_batch(prepared.train, np.arange(4))
    assert not batch.target_valid.all()
    loaded = DeviceBatch.of(batch, torch.device("cpu"))
    output = model(**loaded.inputs)
    loss = token_loss(*model.factors(loaded.predicting(output.hidden)), loaded.target, smoothing=0.1)
    logits, target = model.logits(output.hidden)[batch.target_valid], batch.target_out[batch.target_valid]
    reference = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss.objective, reference)
    torch.testing.assert_close(loss.nll, F.cross_entropy(logits, target, reduction="none"))


@pytest.mark.parametrize("twice_over", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"architecture": "rnn", "cell": "gru"}, {"architecture": "rnn", "cell": "lstm"}]
)
def test_no_value_is_read_from_an_accelerator(
    prepared: Prepared, settings: dict[str, str], twice_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, whose tensors have no values, PyTorch raises where one is read."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # the meta device has none
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    device, size = torch.device("meta"), prepared.tokenizers.target.size
    model = build_model(tiny(model=settings), source_vocabulary=size, target_vocabulary=size).to(device)
    batch = make_batch(prepared.train, np.arange(4))
    assert not batch.source_valid.all()
    objective = Objective(TrainingSettings(label_smoothing=0.1, r_drop=1.0 if twice_over else 0.0), device)
    loaded = objective.prepare(DeviceBatch.of(batch, device))
    with Precision("float32", device).autocast():
        loss = objective(model, model(**loaded.inputs), loaded, objective.new_totals())
    loss.backward()
    assert all(each.grad is not None for each in model.parameters())


def test_the_caller_s_tensors_stay_as_they_were(case: tuple[Tensor, Tensor, Tensor]) -> None:
    before = [tensor.detach().clone() for tensor in case]
    token_loss(*case, smoothing=0.1, chunk_rows=4).objective.backward()
    assert all(torch.equal(one, other) for one, other in zip(before, case, strict=True))


def test_a_tied_weight_gets_the_gradients_of_both_uses(case: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weight, target = case
    ids = torch.arange(ROWS) % PIECES
    (ours,) = torch.autograd.grad(token_loss(F.embedding(ids, weight), weight, target, smoothing=0.1).objective, weight)
    reference = F.cross_entropy(F.embedding(ids, weight) @ weight.T, target, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(ours, torch.autograd.grad(reference, weight)[0])


def test_logits_beyond_the_range_of_exp_stay_finite() -> None:
    hidden = torch.tensor([[1e4, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 0.0]])
    loss = token_loss(hidden, weight, torch.tensor([1]), smoothing=0.1)
    torch.testing.assert_close(loss.nll, torch.tensor([2e4]))
    loss.objective.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_under_autocast_sums_are_float32_and_near_the_exact_loss(case: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight = (tensor.detach().float().requires_grad_() for tensor in case[:2])
    with torch.autocast("cpu", torch.bfloat16):
        loss = token_loss(hidden.bfloat16(), weight, case[2], smoothing=0.1, chunk_rows=5)
    assert loss.objective.dtype == loss.nll.dtype == torch.float32
    ours = torch.autograd.grad(loss.objective, (hidden, weight))
    reference = F.cross_entropy(hidden @ weight.T, case[2], label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss.objective, reference, rtol=0.01, atol=0.0)
    for one, other in zip(ours, torch.autograd.grad(reference, (hidden, weight)), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation gives, and counts the operations."""

    elements = 0
    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().size() // tensor.element_size())
        return result


def test_no_tensor_is_larger_than_one_chunk_of_logits() -> None:
    hidden, weight = torch.randn(200, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    target = torch.randint(50, (200,))
    with Largest() as chunked:
        token_loss(hidden, weight, target, smoothing=0.1, chunk_rows=20).objective.backward()
    with Largest() as whole:
        F.cross_entropy(hidden @ weight.T, target).backward()
    assert whole.elements == 200 * 50, "the probe sees tensors inside backward passes"
    assert chunked.elements == 20 * 50


@pytest.mark.parametrize("loss", [token_loss, partial(r_drop_loss, alpha=1.0)])
def test_gradients_are_freed_before_the_backward_pass_goes_on(loss: Callable[..., TokenLoss]) -> None:
    kept, alive = list[ref[Tensor]](), list[bool]()
    hidden, weight = torch.randn(8, 4, requires_grad=True) * 1.0, torch.randn(50, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(ref(x)) or x, lambda x: x):
        objective = loss(hidden, weight, torch.randint(50, (8,)), smoothing=0.1).objective
    hidden.register_hook(lambda _: alive.extend(tensor() is not None for tensor in kept))
    objective.backward()
    assert alive == [False, False]


def test_without_gradients_no_work_is_done_for_them() -> None:
    hidden, weight, target = torch.randn(9, 4), torch.randn(50, 4, requires_grad=True), torch.randint(50, (9,))
    with Largest() as training:
        token_loss(hidden, weight, target, smoothing=0.1, chunk_rows=1)
    with torch.no_grad(), Largest() as validating:
        token_loss(hidden, weight, target, smoothing=0.1, chunk_rows=1)
    assert validating.operations <= training.operations - 3 * 9


def test_batches_of_all_sizes_have_products_of_few_shapes() -> None:
    """A CPU's library compiles a bfloat16 product anew for each shape."""
    shapes = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                shapes.add(tuple(tuple(each.shape) for each in args))
            return func(*args, **(kwargs or {}))

    weight = torch.randn(PIECES, WIDTH, requires_grad=True)
    for rows in range(1, 300, 7):
        hidden = torch.randn(rows, WIDTH, requires_grad=True)
        with Products(), torch.autocast("cpu", torch.bfloat16):
            token_loss(hidden, weight, torch.zeros(rows, dtype=torch.long), smoothing=0.1, chunk_rows=128)
    assert 3 <= len(shapes) <= 2 * 3
