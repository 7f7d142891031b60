"""Parameters that are frozen by name."""

import pytest
import torch

from mtkit.errors import RecipeError
from mtkit.model.adaptation import freeze, frozen_state, trained_names, trained_state
from mtkit.model.build import build_model
from mtkit.model.network import Network
from tests.training.conftest import tiny


def network(**model: object) -> Network:
    recipe = tiny(model={"encoder_layers": 2, "decoder_layers": 2, **model})
    return build_model(recipe, source_vocabulary=24, target_vocabulary=24)


def every(model: Network) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("names", "prefixes"),
    [
        (["embeddings"], ("source_embedding.", "target_embedding.")),
        (["encoder"], ("encoder.", "encoder_norm.")),
        (["decoder"], ("decoder.", "decoder_norm.")),
        (["encoder.0", "decoder.layers.1"], ("encoder.0.", "decoder.1.")),
        (["encoder.1.feed_forward", "output_bias"], ("encoder.1.feed_forward.", "output_bias")),
        (["output"], ("output.", "output_bias")),
        (["decoder.0.cross_attention.q_proj.weight"], ("decoder.0.cross_attention.q_proj.weight",)),
    ],
)
@pytest.mark.parametrize("tie", ["none", "all"])
def test_names_stand_for_groups_modules_and_parts(names: list[str], prefixes: tuple[str, ...], tie: str) -> None:
    model = network(tie=tie, output_bias=True)
    freeze(model, names)
    assert trained_names(model) == {name for name in every(model) if not name.startswith(prefixes)}
    assert frozen_state(model).keys() == every(model) - trained_names(model)
    assert frozen_state(model).keys() ^ trained_state(model).keys() == model.state_dict().keys()


def test_a_part_is_frozen_wherever_it_occurs() -> None:
    model = network()
    freeze(model, ["feed_forward", "cross_attention.q_proj"])
    frozen = every(model) - trained_names(model)
    assert {name for name in every(model) if ".feed_forward." in name} < frozen
    assert {name for name in frozen if ".feed_forward." not in name} == {
        f"decoder.{layer}.cross_attention.q_proj.{what}" for layer in range(2) for what in ("weight", "bias")
    }


def test_the_recurrent_model_has_the_same_groups() -> None:
    model = build_model(tiny(model={"architecture": "rnn"}), source_vocabulary=24, target_vocabulary=24)
    freeze(model, ["embeddings", "encoder"])
    assert {name.partition(".")[0] for name in every(model) - trained_names(model)} == {
        "source_embedding", "target_embedding", "encoder",
    }  # fmt: skip
    freeze(network(architecture="rnn"), ["attention", "cells.0"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["encode"], r"no parameters 'encode' \(did you mean 'encoder'\?\); name a group"),
        (["decoder", "encoder.7"], r"no parameters 'encoder.7' \(did you mean 'encoder.1'\?\)"),
        (["feedforward"], r"did you mean 'feed_forward'"),
        (["output"], r"no parameters 'output'; name a group \(embeddings, encoder, decoder\), a layer"),  # it is tied
        (["coder"], r"no parameters 'coder'"),  # whole parts alone
        ([""], r"no parameters ''"),
        (["embeddings", "encoder", "decoder"], r"leaves nothing to train; leave a name out"),
    ],
)
def test_a_name_of_nothing_is_refused_with_the_nearest(names: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        freeze(network(), names)


def test_a_group_that_the_model_has_is_named() -> None:
    named = r"'outputs' \(did you mean 'output'\?\); name a group \(embeddings, encoder, decoder, output\), a layer"
    with pytest.raises(RecipeError, match=named):
        freeze(network(tie="none"), ["outputs"])


def test_a_frozen_encoder_has_no_backward_pass() -> None:
    model = network(dropout=0.0)
    freeze(model, ["embeddings", "encoder"])
    source = torch.randint(5, 20, (2, 6))
    assert not model.encode(source).memory.requires_grad
    output = model(source, source)
    output.hidden.sum().backward()
    assert {name for name, each in model.named_parameters() if each.grad is not None} <= trained_names(model)
