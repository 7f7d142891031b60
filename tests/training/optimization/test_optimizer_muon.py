"""Muon against its equations in float64, and beside AdamW."""

import pytest
import torch
from torch import Tensor, nn

from mtkit.errors import RecipeError
from mtkit.model.build import build_model
from mtkit.recipe import TrainingSettings, load_recipe, make_recipe
from mtkit.training.optimization import optimizer as optimizers
from mtkit.training.optimization.optimizer import (
    MOMENTUM,
    Optimizer,
    build_optimizer,
    clip_gradients,
    matrices_of,
    orthogonalize,
    orthogonalize_together,
    take_step,
)
from mtkit.training.optimization.schedule import build_schedule, peak_rate
from mtkit.training.precision import Precision
from mtkit.training.world import World
from tests.processes import together

CPU = torch.device("cpu")
MUON = TrainingSettings(optimizer="muon", muon_rate=0.02, peak_rate=0.1)


class Net(nn.Module):
    """Two layers, an embedding and an output projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 4)
        self.wide, self.tall = nn.Linear(6, 4), nn.Linear(4, 6)
        self.alike = nn.Linear(4, 6)
        self.output = nn.Linear(4, 7, bias=False)


def give_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for each in model.parameters():
        each.grad = torch.randn_like(each)


def update(model: nn.Module, optimizer: Optimizer, *, rate: float = 0.1, finite: bool = True) -> bool:
    precision = Precision("float32", CPU)
    norm = clip_gradients(optimizer, precision, 0.0)
    return bool(take_step(optimizer, precision, rate=rate, norm=norm, finite=torch.tensor(finite)))


def by_singular_values(matrix: Tensor) -> Tensor:
    """U p(p(p(p(p(S))))) V^T, with S in units of the matrix's norm."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_singular_values_alone_are_changed(shape: tuple[int, int]) -> None:
    matrices = torch.randn(4, *shape, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3, 7.0]).view(4, 1, 1)
    for matrix, found in zip(matrices, orthogonalize(matrices), strict=True):
        torch.testing.assert_close(found, by_singular_values(matrix), rtol=1e-9, atol=1e-9)


def test_singular_values_come_near_one() -> None:
    u, _, v = torch.linalg.svd(torch.randn(1, 40, 40, dtype=torch.float64))
    s = torch.logspace(-2, 0, 40, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(u @ s.diag() @ v))
    assert values.min() > 0.65
    assert values.max() < 1.2


def shared(matrices: Tensor, autocast: bool) -> tuple[Tensor, int]:
    """Orthogonalises in this process's world, and gives how many matrices this process itself computed with."""
    computed = []
    original = optimizers.orthogonalize

    def counted(part: Tensor) -> Tensor:
        computed.append(len(part))
        return original(part)

    optimizers.orthogonalize = counted
    with World("cpu") as world, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return orthogonalize_together(matrices, world.size), sum(computed)


@pytest.mark.parametrize(("processes", "count"), [(2, 4), (2, 5), (3, 1)])
@pytest.mark.parametrize("autocast", [False, True])
def test_processes_share_the_matrices_and_all_get_the_same(processes: int, count: int, autocast: bool) -> None:
    matrices = torch.randn(count, 6, 4)
    found = together(processes, shared, matrices, autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = orthogonalize(matrices)
    for each, computed in found:
        assert computed == -(-count // processes)
        assert torch.equal(each, found[0][0])
        torch.testing.assert_close(each, expected)


def test_the_peak_of_muons_matrices_is_muon_rate_with_every_schedule() -> None:
    for schedule, factor in (("inverse-sqrt", 0.001), ("noam", 2.0)):
        settings = MUON.model_copy(update={"schedule": schedule, "peak_rate": factor, "warmup_updates": 100})
        optimizer = build_optimizer(Net(), settings, peak=peak_rate(settings, 64))
        highest = max(build_schedule(settings, 64)(update, 0.0) for update in range(1, 300))
        assert isinstance(optimizer, optimizers.Muon)
        assert optimizer._rate * highest == pytest.approx(settings.muon_rate)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_updates_are_those_of_the_equations(decay: float) -> None:
    model = Net()
    optimizer = build_optimizer(model, MUON.model_copy(update={"weight_decay": decay}))
    matrices = [model.wide.weight, model.tall.weight, model.alike.weight]
    expected, momenta = [each.detach().double() for each in matrices], [0.0, 0.0, 0.0]
    for number, rate in enumerate((0.1, 0.05)):
        give_gradients(model, number)
        for place, matrix in enumerate(matrices):
            gradient = matrix.grad.double()  # type: ignore[union-attr]
            momenta[place] = MOMENTUM * momenta[place] + (1 - MOMENTUM) * gradient
            ahead = MOMENTUM * momenta[place] + (1 - MOMENTUM) * gradient
            rows, columns = matrix.shape
            own = rate / 0.1 * 0.02 * max(1, rows / columns) ** 0.5
            expected[place] = (1 - rate * decay) * expected[place] - own * by_singular_values(ahead)
        assert update(model, optimizer, rate=rate)
    for matrix, wanted in zip(matrices, expected, strict=True):
        torch.testing.assert_close(matrix.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_all_else_is_updated_by_adamw() -> None:
    one, other = Net(), Net()
    pairs = [(one, build_optimizer(one, MUON)), (other, build_optimizer(other, TrainingSettings(peak_rate=0.1)))]
    for model, optimizer in pairs:
        for number in range(3):
            give_gradients(model, number)
            update(model, optimizer)
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) is (name not in ("wide.weight", "tall.weight", "alike.weight")), name


def test_an_update_that_is_not_finite_leaves_momentum_and_weights() -> None:
    model, twin = Net(), Net()
    settings = MUON.model_copy(update={"weight_decay": 0.3})
    optimizer, plain = build_optimizer(model, settings), build_optimizer(twin, settings)
    for number in range(4):
        give_gradients(model, number)
        if number == 2:
            model.tall.weight.grad[1, 1] = torch.nan  # type: ignore[index]
            assert not update(model, optimizer)
        elif number == 1:
            assert not update(model, optimizer, finite=False)
        else:
            assert update(model, optimizer)
            give_gradients(twin, number)
            update(twin, plain)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_lower_precision_an_update_is_near_that_in_float32(precision: str) -> None:
    found = []
    for name in ("float32", precision):
        model, how = Net(), Precision(name, CPU)
        optimizer, before = build_optimizer(model, MUON), model.tall.weight.detach().clone()
        give_gradients(model, 0)
        if how.scaler is not None:
            how.scaled(torch.zeros(()))  # scales are made by the first loss
            for each in model.parameters():
                each.grad = each.grad * how.scaler.get_scale()  # type: ignore[operator]
        norm = clip_gradients(optimizer, how, 0.0)
        take_step(optimizer, how, rate=0.1, norm=norm, finite=torch.tensor(True))
        found.append(model.tall.weight.detach() - before)
    assert not torch.equal(*found)
    assert (found[0] - found[1]).norm() < 0.05 * found[0].norm()


@pytest.mark.parametrize("other", [{"lora": {"rank": 2}, "init_from": "base"}, {"shard": True}])
def test_what_splits_matrices_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=f"muon updates whole matrices; leave training.{next(iter(other))} out"):
        make_recipe({"training": {"optimizer": "muon", **other}})


@pytest.mark.parametrize("kind", ["transformer", "rnn"])
@pytest.mark.parametrize("tie", ["all", "none"])
def test_the_matrices_of_a_network_are_those_of_its_layers(kind: str, tie: str) -> None:
    settings = {"model": {"architecture": kind, "d_model": 16, "heads": 2, "feed_forward": 24, "tie": tie}}
    model = build_model(load_recipe(None, settings), source_vocabulary=30, target_vocabulary=30)
    own = {id(each) for each in matrices_of(model)}
    names = [name for name, each in model.named_parameters() if id(each) in own]
    assert names
    assert not [name for name in names if "embedding" in name or name.startswith("output")]
    if kind == "transformer":
        layers = len(model.encoder) + len(model.decoder)  # type: ignore[arg-type]
        assert len(names) == 4 * layers + 4 * len(model.decoder) + 2 * layers  # type: ignore[arg-type]
    frozen = matrices_of(model)[1].requires_grad_(False)
    assert all(each is not frozen for each in matrices_of(model))
    assert len(matrices_of(model)) == len(names) - 1
