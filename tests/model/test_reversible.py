"""Reversible layers: gradients of the ordinary form, memory that does not grow with depth, what they refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.errors import MtkitError, RecipeError
from mtkit.model.build import build_model
from mtkit.model.layers import Context, StackPass
from mtkit.model.network import Network, Output
from mtkit.model.sublayers import from_stream, to_stream
from mtkit.model.transformer import Transformer
from mtkit.recipe import Recipe, make_recipe

SIZES = {"d_model": 32, "heads": 4, "feed_forward": 48, "encoder_layers": 3, "decoder_layers": 2, "max_length": 40}


def recipe(name: str = "full", *, model: dict[str, Any] | None = None, **options: Any) -> Recipe:
    attention: dict[str, Any] = {"encoder": name, "decoder": name, "options": options}
    return make_recipe({"model": SIZES | {"reversible": True} | (model or {}), "attention": attention})


def build(*arguments: Any, **options: Any) -> Transformer:
    return build_model(recipe(*arguments, **options), source_vocabulary=24, target_vocabulary=24)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(5)
    lengths = torch.tensor([11, 6, 9])
    return {
        "source": torch.randint(4, 24, (3, 11)),
        "target_in": torch.randint(4, 24, (3, 8)),
        "source_valid": torch.arange(11) < lengths[:, None],
        "target_valid": torch.arange(8) < torch.tensor([[8], [5], [3]]),
    }


def ordinary(model: Transformer, inputs: dict[str, Tensor]) -> Output:
    """The same two streams, every activation kept for autograd."""
    stack_pass, settings = StackPass(), model.settings
    x = to_stream(model.source_embedding(inputs["source"]), settings)
    for layer in model.encoder:
        x = layer(x, stack_pass, valid=inputs["source_valid"], task=None)
    memory = model.encoder_norm(from_stream(x))
    context = Context(memory, inputs["source_valid"], None, inputs["target_valid"], None)
    x = to_stream(model.target_embedding(inputs["target_in"]), settings)
    for layer in model.decoder:
        x = layer(x, stack_pass, context)
    return Output(model.decoder_norm(from_stream(x)), stack_pass.losses or {}, stack_pass.log_prob)


def gradients(model: Transformer, output: Output, weight: Tensor) -> list[Tensor]:
    """With respect to all parameters, of the hidden vectors, the losses and the log-probability together."""
    objective = (output.hidden * weight).sum() + sum(3.0 * loss for loss in output.losses.values())
    if output.log_prob is not None:
        objective = objective + output.log_prob.sum()
    model.zero_grad()
    objective.backward()
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full", {}),
        ("band", {"window_radius": 3}),
        ("reformer", {"lsh_buckets": 4, "chunk": 3, "rounds": 2}),
        ("routing", {"clusters": 3, "window": 3, "commitment": 0.1}),
        ("full", {"regularizer": {"name": "disagreement", "types": "output"}}),
        ("sac", {"edges": 3, "weight": 0.5}),
        ("sac", {"edges": 3, "weight": 0.5, "share": "model"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_are_those_of_the_ordinary_form(name: str, options: dict[str, Any], dropout: float) -> None:
    """Of losses raised inside too, and with the dropout of the first time."""
    rates = dict.fromkeys(("dropout", "activation_dropout", "attention_dropout"), dropout)
    model = build(name, model=rates, **options).double().train()
    inputs, weight = batch(), torch.randn(3, 8, 32).double()
    results = []
    for run in (lambda: model(**inputs), lambda: ordinary(model, inputs)):
        torch.manual_seed(9)
        output = run()
        results.append([output.hidden, *output.losses.values(), *gradients(model, output, weight)])
    assert bool(output.losses) == (name == "routing" or "regularizer" in options)
    moved = [n for n, each in model.named_parameters() if each.grad is not None and each.grad.abs().sum() > 0]
    for part in ("encoder.2.attention", "decoder.1.cross_attention", "predictor" if name == "sac" else ""):
        assert any(part in each for each in moved)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("name", "options"), [("hard-coded", {}), ("synthesizer", {"variant": "random"})])
def test_an_attention_that_reads_its_query_s_length_alone_has_the_gradients(name: str, options: dict[str, Any]) -> None:
    chosen = make_recipe({**recipe().model_dump(), "attention": {"cross": name, "options": options}})
    model = build_model(chosen, source_vocabulary=24, target_vocabulary=24).double().train()
    inputs, weight = batch(), torch.randn(3, 8, 32).double()
    results = []
    for run in (lambda: model(**inputs), lambda: ordinary(model, inputs)):
        torch.manual_seed(9)
        output = run()
        results.append([output.hidden, *gradients(model, output, weight)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"), [("full", {}), ("reformer", {"lsh_buckets": 1, "chunk": 3}), ("luna", {"memory": "local"})]
)
def test_gradients_are_whole_where_the_backward_pass_runs_under_autocast(name: str, options: dict[str, Any]) -> None:
    """Its cache holds weights of the first pass, which have no graph."""
    model, inputs = build(name, **options).train(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
        ours = gradients(model, output, torch.ones_like(output.hidden))
    assert not [name for (name, _), each in zip(model.named_parameters(), ours, strict=True) if not each.abs().sum()]


def test_streams_rebuilt_in_float32_give_gradients_as_good_as_kept_ones() -> None:
    """Of twelve layers in all; the drift of subtracting what was added."""
    model, inputs = build(model={"encoder_layers": 6, "decoder_layers": 6, "dropout": 0.0}).train(), batch()
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.2)
    exact = gradients(model, ordinary(model, inputs), torch.ones(3, 8, 32))
    for ours, theirs in zip(gradients(model, model(**inputs), torch.ones(3, 8, 32)), exact, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-5


def test_statistics_are_gathered_once() -> None:
    model = build("routing", clusters=3, window=3).train()
    counted = []
    for run in (lambda inputs: model(**inputs), lambda inputs: ordinary(model, inputs)):
        for _, attention in model.attentions():
            if hasattr(attention, "centroids"):
                attention.centroids.new_mass.zero_()
        output = run(batch())
        gradients(model, output, torch.ones_like(output.hidden))
        counted.append(torch.stack([a.centroids.new_mass for _, a in model.attentions() if hasattr(a, "centroids")]))
    assert counted[0].sum() > 0
    torch.testing.assert_close(*counted)


def kept_bytes(model: Network, inputs: dict[str, Tensor]) -> int:
    """Bytes that autograd keeps from a forward pass, parameters aside."""
    own, kept = {each.data_ptr() for each in model.parameters()}, {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)
    assert output.hidden.requires_grad
    return sum(kept.values())


def test_activation_memory_does_not_grow_with_depth() -> None:
    def kept(layers: int, reversible: bool) -> int:
        sizes = {"encoder_layers": layers, "decoder_layers": layers, "reversible": reversible, "dropout": 0.0}
        return kept_bytes(build(model=sizes).train(), batch())

    assert kept(8, True) == kept(2, True)
    assert kept(8, False) > 3 * kept(2, False)


def test_steps_give_what_forward_gives() -> None:
    model, inputs = build().double().eval(), batch()
    with torch.no_grad():
        hidden = model(**inputs | {"target_valid": None}).hidden
        state = model.start(model.encode(inputs["source"], inputs["source_valid"]))
        for place, token in enumerate(inputs["target_in"].split(1, dim=1)):
            logits, state, _ = model.step(token, state)
            expected = (hidden[:, place] @ model.output_weight.T).float()
            torch.testing.assert_close(logits.whole()[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_numbers_are_the_same() -> None:
    model, inputs = build().double().eval(), batch()
    with torch.no_grad():
        hidden = model(**inputs).hidden
    torch.testing.assert_close(model(**inputs).hidden, hidden, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", ["realformer", "luna", "bp", "predictive"])
def test_what_carries_is_refused_by_name(name: str) -> None:
    with pytest.raises(MtkitError, match=f"attention '{name}' has a carry"):
        build(name)


def test_an_option_that_carries_nothing_is_taken() -> None:
    assert build("luna", memory="local").settings.reversible


def test_post_norm_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model.reversible = true needs model.norm = pre"):
        recipe(model={"norm": "post"})


def test_weights_have_the_names_of_ordinary_layers() -> None:
    assert build().state_dict().keys() == build(model={"reversible": False}).state_dict().keys()
