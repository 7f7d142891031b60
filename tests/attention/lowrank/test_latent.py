"""Multi-head latent attention: where it is full attention, what a step reads, and positions."""

from typing import Any

import pytest
import torch

from mtkit.errors import MtkitError
from tests.attention.small import ROLES, VALID, inputs, maker
from tests.contract.counting import Count

EXACT: dict[str, Any] = {"kv_rank": 32, "rope_width": 0, "norm": False}

make = maker("latent", "decoder", double=True)


@pytest.mark.parametrize("role", ROLES)
def test_without_compression_and_rotation_it_is_full_attention(role: str) -> None:
    attention, full, (x, memory, masks) = make(role, **EXACT), make(role, "full"), inputs(role)
    state = {name: value for name, value in full.state_dict().items() if not name.startswith(("k_", "v_"))}
    own = {"down_proj.weight": torch.eye(32), "down_proj.bias": torch.zeros(32)}
    own |= {"k_up_proj.weight": full.k_proj.weight, "v_up_proj.weight": full.v_proj.weight}
    attention.load_state_dict(state | own | {"v_up_proj.bias": full.v_proj.bias})
    torch.testing.assert_close(attention(x, memory, **masks).output, full(x, memory, **masks).output)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("options", [{}, {"q_rank": 32}, {"rope_width": 4}])
def test_adopted_weights_of_enough_rank_are_full_attention(role: str, options: dict[str, Any]) -> None:
    if role == "cross" and "rope_width" in options:
        return
    attention, full, (x, memory, masks) = make(role, **EXACT | options), make(role, "full"), inputs(role)
    for linear in (full.q_proj, full.k_proj, full.v_proj):
        torch.nn.init.normal_(linear.bias)
    attention.adopt(full.state_dict())
    torch.testing.assert_close(attention(x, memory, **masks).output, full(x, memory, **masks).output)


def test_adopted_weights_of_lower_rank_are_the_best_of_that_rank() -> None:
    attention, full = make(**EXACT | {"kv_rank": 10}), make(name="full")
    attention.adopt(full.state_dict())
    stacked = torch.cat([full.k_proj.weight, full.v_proj.weight])
    ours = torch.cat([attention.k_up_proj.weight, attention.v_up_proj.weight]) @ attention.down_proj.weight
    lost = torch.linalg.svdvals(stacked)[10:].square().sum().sqrt()
    torch.testing.assert_close((stacked - ours).norm(), lost)


def test_scores_are_scaled_by_both_widths_and_only_one_part_is_rotated() -> None:
    """Equal tokens: the plain part of a score does not change with the distance, the rotated part does."""
    attention, x = make("encoder", rope_width=2), torch.randn(1, 1, 32).double().expand(1, 5, 32)
    (plain, turned), c = attention.queries_in_parts(x, torch.arange(5)), attention.latent(x)
    keys, angle = attention.k_up_proj(c).unflatten(-1, (4, 8)).transpose(1, 2), torch.arange(5.0).double()
    q = attention.q_rope_proj(x)[0, 0].view(4, 2)
    k = attention.k_rope_proj(x)[0, 0]
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(5, 2, 2)  # at theta = 1
    torch.testing.assert_close(turned[0], torch.einsum("tij,hj->hti", turn, q))
    rotated = torch.einsum("tij,hj->hti", turn, q) @ (turn @ k).mT
    scores = (plain[0] @ keys[0].mT + rotated) / 10**0.5
    torch.testing.assert_close(attention(x, need_weights=True).weights[0], scores.softmax(-1))


@pytest.mark.parametrize("role", ["decoder", "cross"])
def test_a_step_reads_only_the_cached_vectors(role: str) -> None:
    """No tensor of a step has a number for each token, head and channel, and the state r + R numbers per token."""
    attention, length = make(role, kv_rank=8, q_rank=6).float(), 100
    memory = torch.randn(1, length, 32) if role == "cross" else None
    state, _ = attention.start(1, memory)
    if role == "cross":
        assert state["shared"]["latent"].shape == (1, 1, length, 8)
    for _ in range(length if role == "decoder" else 1):
        with Count() as counted, torch.no_grad():
            attended, state = attention.step(torch.randn(1, 1, 32), state)
        assert attended.output.isfinite().all()
    if role == "decoder":
        latent = state["latent"]
        assert latent.shape[:3] == (1, 1, 1)
        assert latent.shape[4] == 8 + 4
        assert set(state) == {"latent", "count"}
        assert counted.largest <= length * 12 * 1.5  # the cache itself, when it grows
    else:
        assert counted.largest <= length * 8
    assert all(length not in shape or 32 not in shape for shape in counted.shapes)


def test_hypotheses_read_one_copy_of_the_source() -> None:
    attention, memory, x = make("cross"), torch.randn(2, 6, 32).double(), torch.randn(2, 3, 32).double()
    state, _ = attention.start(2, memory, VALID[:, 1:], hypotheses=3)
    attended, state = attention.step(x, state)
    expected = attention(x, memory, memory_valid=VALID[:, 1:]).output
    torch.testing.assert_close(attended.output, expected)


def test_a_source_of_padding_gives_the_bias_of_out_proj_in_a_step_too() -> None:
    attention, memory = make("cross"), torch.randn(1, 3, 32).double()
    torch.nn.init.normal_(attention.v_up_proj.bias)
    torch.nn.init.normal_(attention.out_proj.bias)
    state, _ = attention.start(1, memory, torch.zeros(1, 3, dtype=torch.bool))
    attended, _ = attention.step(torch.randn(1, 1, 32).double(), state)
    torch.testing.assert_close(attended.output[0, 0], attention.out_proj.bias)


@pytest.mark.parametrize(("role", "width", "rule"), [("decoder", 3, "be even"), ("cross", 2, "be 0 in the cross role")])
def test_widths_that_cannot_rotate_are_refused(role: str, width: int, rule: str) -> None:
    with pytest.raises(MtkitError, match=f"rope_width = {width} must {rule}"):
        make(role, rope_width=width)
