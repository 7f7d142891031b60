import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mtkit.attention import build
from mtkit.errors import RunError
from mtkit.recipe import TrainingSettings
from mtkit.training.optimization.optimizer import (
    build_optimizer,
    clip_gradients,
    optimizer_tensors,
    restore_optimizer,
    take_step,
)
from mtkit.training.precision import Precision, best_precision

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def give_gradients(model: nn.Module, scale: float = 1.0) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, scale * (number + 1))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def step(
    model: nn.Module, optimizer: torch.optim.AdamW, *, finite: bool = True, clip: float = 0.0
) -> tuple[float, bool]:
    precision = Precision("float32", CPU)
    norm = clip_gradients(optimizer, precision, clip)
    applied = take_step(optimizer, precision, rate=0.1, norm=norm, finite=torch.tensor(finite))
    return float(norm), bool(applied)


def test_only_matrices_decay() -> None:
    model = network()
    optimizer = build_optimizer(model, TrainingSettings(weight_decay=0.5))
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(model, optimizer)
    for old, new in zip(before, weights(model), strict=True):
        expected = old * (1 - 0.1 * 0.5) if old.dim() == 2 else old
        torch.testing.assert_close(new, expected)


@pytest.mark.parametrize(
    ("mechanism", "options", "names"),
    [
        ("gaussian", {}, {"raw_w", "raw_b"}),
        ("nadaraya-watson", {"width": "per-dim"}, {"width"}),
        ("rfa", {}, {"sigma"}),
        ("rfa", {"learn_sigma": False}, set()),
        ("etc", {}, {"biases"}),
        ("synthesizer", {"variant": "dense"}, {"bias"}),
        ("memory-compressed", {}, {"value_bias"}),
        ("full", {}, set()),
    ],
)
def test_numbers_of_each_head_do_not_decay(mechanism: str, options: dict[str, object], names: set[str]) -> None:
    model = build(mechanism, role="encoder", d_model=16, heads=2, **options)
    _, others = build_optimizer(model, TrainingSettings(weight_decay=0.5)).param_groups
    named = {id(parameter): name for name, parameter in model.named_parameters() if parameter.dim() >= 2}
    assert {named[id(each)].rpartition(".")[2] for each in others["params"] if id(each) in named} == names


def test_the_optimizer_is_fused() -> None:
    assert all(group["fused"] for group in build_optimizer(network(), TrainingSettings()).param_groups)


STEP = """
import sys, torch
from mtkit.recipe import TrainingSettings
from mtkit.training.optimization.optimizer import build_optimizer, clip_gradients, take_step
from mtkit.training.precision import Precision

model, precision = torch.nn.Linear(4, 6), Precision("float32", torch.device("cpu"))
optimizer = build_optimizer(model, TrainingSettings(optimizer=sys.argv[1]))
optimizer.zero_grad(set_to_none=True)
model(torch.ones(1, 4)).sum().backward()
norm = clip_gradients(optimizer, precision, 1.0)
before = model.weight.detach().clone()
take_step(optimizer, precision, rate=0.1, norm=norm, finite=torch.tensor(True))
assert not model.weight.equal(before)
sys.exit(bool({"torch._dynamo", "torch.distributed.fsdp", "sympy"} & {*sys.modules}))
"""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_does_not_import_the_compiler(optimizer: str) -> None:
    subprocess.run([sys.executable, "-c", STEP, optimizer], check=True)


def test_clipping_gives_the_gradient_of_that_norm_and_reports_the_one_before() -> None:
    model = network()
    give_gradients(model)
    before = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    norm, _ = step(model, build_optimizer(model, TrainingSettings()), clip=0.5)
    after = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert norm == pytest.approx(before.norm().item())
    torch.testing.assert_close(after, before * (0.5 / before.norm()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_what_is_not_finite_is_never_applied(fault: str) -> None:
    model = network()
    optimizer = build_optimizer(model, TrainingSettings())
    give_gradients(model)
    step(model, optimizer)
    before, moments = weights(model), {k: v.clone() for k, v in optimizer_tensors(model, optimizer).items()}
    give_gradients(model)
    if fault == "gradient":
        next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    _, applied = step(model, optimizer, finite=fault != "loss", clip=1.0)
    assert not applied
    assert all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))
    after = optimizer_tensors(model, optimizer)
    assert all(torch.equal(moments[name], after[name]) for name in moments)
    give_gradients(model)
    assert step(model, optimizer)[1]
    assert not any(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    one, other = network(), network()
    first, second = (build_optimizer(model, TrainingSettings()) for model in (one, other))
    for number in range(3):
        give_gradients(one, number + 0.1)
        step(one, first)
    other.load_state_dict(one.state_dict())
    restore_optimizer(other, second, {k: v.clone() for k, v in optimizer_tensors(one, first).items()}, Path("there"))
    for model, optimizer in ((one, first), (other, second)):
        give_gradients(model, 7.0)
        step(model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"exp_avg/elsewhere": torch.zeros(2)}, "exp_avg/elsewhere, which this model does not have"),
        ({"exp_avg/1.bias": torch.zeros(7)}, "exp_avg/1.bias, which this model does not have"),
        ({"exp_avg/1.bias": torch.zeros(())}, "exp_avg/1.bias, which this model does not have"),
        ({"step/1.bias": torch.zeros(6)}, "step/1.bias, which this model does not have"),
        ({"exp_avg/1.bias": torch.zeros(6, dtype=torch.float16)}, "exp_avg/1.bias as torch.float16"),
        ({"exp_avg/1.bias": torch.zeros(6, dtype=torch.int64)}, "exp_avg/1.bias as torch.int64"),
        ({"step/1.bias": torch.zeros((), dtype=torch.bool)}, "step/1.bias as torch.bool and not as torch.float32"),
        ({"step/1.bias": None}, "exp_avg, exp_avg_sq of 1.bias instead of exp_avg, exp_avg_sq, step"),
        ({"momentum/1.bias": torch.zeros(6)}, "exp_avg, exp_avg_sq, momentum, step of 1.bias instead of"),
    ],
)
def test_the_state_of_another_model_or_type_is_refused(change: dict[str, Any], says: str, kind: str) -> None:
    model, settings = network(), TrainingSettings.model_validate({"optimizer": kind})
    optimizer = build_optimizer(model, settings)
    give_gradients(model)
    step(model, optimizer)
    whole = optimizer_tensors(model, optimizer)
    restore_optimizer(model, build_optimizer(model, settings), whole, Path("there"))
    changed = {name: value for name, value in (whole | change).items() if value is not None}
    with pytest.raises(RunError, match=f"^the optimiser state in there holds {says}.*; remove there and the same"):
        restore_optimizer(model, build_optimizer(model, settings), changed, Path("there"))


def test_scaled_gradients_are_unscaled_before_they_are_clipped() -> None:
    model = network()
    precision = Precision("float16", CPU)
    assert precision.scaler is not None
    optimizer = build_optimizer(model, TrainingSettings())
    precision.scaled(sum(parameter.sum() for parameter in model.parameters())).backward()  # type: ignore[arg-type]
    count = sum(parameter.numel() for parameter in model.parameters())
    norm = clip_gradients(optimizer, precision, 1.0)
    applied = take_step(optimizer, precision, rate=0.1, norm=norm, finite=torch.tensor(True))
    assert bool(applied)
    assert float(norm) == pytest.approx(count**0.5)


def test_a_cpu_without_bfloat16_units_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert best_precision(CPU) == "float32"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert best_precision(CPU) == "bfloat16"
