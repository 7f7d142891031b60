"""Set Transformer: its closed forms, its block, prefixes in the decoder role, and what a step keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import build
from mtkit.attention.compressed import _prefix_points
from mtkit.errors import MtkitError


def make(role: str = "encoder", name: str = "set-transformer", **arguments: Any) -> Any:
    torch.manual_seed(7)
    small = {} if name == "full" else {"isab_points": 3, "pma_seeds": 3}
    site: dict[str, Any] = {"role": role, "d_model": 32, "heads": 4}
    return build(name, **site | small | arguments).eval()


def torchs(q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear | None) -> nn.MultiheadAttention:
    """PyTorch's own attention with these projections; None stands for the identity."""
    attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    with torch.no_grad():
        weights: list[Tensor] = [each.weight for each in (q, k, v)]
        attention.in_proj_weight.copy_(torch.cat(weights))
        biases: list[Tensor] = [torch.zeros(32) if each.bias is None else each.bias for each in (q, k, v)]
        attention.in_proj_bias.copy_(torch.cat(biases))
        attention.out_proj.weight.copy_(torch.eye(32) if out is None else out.weight)
        attention.out_proj.bias.copy_(torch.zeros(32) if out is None else out.bias)
    return attention


@pytest.mark.parametrize("role", ["encoder", "cross"])
@pytest.mark.parametrize("block", [False, True])
@torch.no_grad()
def test_it_is_two_attentions_one_above_the_other(role: str, block: bool) -> None:
    ours = make(role, isab_block=block)
    for each in ours.parameters():
        each.add_(0.1 * torch.randn_like(each))
    read = torchs(ours.point_q_proj, ours.k_proj, ours.v_proj, ours.point_out_proj)
    answer = torchs(ours.q_proj, ours.gathered_k_proj, ours.gathered_v_proj, ours.out_proj)
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 7, 32) if role == "cross" else None
    tokens = x if memory is None else memory
    valid = torch.arange(tokens.shape[1]) < torch.tensor([[4], [tokens.shape[1]]])
    points = ours.points.expand(2, -1, -1)
    h, _ = read(points, tokens, tokens, key_padding_mask=~valid)
    if block:
        h = ours.norms[0](points + h)
        h = ours.norms[1](h + ours.feed_forward(h).clamp(min=0))
    expected, _ = answer(x, h, h)
    output = ours(x, memory, **{"query_valid" if memory is None else "memory_valid": valid}).output
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_points_that_ask_for_nothing_give_every_position_the_mean_value(role: str) -> None:
    """Of the prefix in the decoder."""
    ours = make(role)
    ours.point_q_proj.weight.zero_()
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 7, 32) if role == "cross" else None
    values = ours.v_proj(x if memory is None else memory)
    if role == "decoder":
        mean = values.cumsum(1) / torch.arange(1, 10).unsqueeze(-1)
    else:
        mean = values.mean(1, keepdim=True).expand(2, 9, 32)
    expected = ours.out_proj(ours.gathered_v_proj(mean))
    torch.testing.assert_close(ours(x, memory).output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_a_point_for_each_token_gives_full_attention_over_what_they_hold(role: str) -> None:
    """Eight tokens are one-hot in every head; points ask for one each, in another order.

    What full attention projects is then the values. In the decoder a point whose token is still to come reads the
    prefix's mean, as its scores there are all alike, so that only the last position sees what full attention sees.
    """
    ours, full = make(role, isab_points=8), make(role, "full")
    tokens = torch.eye(8).repeat(1, 4)
    for linear in (ours.point_q_proj, ours.k_proj):
        linear.weight.copy_(torch.eye(32))
    ours.points.copy_(400 * tokens[torch.randperm(8)])
    full.q_proj.load_state_dict(ours.q_proj.state_dict())
    full.out_proj.load_state_dict(ours.out_proj.state_dict())
    for theirs, gathered in ((full.k_proj, ours.gathered_k_proj), (full.v_proj, ours.gathered_v_proj)):
        theirs.weight.copy_(gathered.weight @ ours.v_proj.weight)
    output, expected = ours(tokens.unsqueeze(0)).output, full(tokens.unsqueeze(0)).output
    some = slice(None) if role == "encoder" else slice(7, None)
    torch.testing.assert_close(output[:, some], expected[:, some], atol=1e-5, rtol=0)
    assert (expected - expected.mean(1, keepdim=True)).abs().max() > 1e-3


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 255, 256, 257, 300])
@torch.no_grad()
def test_in_the_decoder_a_position_has_what_the_encoder_gives_the_last_of_its_prefix(length: int) -> None:
    """Around the parts of 256 positions, in blocks of 16, in which prefixes are read; with scores far apart."""
    encoder, decoder = make("encoder").double(), make("decoder").double()
    decoder.load_state_dict(encoder.state_dict())
    for each in (encoder, decoder):
        each.points.mul_(20)
    x = 3 * torch.randn(2, length, 32, dtype=torch.double)
    output = decoder(x).output
    for position in {0, length // 2, length - 1}:
        expected = encoder(x[:, : position + 1]).output[:, -1]
        torch.testing.assert_close(output[:, position], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", [20, 270])
def test_in_the_decoder_dropout_does_not_depend_on_how_far_scores_are_apart(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, x = make("decoder", dropout=0.3).train(), torch.randn(2, length, 32)
    outputs = []
    for far in (60.0, -1.0):
        monkeypatch.setattr(_prefix_points, "FAR", far)
        torch.manual_seed(1)
        outputs.append(decoder(x).output)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    assert not torch.allclose(decoder(x).output, outputs[0], atol=1e-3)


@pytest.mark.parametrize("far", [60.0, 0.2])
@pytest.mark.parametrize("length", [20, 270])
def test_in_the_decoder_gradients_are_those_of_the_naive_form(
    length: int, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part, and in several, whose gradients come by way of what points have read before.

    Scores hardly ever share a maximum in the second case, so that each position has its own.
    """
    monkeypatch.setattr(_prefix_points, "FAR", far)
    decoder, x = make("decoder").double(), torch.randn(2, length, 32, dtype=torch.double, requires_grad=True)
    outputs = [form(x).output for form in (decoder, decoder.naive)]
    weight, inputs = torch.randn_like(outputs[0]), [x, *decoder.parameters()]
    found = [torch.autograd.grad((each * weight).sum(), inputs) for each in outputs]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("position", [1, 30, 299])
@torch.no_grad()
def test_a_late_token_with_a_huge_score_leaves_what_came_before_it_alone(position: int) -> None:
    """In float32, where its exponential is infinitely many times theirs."""
    decoder, x = make("decoder"), torch.randn(1, 300, 32)
    before = decoder(x).output
    asks = decoder.point_q_proj(decoder.points)
    direction = torch.linalg.lstsq(decoder.k_proj.weight, asks[0].unsqueeze(1)).solution.squeeze(1)
    x[:, position] = 1e4 * direction
    keys, first = decoder.k_proj(x).view(300, 4, 8), asks[0].view(4, 8)
    assert ((keys * first).sum(-1) / 8**0.5)[position].min() > 1000
    output = decoder(x).output
    torch.testing.assert_close(output[:, :position], before[:, :position], atol=1e-6, rtol=0)
    assert output.isfinite().all()
    decoder, x = decoder.double(), x.double()
    torch.testing.assert_close(decoder(x).output, decoder.naive(x).output, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("length", [20, 300])
def test_dropout_in_the_decoder_has_the_gradients_of_what_it_left(length: int) -> None:
    """The same draws in the backward pass: a difference quotient along the gradient finds its length."""
    decoder = make("decoder", dropout=0.3).double().train()
    x, weight = torch.randn(1, length, 32, dtype=torch.double), torch.randn(1, length, 32, dtype=torch.double)

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return (decoder(x).output * weight).sum()

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(value(x), x)
    step = 1e-5 * gradient / gradient.norm()
    with torch.no_grad():
        quotient = (value(x + step) - value(x - step)) / 2e-5
    torch.testing.assert_close(quotient, gradient.norm(), atol=0, rtol=1e-6)


@torch.no_grad()
def test_the_order_of_what_is_read_changes_nothing() -> None:
    """A set: tokens of the encoder take their outputs along, targets read the source in any order."""
    order = torch.randperm(9)
    encoder, cross, x, memory = make(), make("cross"), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    torch.testing.assert_close(encoder(x[:, order]).output, encoder(x).output[:, order], atol=1e-5, rtol=0)
    torch.testing.assert_close(cross(x, memory[:, order]).output, cross(x, memory).output, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_step_keeps_as_much_as_there_are_points() -> None:
    decoder, cross = make("decoder", isab_points=5), make("cross", pma_seeds=6)
    state, _ = decoder.start(2, hypotheses=4)
    for _ in range(3):
        _, state = decoder.step(torch.randn(2, 4, 32), state)
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            "mean": (2, 4, 5, 4, 8),
            "log_sum": (2, 4, 5, 4),
        }
    shared = cross.start(2, torch.randn(2, 50, 32), hypotheses=4)[0]["shared"]
    assert shared["keys"].shape == shared["values"].shape == (2, 4, 6, 8)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_dropout_acts_where_tokens_read(role: str) -> None:
    ours = make(role, dropout=0.5).train()
    x, memory = torch.randn(1, 12, 32), torch.randn(1, 5, 32) if role == "cross" else None
    assert not torch.equal(ours(x, memory).output, ours(x, memory).output)
    ours.eval()
    assert torch.equal(ours(x, memory).output, ours(x, memory).output)


@torch.no_grad()
def test_with_a_source_of_padding_alone_nothing_is_read() -> None:
    """Not the biases of the second projection either, nor the points of a block."""
    for block in (False, True):
        cross, heads = make("cross", isab_block=block), list[Tensor]()
        cross.gathered_v_proj.bias.fill_(1.0)
        cross.out_proj.register_forward_pre_hook(lambda _, inputs, heads=heads: heads.append(inputs[0]))
        memory, valid = torch.randn(1, 5, 32), torch.zeros(1, 5, dtype=torch.bool)
        cross(torch.randn(1, 3, 32), memory, memory_valid=valid)
        state, _ = cross.start(1, memory, valid)
        cross.step(torch.randn(1, 1, 32), state)
        assert len(heads) == 2
        assert not any(each.any() for each in heads)


def test_a_role_reads_its_own_number_of_points() -> None:
    options: dict[str, Any] = {"isab_points": 4, "pma_seeds": 5}
    sizes = [len(make(role, **options).points) for role in ("encoder", "decoder", "cross")]
    assert sizes == [4, 4, 5]


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(MtkitError, match="isab_block = True must be false in the decoder role"):
        make("decoder", isab_block=True)
    with pytest.raises(MtkitError, match="pma_seeds = 0 must be a whole number from 1"):
        make("cross", pma_seeds=0)


@pytest.mark.peer
@torch.no_grad()
def test_it_agrees_with_isab_pytorch() -> None:
    """Its heads are 64 wide. The output projection of its first attention is folded into the second's here."""
    peer = pytest.importorskip("isab_pytorch")
    ours = make(d_model=128, heads=2, isab_points=5).double()
    theirs = peer.ISAB(dim=128, heads=2, num_latents=5).double().eval()
    theirs.latents.copy_(ours.points)
    theirs.attn1.to_q.weight.copy_(ours.point_q_proj.weight)
    theirs.attn1.to_kv.weight.copy_(torch.cat([ours.k_proj.weight, ours.v_proj.weight]))
    theirs.attn2.to_q.weight.copy_(ours.q_proj.weight)
    theirs.attn2.to_out.weight.copy_(ours.out_proj.weight)
    for mine, part in zip(
        (ours.gathered_k_proj, ours.gathered_v_proj), theirs.attn2.to_kv.weight.chunk(2), strict=True
    ):
        mine.weight.copy_(part @ theirs.attn1.to_out.weight)
    for name in ("q_proj", "k_proj", "v_proj", "point_q_proj", "gathered_v_proj", "out_proj"):
        getattr(ours, name).bias.zero_()
    x, valid = torch.randn(2, 11, 128, dtype=torch.double), torch.arange(11) < torch.tensor([[11], [4]])
    expected, _ = theirs(x, mask=valid)
    torch.testing.assert_close(ours(x, query_valid=valid).output[valid], expected[valid], rtol=1e-8, atol=1e-10)
