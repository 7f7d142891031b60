"""Sums over processes give what one process computes."""

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from mtkit.data.epochs import plan
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.errors import RunError
from mtkit.recipe import Recipe, make_recipe
from mtkit.training.checkpoint import read_progress, verified_tensors
from mtkit.training.optimization import gradient_reduction
from mtkit.training.optimization.gradient_reduction import FlatReduction, OverlappedReduction, build_reduction
from mtkit.training.train import train
from mtkit.training.world import World
from tests.processes import together
from tests.training.conftest import TINY


def trained(recipe: Recipe, folder: Path, overlapped: bool = False) -> list[str]:
    """Trains, and gives what is said; where asked, sums overlap the backward pass as they do on GPUs."""
    if overlapped:
        gradient_reduction.OVERLAPPED = ("cpu",)
    said: list[str] = []
    train(recipe, open_prepared(recipe.data.folder), folder, command=["mtkit"], device="cpu", say=said.append)
    return said


@pytest.mark.parametrize(
    ("processes", "overlapped", "changes"),
    [
        pytest.param(2, False, {}, id="flat"),
        pytest.param(
            2, False, {"freeze": ["embeddings", "decoder.0.self_attention"]}, id="flat-frozen", marks=pytest.mark.slow
        ),
        pytest.param(2, True, {"freeze": ["embeddings", "decoder.0.self_attention"]}, id="overlapped-frozen"),
        pytest.param(3, True, {}, id="overlapped", marks=pytest.mark.slow),
        pytest.param(2, False, {"optimizer": "muon"}, id="muon"),
        pytest.param(2, False, {"shard": True, "ema": 0.9, "average_last": 2}, id="split"),
        pytest.param(
            3, False, {"shard": True, "freeze": ["embeddings", "decoder.0.self_attention"]}, id="split-frozen"
        ),
    ],
)
def test_processes_give_what_one_gives_on_the_same_global_batches(
    processes: int, overlapped: bool, changes: dict[str, Any], prepared: Prepared, tmp_path: Path
) -> None:
    # small batches, so that some hold one segment and leave a process nothing to do
    training = TINY["training"] | {"batch_tokens": 40, "max_updates": 12, "accumulate": 2, "ema": 0.0}
    training |= {"weight_decay": 0.1, "clip_norm": 0.5, **changes}
    model = TINY["model"] | {"dropout": 0.0}
    recipe = make_recipe(TINY | {"training": training, "model": model, "data": {"folder": str(prepared.folder)}})
    sizes = [len(rows) for rows in plan(prepared.train, batch_tokens=40, max_length=1024, seed=1, epoch=0)[:24]]
    assert 1 in sizes
    first, *others = together(processes, trained, recipe, tmp_path / "all", overlapped)
    assert sum("update 8: validation loss" in line for line in first) == 1
    assert not any(others), "only the first process speaks"
    trained(recipe, tmp_path / "one")
    name = "update-00000012"
    several, one = tmp_path / "all" / "checkpoints" / name, tmp_path / "one" / "checkpoints" / name
    assert read_progress(several).tokens == read_progress(one).tokens
    assert (several.parent / "base").is_dir() == ("freeze" in changes)
    files = [(several, one, "model")]
    if "ema" in changes:
        files.append((several, one, "ema"))
    if "average_last" in changes:
        files.append((several.parent / "average", one.parent / "average", "model"))
    for theirs, ours, name in files:
        found, wanted = verified_tensors(theirs, name), verified_tensors(ours, name)
        assert found.keys() == wanted.keys()
        # a key's bias cancels in the softmax: its gradient is nothing but rounding, which Adam scales up to whole steps
        for weight in [each for each in wanted if not each.endswith("k_proj.bias")]:
            torch.testing.assert_close(found[weight], wanted[weight], rtol=0.0, atol=1e-5, msg=f"{name}/{weight}")


def sums_are_right(kind: type[FlatReduction] | type[OverlappedReduction]) -> None:
    """Of three updates the second leaves the last process without rows."""
    gradient_reduction.OVERLAPPED = ("cpu",) if kind is OverlappedReduction else ()
    torch.manual_seed(1)
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([used, unused])
    rows = torch.randn(6, 5, 4)

    def objective(x: Tensor) -> Tensor:
        value: Tensor = used(x).square().sum()
        return value

    wanted = torch.autograd.grad(torch.stack([objective(each) for each in rows]).sum(), list(used.parameters()))
    with World("cpu") as world:
        for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-2)):
            sum_of = build_reduction(model, world, dtype)
            assert type(sum_of) is kind
            for processes in (world.size, world.size - 1, world.size):
                model.zero_grad()
                mine = rows[world.rank :: processes] if world.rank < processes else rows[:0]
                for place, each in enumerate(mine):
                    sum_of.backward(objective(each), last=place == len(mine) - 1)
                if not len(mine):
                    sum_of.backward(None, last=True)
                totals = torch.tensor([1.0, float(len(mine))])
                sum_of.finish(totals)
                assert totals.tolist() == [world.size, 6.0]
                found = [each.grad for each in used.parameters() if each.grad is not None]
                errors = [
                    float((ours - right).norm() / right.norm()) for ours, right in zip(found, wanted, strict=True)
                ]
                assert max(errors) < tolerance, (dtype, processes, errors)
                assert dtype == "float32" or max(errors) > 1e-5, "nothing was rounded"
                if kind is FlatReduction:  # as in one process
                    assert all(each.grad is None for each in unused.parameters())
                else:
                    assert all(each.grad is not None and not each.grad.any() for each in unused.parameters())


@pytest.mark.parametrize("kind", [FlatReduction, OverlappedReduction])
def test_sums_hold_without_rows_without_a_part_and_in_bfloat16(
    kind: type[FlatReduction] | type[OverlappedReduction],
) -> None:
    together(3, sums_are_right, kind)


class Full(torch.autograd.Function):
    """Memory gives out in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def memory_gives_out() -> None:
    with World("cpu") as world:
        weight = nn.Parameter(torch.ones(2))
        sum_of = OverlappedReduction([weight], world, torch.float32)
        with pytest.raises(torch.OutOfMemoryError):  # can be made again in halves
            sum_of.backward(Full.apply(weight.sum()), last=False)  # type: ignore[no-untyped-call]
        with pytest.raises(RunError, match="in a backward pass while its gradients were being summed"):
            sum_of.backward(Full.apply(weight.sum()), last=True)  # type: ignore[no-untyped-call]


def what_holds_the_group() -> bool:
    """Whether what a sum holds of PyTorch's outlives the group; the sum itself does."""
    with World("cpu") as world:
        sum_of = OverlappedReduction([nn.Parameter(torch.ones(2))], world, torch.float32)
        held = ref(sum_of._ddp.reducer)
    return held() is not None


def test_a_sum_lets_go_of_the_processes_before_they_part() -> None:
    # the last to let go waits for threads that wait for it: a training hung at its end
    assert together(2, what_holds_the_group) == [False, False]


def test_memory_that_gives_out_during_a_sum_is_one_clear_error() -> None:
    together(2, memory_gives_out)
