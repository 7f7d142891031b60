import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtkit.attention import Attention, build
from mtkit.attention.content import sac
from mtkit.attention.content._edge_predictor import CHUNK
from mtkit.attention.content.sac import Sac
from mtkit.errors import MtkitError
from mtkit.model.build import choose
from mtkit.model.network import build_stack
from mtkit.model.transformer import Transformer
from mtkit.recipe import AttentionSettings, ModelSettings
from mtkit.storage.weights import load_weights
from mtkit.training.checkpoint import verified_tensors, write_checkpoint
from mtkit.training.objective import Baseline
from tests.contract.cases import valid_mask
from tests.contract.counting import count

ROLES = ("encoder", "decoder", "cross")
FORMS = ({}, {"share": "head"}, {"scan": "sequence"}, {"share": "head", "scan": "sequence"})


def make(role: str = "encoder", **options: Any) -> Sac:
    """Attention of two heads of 4 with a predictor that is not indifferent."""
    attention = build("sac", role=role, d_model=8, heads=2, **({"edges": 3, "hidden": 4, "weight": 1.0} | options))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert isinstance(attention, Sac)
    return attention


def inputs(role: str, batch: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
    query = torch.randn(batch, length, 8, dtype=dtype)
    return query, torch.randn(batch, length, 8, dtype=dtype) if role == "cross" else None


def masks(role: str, valid: Tensor) -> dict[str, Tensor]:
    return {"query_valid": valid, "memory_valid": valid} if role == "cross" else {"query_valid": valid}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_an_edge_to_every_token_it_is_full_attention(role: str, options: dict[str, str], training: bool) -> None:
    attention = make(role, edges=9, **options).train(training)
    full = build("full", role=role, d_model=8, heads=2)
    full.load_state_dict({name: attention.state_dict()[name] for name in full.state_dict()})
    query, memory = inputs(role, 2, 9)
    given = masks(role, valid := valid_mask([9, 4], 9))
    ours, theirs = (each(query, memory, **given).output[valid] for each in (attention, full))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("length", [9, CHUNK + 5])
def test_log_prob_is_the_sum_over_the_choices_one_by_one(role: str, options: dict[str, str], length: int) -> None:
    attention = make(role, **options).double().train()
    query, memory = inputs(role, 2, length, torch.float64)
    given = masks(role, valid := valid_mask([length, 4], length))
    whole, literal = attention(query, memory, **given), attention.naive(query, memory, **given)
    torch.testing.assert_close(whole.output[valid], literal.output[valid])  # the same edges were drawn
    torch.testing.assert_close(whole.log_prob, literal.log_prob)
    assert (whole.log_prob < 0).all()
    weights = torch.tensor([1.0, -2.0])
    parameters = list(attention.predictor.parameters())
    one, other = (torch.autograd.grad((x.log_prob * weights).sum(), parameters) for x in (whole, literal))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{}, {"share": "head"}, {"projection": "multi-query"}])
@pytest.mark.parametrize("role", ROLES)
def test_a_mask_over_few_keys_is_the_softmax_over_their_copies(
    monkeypatch: pytest.MonkeyPatch, role: str, options: dict[str, Any]
) -> None:
    attention = make(role, **options).double()
    query, memory = inputs(role, 2, 9, torch.float64)
    given = masks(role, valid := valid_mask([9, 4], 9))
    found = []
    for most in (0, 64):
        monkeypatch.setattr(sac, "MOST_KEYS", most)
        output = attention(query, memory, **given).output[valid]
        found.append((output, torch.autograd.grad(output.square().sum(), attention.v_proj.weight)[0]))
    torch.testing.assert_close(*found)


def test_reward_trains_the_predictor_alone_and_the_task_all_but_it() -> None:
    attention = make().train()
    query = torch.randn(2, 9, 8, requires_grad=True)
    attended = attention(query)
    predictor = {f"own_predictor.{name}" for name, _ in attention.own_predictor.named_parameters()}
    attended.log_prob.sum().backward(retain_graph=True)
    assert {name for name, each in attention.named_parameters() if each.grad is not None} == predictor
    assert query.grad is None
    attention.zero_grad()
    attended.output.sum().backward()
    assert not predictor & {name for name, each in attention.named_parameters() if each.grad is not None}


@torch.no_grad()
def test_edges_are_drawn_as_often_as_the_softmax_says() -> None:
    attention = make("cross", edges=1).train()
    query, memory = torch.randn(1, 60, 8)[:, :1].expand(1, 60, 8), torch.randn(1, 4, 8)
    predictor = attention.predictor
    predictor.distance.zero_()
    candidates = predictor.candidates(memory)
    scores = predictor.opened(query)[0, 0, 0] @ candidates.keys[0, 0].T
    drawn = torch.zeros(4)
    for update in range(100):
        attention.after_update(update, 100)
        edges = predictor(query, candidates, role="cross", noise_key=attention._noise_key())
        drawn += edges.targets.flatten().bincount(minlength=4)
    expected = scores.softmax(-1)
    assert ((drawn / 6000 - expected).abs() < 4 * (expected * (1 - expected) / 6000).sqrt()).all()


@torch.no_grad()
def test_the_best_edges_are_taken_in_evaluation_and_new_ones_drawn_in_every_update() -> None:
    query = torch.randn(2, 12, 8)
    attention = make().eval()
    first = attention(query)
    attention.after_update(1, 10)
    torch.manual_seed(5)
    again = attention(query)
    assert torch.equal(first.output, again.output)
    assert first.log_prob is None
    attention.train()
    draws = []
    for update in (1, 2):
        attention.after_update(update, 10)
        draws.append(attention(query))
        assert torch.equal(attention(query).output, draws[-1].output)
    assert not torch.equal(draws[0].log_prob, draws[1].log_prob)
    restored = make().train()
    restored.load_state_dict(attention.state_dict())  # the counter of updates is saved
    assert torch.equal(restored(query).output, draws[1].output)


@torch.no_grad()
def test_noise_differs_by_seed_role_and_layer() -> None:
    sites = [{}, {"seed": 2}, {"role": "decoder"}, {"layer": 1, "layers": 2}]
    keys = {
        int(build("sac", **({"role": "encoder", "d_model": 8, "heads": 2} | site)).train()._noise_key())  # type: ignore
        for site in sites
    }
    assert len(keys) == len(sites)


def test_reward_raises_the_probability_of_the_rewarded_edge() -> None:
    """Target tokens choose one of two source tokens; the loss of the loop's baseline is all that teaches them."""
    attention = make("cross", edges=1, hidden=8).train()
    query, memory = torch.randn(4, 6, 8), torch.randn(1, 2, 8).expand(4, 2, 8)
    wanted = attention(query, memory[:, :1]).output.detach()  # what choosing the first gives
    baseline, optimizer = Baseline(torch.device("cpu")), torch.optim.Adam(attention.predictor.parameters(), lr=0.02)
    segment = torch.arange(4).repeat_interleave(6)

    @torch.no_grad()
    def share_of_first() -> float:
        predictor = attention.predictor
        keys = [torch.tensor(n) for n in range(50)]
        candidates = predictor.candidates(memory)
        drawn = [predictor(query, candidates, role="cross", noise_key=key).targets == 0 for key in keys]
        return torch.stack(drawn).float().mean().item()

    before = share_of_first()
    for update in range(1, 121):
        attended = attention(query, memory)
        nll = (attended.output - wanted).norm(dim=-1).flatten().detach()
        loss, reward = baseline.loss(attended.log_prob, nll, segment)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        baseline.follow(reward.sum(), torch.tensor(4.0))
        attention.after_update(update, 120)
    assert before < 0.8
    assert share_of_first() > 0.95


def tiny_model(**options: Any) -> Transformer:
    """Two encoder and two decoder layers, SAC in all three roles."""
    settings = ModelSettings(d_model=16, heads=2, feed_forward=16, encoder_layers=2, decoder_layers=2, dropout=0.0)
    names = {"encoder": "sac", "decoder": "sac", "cross": "sac"}
    attention = AttentionSettings(**names, options={"edges": 2, "hidden": 4, **options})
    choices = choose(attention, {"encoder": 2, "decoder": 2, "cross": 2})
    return Transformer(settings, choices, source_vocabulary=24, target_vocabulary=24)


def log_prob_of(model: Transformer) -> Tensor:
    tokens = torch.arange(4, 18).view(2, 7)
    log_prob = model(tokens, tokens).log_prob
    assert log_prob is not None
    return log_prob


def test_a_predictor_of_the_whole_model_is_one_module_saved_once(tmp_path: Path) -> None:
    model, apart = tiny_model(share="model"), tiny_model()
    own = [name for name in model.state_dict() if name.endswith("predictor.query")]
    assert len(own) == 1
    assert len([name for name in apart.state_dict() if name.endswith("predictor.query")]) == 6
    predictors = {id(attention.predictor) for _, attention in model.attentions()}  # type: ignore[attr-defined]
    assert len(predictors) == 1
    write_checkpoint(tmp_path / "checkpoint", {"model": model.state_dict()}, {"update": 1})
    torch.manual_seed(9)
    other = tiny_model(share="model")
    assert not torch.equal(log_prob_of(other), log_prob_of(model))
    load_weights(other, verified_tensors(tmp_path / "checkpoint", "model"), tmp_path)
    assert torch.equal(log_prob_of(other), log_prob_of(model))


def test_a_copy_of_a_model_has_a_predictor_of_its_own_that_all_its_layers_share() -> None:
    model = tiny_model(share="model")
    other = copy.deepcopy(model)
    (predictor,) = {attention.predictor for _, attention in other.attentions()}  # type: ignore[attr-defined]
    before = log_prob_of(model)
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.add_(1.0)
    assert torch.equal(log_prob_of(model), before)
    assert not torch.equal(log_prob_of(other), before)


def test_layers_built_alone_and_stacks_built_apart_do_not_meet() -> None:
    settings = AttentionSettings(encoder="sac", options={"share": "model"})
    choices = choose(settings, {"encoder": 2, "decoder": 1, "cross": 1})["encoder"]
    one, other = (build_stack("encoder", choices, ModelSettings(), seed=1) for _ in range(2))
    assert one[0].predictor is one[1].predictor  # type: ignore[attr-defined]
    assert one[0].predictor is not other[0].predictor  # type: ignore[attr-defined]


def test_weight_scales_the_gradient_and_not_the_log_probability() -> None:
    attention, query = make().train(), torch.randn(2, 9, 8)
    found = []
    for weight in (1.0, 0.25):
        attention.weight = weight
        log_prob = attention(query).log_prob
        found.append((log_prob.detach(), torch.autograd.grad(log_prob.sum(), attention.predictor.key.weight)[0]))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1] * 0.25, found[1][1])


@pytest.mark.parametrize("scan", ["source", "sequence"])
def test_the_entropy_bonus_is_that_of_undecided_choices(scan: str) -> None:
    attention = make(entropy=0.5, scan=scan).train()
    with torch.no_grad():
        attention.predictor.query.zero_()
        attention.predictor.distance.zero_()
    valid = valid_mask([6, 4], 6)
    loss = attention(torch.randn(2, 6, 8), query_valid=valid).losses["entropy"]
    expected = sum(n * sum(torch.tensor(float(n - 1 - t)).log() for t in range(3)) for n in (6, 4)) / 10
    torch.testing.assert_close(loss, -0.5 * expected)
    assert "entropy" not in attention.eval()(torch.randn(2, 6, 8)).losses
    assert make().train()(torch.randn(2, 6, 8)).losses == {}


@pytest.mark.parametrize(("role", "scan"), [*((role, "source") for role in ROLES), ("decoder", "sequence")])
def test_no_score_of_all_pairs_is_ever_held(role: str, scan: str) -> None:
    attention: Attention = make(role, scan=scan).train()
    length = 8 * CHUNK
    query, memory = inputs(role, 1, length)

    def run() -> None:
        attended = attention(query, memory)
        (attended.output.sum() + attended.log_prob.sum()).backward()

    counted, _ = count(run)
    assert counted.largest < length * length / 2
    assert not any(sum(side >= length for side in shape) > 1 for shape in counted.shapes)


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_run_over_all_sources_takes_few_operations_for_each_draw() -> None:
    """What does not depend on the draw before is computed for many sources at once."""
    attention, counts = make(scan="sequence", edges=4).train(), []
    for length in (20, 40):
        with Operations() as counted:
            attention(torch.randn(2, length, 8)).log_prob.sum().backward()
        counts.append(counted.count)
    assert counts[1] - counts[0] < 20 * 5 * 35


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"share": "layers"}, "layer, head, model"),
        ({"scan": "node"}, "source, sequence"),
        ({"edges": 0}, "edges = 0"),
        ({"weight": -1.0}, "weight = -1.0"),
        ({"positions": "alibi"}, "rotary"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(MtkitError, match=message):
        build("sac", role="encoder", d_model=8, heads=2, **wrong)
