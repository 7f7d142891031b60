"""Disagreement: the closed forms of its three losses, what they are averaged over, and that nothing else changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.contract import Inputs, Site
from mtkit.attention.heads.disagreement import Disagreement
from mtkit.attention.slots import HeadResults
from mtkit.errors import MtkitError

VALID = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])


def make(role: str = "encoder", name: str = "disagreement", **arguments: Any) -> Any:
    return build(name, **{"role": role, "d_model": 32, "heads": 4} | arguments).train()


def loss(
    types: str,
    *,
    heads: Tensor | None = None,
    values: Tensor | None = None,
    weights: Tensor | None = None,
    valid: Tensor | None = None,
) -> float:
    """Of one type, on tensors of which the ones not given cannot matter."""
    nothing = torch.full((2, 4, 6, 8), float("nan"))
    given = [nothing if each is None else each for each in (heads, values)]
    inputs = Inputs(torch.zeros(2, 6, 32), query_valid=valid)
    losses = Disagreement(Site("encoder", 32, 4), types=types)(HeadResults(inputs, *given, weights))
    return losses["disagreement"].item()


def test_equal_heads_agree_fully_and_orthogonal_ones_only_with_themselves() -> None:
    same = torch.randn(2, 1, 6, 8).expand(-1, 4, -1, -1)
    orthogonal = torch.eye(8)[:4].view(1, 4, 1, 8).expand(2, -1, 6, -1) * torch.rand(2, 4, 6, 1).add(0.1)
    for name, kind in (("output", "heads"), ("subspace", "values")):
        assert loss(name, **{kind: same}) == pytest.approx(1.0, abs=1e-5)
        assert loss(name, **{kind: orthogonal}) == pytest.approx(1 / 4, abs=1e-5)
        assert loss(name, **{kind: torch.cat([same[:, :2], -same[:, :2]], 1)}) == pytest.approx(0.0, abs=1e-5)


def test_overlap_of_positions_is_one_over_the_keys_when_uniform_and_1_when_peaked() -> None:
    assert loss("position", weights=torch.full((2, 4, 6, 5), 1 / 5)) == pytest.approx(1 / 5)
    peaked = torch.eye(6).expand(2, 4, 6, 6)
    assert loss("position", weights=peaked) == pytest.approx(1.0)
    assert loss("position", weights=torch.ones(2, 4, 1, 1)) == pytest.approx(1.0)  # length 1


def test_all_pairs_and_pairs_of_different_heads_tell_the_same_for_cosines() -> None:
    """g = (1 + (h - 1) u) / h, here with both means over pairs written out."""
    heads = torch.randn(2, 4, 6, 8)
    cosines = torch.cosine_similarity(heads.unsqueeze(1), heads.unsqueeze(2), dim=-1).mean((0, 3))  # (H, H)
    apart = (cosines.sum() - cosines.diagonal().sum()) / 12
    assert loss("output", heads=heads) == pytest.approx(cosines.mean().item(), abs=1e-6)
    assert loss("output", heads=heads) == pytest.approx((1 + 3 * apart.item()) / 4, abs=1e-6)


def test_positions_are_summed_over_all_pairs_of_maps() -> None:
    maps = torch.randn(2, 4, 6, 5).softmax(-1)
    pairs = [(maps[:, a] * maps[:, b]).sum(-1)[VALID].mean() for a in range(4) for b in range(4)]
    assert loss("position", weights=maps, valid=VALID) == pytest.approx(torch.stack(pairs).mean().item(), abs=1e-6)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_padding_counts_nowhere(role: str) -> None:
    """Each mean is over the real tokens of its own side, whatever padding holds."""
    attention = make(role, types="output,subspace,position")
    x, memory = torch.randn(2, 6, 32), torch.randn(2, 9, 32) if role == "cross" else None
    source = torch.tensor([[True] * 9, [True] * 3 + [False] * 6])
    masks = {"query_valid": VALID} | ({"memory_valid": source} if memory is not None else {})
    before = attention(x, memory, **masks).losses["disagreement"]
    x = x.masked_fill(~VALID.unsqueeze(-1), 9.0)
    memory = None if memory is None else memory.masked_fill(~source.unsqueeze(-1), 9.0)
    torch.testing.assert_close(attention(x, memory, **masks).losses["disagreement"], before)
    parts = [make(role, types=each) for each in ("output", "subspace", "position")]
    for part in parts:
        part.load_state_dict(attention.state_dict())
    torch.testing.assert_close(sum(part(x, memory, **masks).losses["disagreement"] for part in parts), before)


@pytest.mark.parametrize("types", ["output", "subspace", "position"])
def test_outputs_are_those_of_full_and_the_loss_is_of_training(types: str) -> None:
    full, attention, x = make(name="full"), make(types=types), torch.randn(2, 6, 32)
    attention.load_state_dict(full.state_dict())
    torch.testing.assert_close(attention(x).output, full(x).output, rtol=1e-5, atol=1e-6)
    assert set(attention(x).losses) == {"disagreement"}
    assert not attention.eval()(x).losses


def test_the_weight_multiplies_and_the_layers_of_a_run_share_it() -> None:
    x = torch.randn(2, 6, 32)
    one, other = make(), make(weight=3.0, layers=6, layer=2)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other(x).losses["disagreement"], 0.5 * one(x).losses["disagreement"])


def test_descending_the_loss_drives_the_heads_apart() -> None:
    attention, x = make(), torch.randn(4, 6, 32)
    descent, seen = torch.optim.SGD(attention.parameters(), lr=0.5), []
    for _ in range(30):
        loss = attention(x).losses["disagreement"]
        seen.append(loss.item())
        descent.zero_grad()
        loss.backward()
        descent.step()
    assert seen[-1] < 0.5 * seen[0]


def test_types_are_words_or_a_list() -> None:
    assert make(types="output, position").regularizer.types == make(types=["output", "position"]).regularizer.types
    with pytest.raises(MtkitError, match="did you mean 'position'"):
        make(types="positions")
