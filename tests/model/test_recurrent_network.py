"""The recurrent model: the paper's equations, padding, steps, attentions that it takes and refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention, build, mechanisms, reorder
from mtkit.errors import MtkitError, RecipeError
from mtkit.model.build import build_model, describe_attention, label_attention
from mtkit.model.recurrent import Recurrent
from mtkit.recipe import load_recipe

SMALL = {"architecture": "rnn", "d_model": 16, "heads": 2, "max_length": 32, "dropout": 0.0}
FORMS = [("paper", "gru"), ("paper", "lstm"), ("textbook", "gru"), ("textbook", "lstm")]
CROSS = sorted(name for name, each in mechanisms().items() if "cross" in each.roles)


def stands_at_cross(name: str) -> Attention:
    return build(name, role="cross", d_model=16, heads=2, max_length=32, memory_width=32)


BY_STEPS = [name for name in CROSS if stands_at_cross(name).learns_by_steps]


def model(form: str = "paper", cell: str = "gru", attention: Any = None, **settings: Any) -> Recurrent:
    given = {"model": {**SMALL, "form": form, "cell": cell, **settings}, "attention": attention or {}}
    built = build_model(load_recipe(None, given), source_vocabulary=24, target_vocabulary=24).eval()
    assert isinstance(built, Recurrent)
    return built


def stirred(net: Recurrent) -> Recurrent:
    """With no parameter at zero: additive attention starts uniform, and would hide which keys it sees."""
    with torch.no_grad():
        for each in net.parameters():
            each.add_(torch.randn_like(each) * 0.2)
    return net


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Source (3, 7), target (3, 6) and which source tokens are real."""
    torch.manual_seed(8)
    return (
        torch.randint(4, 24, (3, 7)),
        torch.randint(4, 24, (3, 6)),
        torch.arange(7) < torch.tensor([[7], [4], [1]]),
    )


def logits(net: Recurrent, source: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    return net(source, target, source_valid=valid).hidden @ net.output_weight.T


@pytest.mark.parametrize(("form", "cell"), FORMS)
def test_the_order_of_segments_and_lengths_from_the_host_change_nothing(form: str, cell: str) -> None:
    net = stirred(model(form, cell, encoder_layers=2, decoder_layers=2))
    source, target, valid = texts()
    expected, order = net(source, target, source_valid=valid).hidden, torch.tensor([2, 0, 1])
    for lengths in (None, valid[order].sum(1)):
        output = net(source[order], target[order], source_valid=valid[order], source_lengths=lengths).hidden
        torch.testing.assert_close(output, expected[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("form", "cell"), FORMS)
def test_a_segment_is_what_it_is_alone_and_steps_are_the_whole(form: str, cell: str) -> None:
    net = stirred(model(form, cell))
    source, target, valid = texts()
    whole = logits(net, source, target, valid)
    for segment, length in enumerate([7, 4, 1]):
        alone = logits(net, source[segment, None, :length], target[segment, None], None)
        torch.testing.assert_close(whole[segment, None], alone, atol=1e-5, rtol=0)
    state = net.start(net.encode(source, valid), hypotheses=2)
    for position in range(6):
        step, state, weights = net.step(target[:, position, None].expand(-1, 2), state, need_weights=True)
        torch.testing.assert_close(step.whole(), whole[:, position, None].expand(-1, 2, -1), atol=1e-4, rtol=0)
        assert weights is not None
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(target), 2))
        assert not weights.masked_select(~valid[:, None].expand_as(weights)).any()
        if position == 2:  # drop a segment, turn the others round, swap hypotheses
            kept = torch.tensor([2, 0])
            state = reorder(reorder(state, kept), torch.tensor([[1, 0], [1, 1]]))
            whole, target, valid = whole[kept], target[kept], valid[kept]


def test_the_papers_form_is_its_equations() -> None:
    """Appendix A of the paper, one token after the other, for one segment."""
    net = stirred(model(encoder_layers=1, decoder_layers=1, heads=1)).double()
    source, target, _ = texts()
    source, target = source[:1], target[:1]
    embedded = net.source_embedding(source)
    h = net.encoder(embedded, None)[0][0]  # annotations (S, 2D)
    y = net.target_embedding(target)[0]
    a, read = net.attention, net.state_dict()
    s = torch.tanh(read["first_states.weight"] @ h[0, 16:] + read["first_states.bias"])
    hidden = []
    for word in y:
        scores = torch.stack([a.score_vector[0] @ torch.tanh(a.q_proj(s) + a.k_proj(each)) for each in h])
        c = a.out_proj(scores.softmax(0) @ a.v_proj(h))
        t = read["maxout.weight"] @ torch.cat([s, word, c]) + read["maxout.bias"]
        hidden.append(torch.maximum(t[:16], t[16:]))
        x_z, x_r, x = (net.from_token(word) + net.from_context(c)).split(16)
        u_z, u_r = read["cells.0.gates.weight"].split(16)
        z, r = torch.sigmoid(x_z + u_z @ s), torch.sigmoid(x_r + u_r @ s)
        s = (1 - z) * s + z * torch.tanh(x + read["cells.0.candidate.weight"] @ (r * s))
    torch.testing.assert_close(net(source, target).hidden[0], torch.stack(hidden), atol=1e-10, rtol=0)


def test_the_textbook_form_starts_where_the_encoder_ended() -> None:
    net = stirred(model("textbook", encoder_layers=2, decoder_layers=2))
    source, _, valid = texts()
    encoded = net.encode(source, valid)
    last = valid.sum(1) - 1
    torch.testing.assert_close(encoded.states[1][0], encoded.memory[torch.arange(3), last])
    assert encoded.memory.shape == (3, 7, 16)


def test_one_source_token_is_the_context_of_every_step() -> None:
    net = stirred(model())
    source, target, _ = texts()
    state = net.start(net.encode(source[:, :1]))
    only = net.attention.out_proj(net.attention.v_proj(net.encode(source[:, :1]).memory))
    for position in range(3):
        token = target[:, position, None]
        _, context, state, _ = net._advanced(token, net.from_token(net.target_embedding(token)), state)
        torch.testing.assert_close(context, only, atol=1e-6, rtol=0)


def test_a_later_target_token_changes_nothing_earlier() -> None:
    net = stirred(model())
    source, target, valid = texts()
    other = target.clone()
    other[:, 3] = (other[:, 3] - 3) % 20 + 4
    before, after = logits(net, source, target, valid), logits(net, source, other, valid)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] - after[:, 3:]).abs().amax((0, 2)).min() > 1e-4


@pytest.mark.parametrize("name", BY_STEPS)
def test_every_attention_to_the_source_trains_by_its_steps(name: str) -> None:
    """What a step passes back to the query, the memory and the weights is what the whole sequence passes back."""
    net = stirred(model(attention={"name": name})).train()
    attention = net.attention.double().eval()  # noise aside
    shapes = ((2, 3, 16), (2, 5, 32))
    query, memory = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    passed = [query, memory, *attention.parameters()]
    whole = attention(query, memory, memory_valid=valid).output
    state, _ = attention.start(2, memory, valid)
    steps = []
    for position in range(3):
        attended, state = attention.step(query[:, position, None], state)
        steps.append(attended.output)
    weight = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weight).sum(), passed, allow_unused=True)
    found = torch.autograd.grad((torch.cat(steps, 1) * weight).sum(), passed, allow_unused=True)
    nothing = torch.zeros((), dtype=torch.float64)
    for pair in zip(found, wanted, strict=True):
        filled = torch.broadcast_tensors(*(nothing if each is None else each for each in pair))
        torch.testing.assert_close(*filled, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CROSS)
def test_what_learns_from_whole_sequences_says_so_and_is_refused(name: str) -> None:
    """A pass in training that leaves a loss, a sample or a statistic behind."""
    attention = stands_at_cross(name).train()
    before = {key: value.clone() for key, value in attention.named_buffers()}
    attended = attention(torch.randn(2, 6, 16), torch.randn(2, 9, 32))
    gathered = [key for key, value in attention.named_buffers() if not torch.equal(value, before[key])]
    learns = bool(attended.losses or attended.log_prob is not None or gathered)
    assert attention.learns_by_steps == (not learns)
    if learns:
        with pytest.raises(MtkitError, match="whole sequences"):
            model(attention={"name": name})


def test_hard_coded_with_a_ratio_of_its_own_is_taken() -> None:
    assert model(attention={"name": "hard-coded", "options": {"ratio": 1.2}}).attention.learns_by_steps


def test_a_regularizer_is_refused() -> None:
    with pytest.raises(MtkitError, match="whole sequences"):
        model(attention={"name": "full", "options": {"regularizer": "disagreement"}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {**SMALL, "reversible": True}}, "reversible"),
        ({"model": {**SMALL, "attention_dropout": 0.1}}, "attention_dropout"),
        ({"model": {**SMALL, "form": "textbook", "encoder_layers": 3}}, "decoder_layers"),
        ({"model": SMALL, "attention": {"decoder": "full"}}, "attention.decoder"),
        ({"model": SMALL, "attention": {"name": "band"}}, "cannot play the role 'cross'"),
    ],
)
def test_what_the_rnn_does_not_have_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((RecipeError, MtkitError), match=message):
        build_model(load_recipe(None, settings), source_vocabulary=24, target_vocabulary=24)


def test_runs_are_named_after_the_model() -> None:
    plain, other = (
        load_recipe(None, {"model": SMALL}),
        load_recipe(None, {"model": SMALL, "attention": {"name": "full"}}),
    )
    assert (label_attention(plain), label_attention(other)) == ("rnn", "rnn-full")
    assert describe_attention(plain) == "cross additive"
    assert label_attention(load_recipe()) == "full"
