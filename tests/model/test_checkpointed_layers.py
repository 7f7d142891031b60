"""Activation checkpointing: the same gradients to the bit for every mechanism, and less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.registry import mechanisms
from mtkit.errors import RecipeError
from mtkit.model.build import build_model
from mtkit.model.network import Network, Output
from mtkit.model.recomputed_norms import norms_recomputed
from mtkit.recipe import Recipe, make_recipe
from tests.model.test_reversible import kept_bytes

SIZES = {
    **{"d_model": 32, "heads": 4, "feed_forward": 48, "encoder_layers": 2, "decoder_layers": 2, "max_length": 40},
    **{"dropout": 0.1, "attention_dropout": 0.1},
}


def recipe(attention: dict[str, str] | None = None, **model: Any) -> Recipe:
    return make_recipe({"model": SIZES | model, "attention": attention or {}})


def build(*arguments: Any, **model: Any) -> Network:
    return build_model(recipe(*arguments, **model), source_vocabulary=24, target_vocabulary=24, tasks=2).train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "source": torch.randint(4, 24, (3, 11), generator=generator),
        "target_in": torch.randint(4, 24, (3, 8), generator=generator),
        "source_valid": torch.arange(11) < torch.tensor([[11], [6], [9]]),
        "target_valid": torch.arange(8) < torch.tensor([[8], [5], [3]]),
        "task": torch.tensor([0, 1, 1]),
    }


def passes(model: Network, checkpointed: bool, dtype: torch.dtype | None) -> tuple[Output, dict[str, Tensor | None]]:
    """The output of a forward and backward pass, and the gradients."""
    model.checkpoints_activations = checkpointed
    model.zero_grad()
    torch.manual_seed(7)
    cpu = torch.device("cpu")
    with torch.autocast("cpu", dtype, enabled=dtype is not None), norms_recomputed(cpu):
        output = model(**batch())
    objective = output.hidden.float().square().sum() + sum(3.0 * loss for loss in output.losses.values())
    if output.log_prob is not None:
        objective = objective + output.log_prob.sum()
    objective.backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


CASES = [
    *((name, None) for name in sorted(mechanisms())),
    *((name, torch.bfloat16) for name in ("full", "band", "performer", "reformer", "routing", "sac", "ssd")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradients_and_statistics_are_the_same(name: str, dtype: torch.dtype | None) -> None:
    attention = dict.fromkeys(mechanisms()[name].roles, name)
    found = []
    for checkpointed in (False, True):
        model = build(attention)
        output, gradients = passes(model, checkpointed, dtype)
        found.append((output.hidden, output.losses, output.log_prob, gradients, dict(model.named_buffers())))
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


def test_layers_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = build(), 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    model.decoder[0].register_forward_pre_hook(count)  # type: ignore[index, operator, union-attr]
    passes(model, False, None)
    assert runs == 1
    passes(model, True, None)
    assert runs == 1 + 2


def test_a_layer_keeps_its_input_and_nothing_else() -> None:
    def kept(layers: int) -> int:
        model = build(encoder_layers=layers, decoder_layers=layers)
        model.checkpoints_activations = True
        return kept_bytes(model, batch())

    source, target = (batch()[side].numel() for side in ("source", "target_in"))
    assert kept(8) - kept(2) == (8 - 2) * (source + target) * SIZES["d_model"] * 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"architecture": "rnn", "attention_dropout": 0.0}, "needs model.architecture = transformer"),
        ({"reversible": True}, "leave training.checkpoint_activations out"),
    ],
)
def test_models_without_such_layers_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_recipe({"model": SIZES | model, "training": {"checkpoint_activations": True}})
