"""Heads of a fixed size: the limits to `full`, the rank of scores, shapes everywhere, and transformers' T5."""

from typing import Any

import pytest
import torch

from mtkit.errors import MtkitError
from tests.attention.small import ROLES, maker

make = maker("fixed-head-size")


def given(role: str, length: int = 7) -> tuple[Any, Any]:
    return torch.randn(2, length, 32), torch.randn(2, 9, 32) if role == "cross" else None


@pytest.mark.parametrize("role", ROLES)
def test_heads_of_an_equal_share_are_full(role: str) -> None:
    full, fixed, inputs = make(role, "full"), make(role, head_dim=8), given(role)
    fixed.load_state_dict(full.state_dict())
    torch.testing.assert_close(fixed(*inputs).output, full(*inputs).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "band", "longformer"])
@pytest.mark.parametrize("role", ROLES)
def test_wider_heads_give_what_the_heads_they_adopt_give(name: str, role: str) -> None:
    if role == "cross" and name != "full":
        return
    options = {} if name == "full" else {"window_radius": 2}
    full, inputs = make(role, "full"), given(role)
    for parameter in full.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain = make(role, name, **options)
    fixed = make(role, name, projection={"name": "fixed-head-size", "head_dim": 11}, **options)
    for each in (plain, fixed):
        each.adopt(full.state_dict())
    torch.testing.assert_close(fixed(*inputs).output, plain(*inputs).output, rtol=1e-5, atol=1e-5)
    fixed.double()(*(each if each is None else each.double() for each in inputs)).output.square().sum().backward()
    new = fixed.k_proj.weight.grad.view(4, 11, 32)[:, 8:], fixed.out_proj.weight.grad.view(32, 4, 11)[..., 8:]
    assert all(each.abs().amax() > 1e-6 for each in new), "channels that no gradient reaches"


def test_narrower_heads_adopt_what_has_their_shape() -> None:
    full, fixed = make("encoder", "full"), make("encoder", head_dim=5)
    before = fixed.q_proj.weight.clone()
    fixed.adopt(full.state_dict())
    assert torch.equal(fixed.q_proj.weight, before)
    assert torch.equal(fixed.out_proj.bias, full.out_proj.bias)


@pytest.mark.parametrize("head_dim", [3, 20])
def test_scores_have_the_rank_of_a_head_or_of_the_sequence(head_dim: int) -> None:
    """The bottleneck of the paper: 3 channels cannot give 12 tokens scores of full rank, 20 can."""
    fixed, x = make("encoder", head_dim=head_dim).double(), torch.randn(1, 12, 32).double()
    q, (k, _) = fixed.queries(x), fixed.keys_values(x)
    assert set(torch.linalg.matrix_rank(q @ k.mT).flatten().tolist()) == {min(head_dim, 12)}


def test_the_variance_of_scores_at_the_start_does_not_depend_on_the_size() -> None:
    x, variances = torch.randn(4, 50, 64), []
    for head_dim in (4, 16, 256):
        fixed = make("encoder", d_model=64, head_dim=head_dim)
        q, (k, _) = fixed.queries(x), fixed.keys_values(x)
        variances.append((q @ k.mT * fixed.scale).var().item())
    assert max(variances) < 1.5 * min(variances)
    assert min(variances) == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("head_dim", [3, 6])
@pytest.mark.parametrize("positions", [None, "rotary", "shaw"])
def test_the_number_of_heads_need_not_divide_the_width(role: str, head_dim: int, positions: str | None) -> None:
    """Heads 5 at width 32: projections, cache and tables have the size of the option, in a step as well."""
    positions = None if role == "cross" else positions
    fixed, inputs = make(role, heads=5, head_dim=head_dim, positions=positions), given(role)
    widths = [each.out_features for each in (fixed.q_proj, fixed.k_proj, fixed.v_proj)]
    assert widths == [5 * head_dim] * 3
    assert fixed.out_proj.in_features == 5 * head_dim
    output = fixed(*inputs).output
    if role == "encoder":
        return
    state, _ = fixed.start(2, inputs[1])
    stepped = []
    for token in inputs[0].split(1, dim=1):
        attended, state = fixed.step(token, state)
        stepped.append(attended.output)
    torch.testing.assert_close(torch.cat(stepped, 1), output, rtol=1e-4, atol=1e-5)
    assert state["shared"]["values"].shape[1::2] == (5, head_dim)


def test_a_size_is_a_positive_number() -> None:
    with pytest.raises(MtkitError, match="head_dim = 0 must be a whole number from 1"):
        make("encoder", head_dim=0)
    with pytest.raises(MtkitError, match="5 heads do not divide the width 32"):
        make("encoder", "full", heads=5)


@pytest.mark.peer
@pytest.mark.parametrize("role", ROLES)
def test_t5_gives_the_same(role: str) -> None:
    """Its d_kv is free. It has no biases and does not scale scores: that of queries takes the scale over."""
    pytest.importorskip("transformers")
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    ours, (x, memory) = make(role, heads=5, head_dim=6).double(), given(role)
    config = T5Config(d_model=32, d_kv=6, num_heads=5, dropout_rate=0.0, is_decoder=role != "encoder")
    theirs = T5Attention(config, has_relative_attention_bias=False, layer_idx=0).double().eval()
    with torch.no_grad():
        for name, linear in (("q", ours.q_proj), ("k", ours.k_proj), ("v", ours.v_proj), ("o", ours.out_proj)):
            getattr(theirs, name).weight.copy_(linear.weight * (6**-0.5 if name == "q" else 1.0))
    x, memory = x.double(), None if memory is None else memory.double()
    hidden = (
        torch.ones(7, 7).triu(1).bool().double() * -1e30
        if role == "decoder"
        else torch.zeros(7, 9 if role == "cross" else 7)
    )
    output = theirs(x, mask=hidden.double().expand(2, 1, -1, -1), key_value_states=memory)[0]
    torch.testing.assert_close(ours(x, memory).output, output, rtol=1e-8, atol=1e-10)
