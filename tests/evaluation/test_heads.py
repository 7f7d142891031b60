"""Entropy, distance and cost of heads against loops over single segments, and against models without a head."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mtkit.attention.mixed_heads import MixedHeads
from mtkit.data.prepared import Side
from mtkit.errors import DataError, RunError
from mtkit.evaluation.head_passes import switched_off
from mtkit.evaluation.heads import (
    Heads,
    LayerHeads,
    _LayerSums,
    attentions_of,
    entropies,
    examine,
    sample_rows,
    validation_side,
)
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import make_recipe
from mtkit.runs import Run
from mtkit.text.tokenizer import BOS, EOS
from tests.decoding.trained import Trained, make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("runs"))


def network(trained: Trained, **attention: Any) -> Network:
    """A network for the run's data with other attention and weights that matter."""
    recipe = make_recipe(
        {
            "model": {
                "d_model": 32,
                "heads": 4,
                "feed_forward": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "max_length": 24,
            },
            "attention": attention,
        }
    )
    torch.manual_seed(3)
    sizes = trained.run.about["vocabularies"]
    made = build_model(recipe, source_vocabulary=sizes["source"], target_vocabulary=sizes["target"], tasks=1).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5).add_(0.05 * torch.randn_like(parameter))
    return made


def pieces(side: Side, row: int) -> tuple[Tensor, Tensor]:
    """Source and target (1, length) of a row, end marks included."""
    pair = (side.source, side.target)
    first, second = (tokens.pad(np.array([row]), int(tokens.lengths[row]) + 1, None, EOS) for tokens in pair)
    return torch.from_numpy(first), torch.from_numpy(second)


def forward(model: Network, side: Side, row: int, weights: Any = None) -> tuple[float, int]:
    """The loss of one segment by itself, and its number of pieces."""
    source, target = pieces(side, row)
    target_in = torch.cat([torch.full((1, 1), BOS), target[:, :-1]], 1)
    hidden = model.forward(source, target_in, weights=weights).hidden
    return float(nn.functional.cross_entropy(model.logits(hidden)[0], target[0], reduction="sum")), target.shape[1]


def loss(model: Network, side: Side) -> float:
    """The loss of the whole side in nats per piece."""
    sums, counts = zip(*(forward(model, side, row) for row in range(len(side))), strict=True)
    return sum(sums) / sum(counts)


@pytest.mark.parametrize("name", ["full", "dynamic-routing", "multi-query"])
@torch.no_grad()
def test_a_cost_is_the_loss_of_a_model_whose_head_has_no_values(trained: Trained, name: str) -> None:
    side, model = trained.prepared.valid, network(trained, encoder=name, decoder=name, cross=name)
    heads = examine(model, side)
    assert heads.loss == pytest.approx(loss(model, side), rel=1e-5)
    assert heads.segments == len(side)
    assert [(layer.role, layer.layer) for layer in heads.layers] == [
        (role, number) for role in ("encoder", "decoder", "cross") for number in (1, 2)
    ]
    for layer, (role, number, attention) in zip(heads.layers, attentions_of(model), strict=True):
        assert layer.cost is not None
        for head in range(4):
            saved = attention.out_proj.weight.clone()
            if name == "multi-query":  # values are shared: without its columns of out_proj
                attention.out_proj.weight[:, 8 * head : 8 * head + 8] = 0.0
                expected = loss(model, side)
                attention.out_proj.weight.copy_(saved)
            else:
                values = attention.v_proj.weight.clone(), attention.v_proj.bias.clone()
                attention.v_proj.weight[8 * head : 8 * head + 8] = 0.0
                attention.v_proj.bias[8 * head : 8 * head + 8] = 0.0
                expected = loss(model, side)
                attention.v_proj.weight.copy_(values[0])
                attention.v_proj.bias.copy_(values[1])
            cost = float(layer.cost[head])
            assert cost == pytest.approx(expected - heads.loss, abs=2e-5), (role, number, head)
            assert abs(cost) > 1e-4


@torch.no_grad()
def test_entropies_and_distances_are_means_over_real_queries(trained: Trained) -> None:
    side, model = trained.prepared.valid, network(trained)
    assert len(set(side.source.lengths.tolist())) > 1
    heads = examine(model, side, costs=False)
    sums: dict[tuple[str, int], list[list[float]]] = {}
    for row in range(len(side)):
        weights: Any = {"encoder": [], "decoder": [], "cross": []}
        forward(model, side, row, weights)
        for role, stack in weights.items():
            for layer, (maps,) in enumerate(stack, start=1):
                count, keys = maps.shape[1:]
                for head in range(4):
                    for i in range(count):
                        p = maps[head, i].double().tolist()
                        at = i * (keys - 1) / max(count - 1, 1) if role == "cross" else i
                        entropy = -sum(x * math.log(x) for x in p if x > 0)
                        distance = sum(x * abs(at - j) for j, x in enumerate(p))
                        sums.setdefault((role, layer), [[] for _ in range(4)])[head].append((entropy, distance))
    for layer in heads.layers:
        expected = torch.tensor(sums[layer.role, layer.layer]).mean(1)  # (H, 2)
        assert layer.entropy is not None
        assert layer.distance is not None
        torch.testing.assert_close(layer.entropy.float(), expected[:, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.distance.float(), expected[:, 1], rtol=1e-4, atol=1e-5)
        assert layer.cost is None


@torch.no_grad()
def test_batches_change_nothing(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    side, model = trained.prepared.valid, network(trained, encoder="luna", decoder="rfa-gated", cross="set-transformer")
    whole = examine(model, side).as_object()
    monkeypatch.setattr("mtkit.evaluation.heads.BATCH_TOKENS", 1)
    singly = examine(model, side).as_object()
    assert whole["layers"][0]["learned"]["slot use"]
    for one, other in zip(whole["layers"], singly["layers"], strict=True):
        assert one["entropy"] is None
        for name in ("cost", "cost_error"):
            assert other[name] == pytest.approx(one[name], abs=1e-5)
        for name, value in one["learned"].items():
            torch.testing.assert_close(torch.tensor(other["learned"][name]), torch.tensor(value), rtol=1e-4, atol=1e-5)


def test_the_error_of_a_cost_is_its_standard_deviation_over_samples(trained: Trained) -> None:
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(5, 40, (400,), generator=generator).double()
    more = counts * (0.1 + 0.3 * torch.randn(400, generator=generator, dtype=torch.float64))
    sums = _LayerSums(*attentions_of(network(trained))[0])
    sums.off = [[more + 50.0]]
    result = sums.finished(torch.full((400,), 50.0, dtype=torch.float64), counts)
    draws = torch.randint(400, (3000, 400), generator=generator)
    means = more[draws].sum(1) / counts[draws].sum(1)
    assert result.cost is not None
    assert result.cost_error is not None
    assert float(result.cost[0]) == pytest.approx(float(more.sum() / counts.sum()))
    assert float(result.cost_error[0]) == pytest.approx(float(means.std()), rel=0.08)


def test_one_segment_has_no_error(trained: Trained) -> None:
    layer = examine(network(trained), trained.prepared.valid, segments=1).layers[0]
    assert layer.cost is not None
    assert layer.cost_error is None


@pytest.mark.parametrize("data", [{"directions": ("en-de", "en-fr")}, {"documents": 20}])
def test_directions_and_documents(tmp_path: Path, data: dict[str, Any]) -> None:
    made = make_run(tmp_path, attention="camtl", **data)
    heads = examine(made.run.load_model(), validation_side(made.run))
    assert heads.segments == len(made.prepared.valid) > 2
    assert heads.layers[0].cost is not None
    tasks = len(data.get("directions", "-"))
    sizes = [layer.learned["map size"].shape for layer in heads.layers if layer.learned]
    assert sizes == [(1, tasks)]  # of the upper half of the encoder


@torch.no_grad()
def test_heads_come_back_on(trained: Trained) -> None:
    side, model = trained.prepared.valid, network(trained, encoder="poolingformer", decoder="average")
    before = loss(model, side)
    heads = examine(model.train(), side)
    assert model.training
    model.eval()
    assert heads.loss == pytest.approx(before, rel=1e-5)
    assert loss(model, side) == before
    assert [layer.mechanism for layer in heads.layers] == [
        *["poolingformer"] * 2,
        *["average"] * 2,
        *["full"] * 2,
    ]
    assert [layer.heads for layer in heads.layers] == [4, 4, 1, 1, 4, 4]
    average = attentions_of(model)[2][2]
    with switched_off(average, 0):
        assert not average(torch.randn(1, 3, 32)).output.any()


def test_a_recurrent_model_has_its_attention_to_the_source(tmp_path: Path) -> None:
    rnn = make_run(tmp_path, attention="additive", architecture="rnn")
    (layer,) = examine(rnn.run.load_model(), rnn.prepared.valid).layers
    assert (layer.role, layer.mechanism) == ("cross", "additive")
    assert layer.entropy is not None
    assert layer.cost is not None
    assert layer.learned["largest score"].shape == (2,)


def test_without_a_side_only_parameters_are_read(trained: Trained) -> None:
    heads = examine(network(trained, encoder="adaptive-span", decoder="rfa-gated"), None)
    assert heads.loss is None
    assert [list(layer.learned) for layer in heads.layers[:4:2]] == [["span"], ["sigma"]]
    assert all(layer.entropy is None and layer.cost is None for layer in heads.layers)


def test_numbers_that_a_head_does_not_have_are_null() -> None:
    layer = LayerHeads("encoder", 1, "routing", 2, {"use": torch.tensor([[float("nan")] * 2, [0.5, 0.5]])})
    text = json.dumps(Heads([layer], 0, 0, None).as_object(), allow_nan=False)
    assert json.loads(text)["layers"][0]["learned"] == {"use": [[None, None], [0.5, 0.5]]}


def test_a_sample_is_drawn_by_its_seed_from_what_fits(trained: Trained) -> None:
    side = trained.prepared.valid
    lengths = np.maximum(side.source.lengths, side.target.lengths) + 1
    assert sorted(sample_rows(side, 100, 1, 24).tolist()) == list(range(len(side)))
    few = [sample_rows(side, 3, seed, 24).tolist() for seed in (1, 1, 2, 3)]
    assert few[0] == few[1]
    assert len({*map(tuple, few)}) > 1
    assert lengths[sample_rows(side, 100, 1, int(lengths.max()) - 1)].max() < lengths.max()
    with pytest.raises(DataError, match="no segment of this side has at most 1 pieces"):
        sample_rows(side, 3, 1, 1)


def test_other_data_is_refused(trained: Trained, tmp_path: Path) -> None:
    other = make_run(tmp_path, vocabulary=300)
    assert len(validation_side(trained.run)) == 7
    with pytest.raises(RunError, match="has other pieces or directions than"):
        validation_side(trained.run, other.prepared.folder)
    (other.run.folder / "tokenizer/joint.model").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"joint\.model is not a readable sentencepiece model"):
        validation_side(Run(other.run.folder))


@torch.no_grad()
def test_the_heads_of_a_mix_are_counted_and_switched_off_in_order(trained: Trained) -> None:
    made = network(trained, encoder="linear:1+full:3")
    (_, _, attention), *_ = attentions_of(made)
    assert isinstance(attention, MixedHeads)
    assert LayerHeads("encoder", 1, "linear:1 + full:3", 4) == _LayerSums("encoder", 1, attention).result
    x = torch.randn(1, 5, 32)
    linear, full = (part(x).output for part in attention.parts)
    with switched_off(attention, 0):
        torch.testing.assert_close(attention(x).output, attention.parts[0].out_proj.bias + full)
    with switched_off(attention, 3):
        output = attention(x).output - linear
    with switched_off(attention.parts[1], 0), switched_off(attention.parts[1], 1):
        torch.testing.assert_close(full - output, attention.parts[1](x).output)


def test_entropies_of_heads_have_names_and_the_numbers_of_the_examination(trained: Trained) -> None:
    side, made = trained.prepared.valid, network(trained)
    found = entropies(made, side, 6)
    layers = examine(made, side, segments=6, costs=False).layers
    assert len(found) == sum(len(layer.entropy) for layer in layers if layer.entropy is not None) == 24
    assert {name.rsplit("_", 2)[0] for name in found} == {"entropy_encoder", "entropy_decoder", "entropy_cross"}
    (second,) = (layer for layer in layers if (layer.role, layer.layer) == ("cross", 2))
    assert second.entropy is not None
    assert found["entropy_cross_2_3"] == second.entropy[2]
    assert all(0 < value < math.log(24) for value in found.values())
    assert entropies(network(trained, encoder="linear", decoder="linear", cross="linear"), side, 6) == {}
