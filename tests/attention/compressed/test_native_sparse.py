"""Native sparse attention: the three branches alone, importance, selection, gates and steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Inputs, build
from mtkit.attention.compressed import _block_choice, native_sparse
from tests.attention.small import refusals

ROLES = ["encoder", "decoder", "cross"]
SMALL = {"block": 4, "stride": 2, "selected_block": 4, "selected": 5, "window": 3}
VALID = torch.arange(22) < torch.tensor([[22], [13]])


def make(role: str = "encoder", name: str = "native-sparse", **arguments: Any) -> Any:
    return build(name, **{"role": role, "d_model": 32, "heads": 4} | arguments).double().eval()


def with_gates(attention: Any, *shares: float) -> Any:
    """The attention with constant gates, 0 or 1, of compressed blocks, selected blocks and the window."""
    bias = torch.tensor(shares[: len(attention.branches)]).double().mul(80).sub(40).repeat_interleave(4)
    attention.gate.bias.data = bias
    return attention


def apart_from_full(role: str, attention: Any, branch: str = "") -> Tensor:
    """Differences from full attention with the branch's projections, at real tokens of a ragged batch."""
    full = make(role, "full")
    full.adopt(attention.state_dict())
    for name in ("k_proj", "v_proj"):
        getattr(full, name).load_state_dict(getattr(attention, branch + name).state_dict())
    memory = torch.randn(2, 22, 32).double() if role == "cross" else None
    masks = {"memory_valid" if role == "cross" else "query_valid": VALID}
    x = torch.randn(2, 22, 32).double()
    real = torch.ones_like(VALID) if role == "cross" else VALID
    return (attention(x, memory, **masks).output - full(x, memory, **masks).output)[real].abs().max()


@pytest.mark.parametrize("role", ROLES)
def test_all_blocks_selected_are_full_attention(role: str) -> None:
    for selected, same in ((6, True), (100, True), (5, False)):
        attention = with_gates(make(role, **SMALL | {"selected": selected}), 0, 1, 0)
        assert (apart_from_full(role, attention) < 1e-9) == same


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_a_window_over_all_tokens_is_full_attention(role: str) -> None:
    for window, same in ((22, True), (100, True), (21, False)):
        attention = with_gates(make(role, **SMALL | {"window": window}), 0, 0, 1)
        assert (apart_from_full(role, attention, "window_") < 1e-9) == same


@pytest.mark.parametrize("role", ROLES)
def test_compressed_blocks_of_one_token_are_full_attention(role: str) -> None:
    for block, same in ((1, True), (2, False)):
        attention = with_gates(make(role, **SMALL | {"block": block, "stride": 1}), 1, 0, 0)
        assert (apart_from_full(role, attention, "compressed_") < 1e-9) == same


def test_gates_start_with_the_window_and_are_added_without_a_norm() -> None:
    attention, x = make(**SMALL), torch.randn(2, 9, 32).double()
    numbers = attention.learned_numbers(Inputs(x))
    expected = torch.tensor([-2.0, -2.0, 2.0]).sigmoid()
    for name, value in zip(("compressed", "selected", "window"), expected, strict=True):
        torch.testing.assert_close(numbers[f"{name} gate"], value.expand(4))
    alone = [with_gates(attention, *shares)(x).output for shares in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    bias = attention.out_proj.bias
    torch.testing.assert_close(with_gates(attention, 1, 1, 1)(x).output - bias, sum(y - bias for y in alone))


def test_a_query_before_the_end_of_the_first_block_sees_no_compressed_block() -> None:
    attention, x = with_gates(make("decoder", **SMALL), 1, 0, 0), torch.randn(1, 9, 32).double()
    output = attention(x).output - attention.out_proj.bias
    assert (output[:, :3].abs() < 1e-9).all()
    assert (output[:, 3:].abs().amax(-1) > 1e-3).all()


def overlap(compressed: int, block: int, *, size: int, stride: int, selected: int) -> int:
    """How many strides of a selected block a compressed block covers."""
    ours = set(range(compressed, compressed + size // stride))
    return len(ours & set(range(block * selected // stride, (block + 1) * selected // stride)))


@pytest.mark.parametrize(("size", "stride", "selected"), [(4, 2, 4), (2, 1, 6), (4, 4, 8), (6, 2, 6)])
def test_importance_is_weight_by_overlap_over_the_heads_of_a_group(size: int, stride: int, selected: int) -> None:
    attention = make(
        block=size, stride=stride, selected_block=selected, projection={"name": "grouped-query", "kv_heads": 2}
    )
    length = 91
    count, blocks = (length - size) // stride + 1, -(-length // selected)
    weights = torch.rand(2, 4, 5, count).double()
    covered = torch.tensor(
        [
            [overlap(m, block, size=size, stride=stride, selected=selected) for block in range(blocks)]
            for m in range(count)
        ]
    ).double()
    expected = weights.unflatten(1, (2, 2)).sum(2) @ covered
    importance = attention.choice.importance(weights, blocks).unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(importance, expected)


def selection(role: str, weights: Tensor, position: int | None, length: int, **options: Any) -> list[int]:
    attention = make(role, **SMALL | {"stride": 4} | options)
    where = None if position is None else torch.tensor([[position]])
    importance = attention.choice.importance(weights.view(1, 1, 1, -1), -(-length // 4))
    return attention.choice.best(importance, where, None)[0, 0, 0].tolist()


def test_selection_forces_blocks_near_the_query_and_gives_ties_to_the_earlier() -> None:
    weights = torch.zeros(10)
    assert selection("decoder", weights, 30, 40) == [7, 0, 6, 1, 2]
    assert selection("encoder", weights, 30, 40) == [7, 0, 6, 8, 1]
    assert selection("cross", weights, None, 40) == [0, 1, 2, 3, 4]
    weights[[3, 9]] = torch.tensor([0.1, 0.9])
    assert selection("decoder", weights, 30, 40) == [7, 0, 6, 3, 1]
    assert selection("decoder", weights, 2, 40) == [0, 10, 10, 10, 10]  # no later block: 10 means none
    assert selection("encoder", weights, 30, 40) == [7, 0, 6, 8, 9]
    assert selection("cross", weights, None, 40, selected=2) == [9, 3]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scores", [1, 300, 3000])
def test_blocks_are_selected_for_some_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch, role: str, scores: int
) -> None:
    """Outputs and gradients are the same, with heads that share keys, on a ragged batch."""
    attention = with_gates(make(role, **SMALL, projection={"name": "grouped-query", "kv_heads": 2}), 1, 1, 0)
    x, memory = (torch.randn(3, 50, 32).double().requires_grad_() for _ in range(2))
    valid = torch.arange(50) < torch.tensor([[50], [37], [3]])
    inputs, masks = ((x, memory), {"memory_valid": valid}) if role == "cross" else ((x,), {"query_valid": valid})
    weight = torch.randn(3, 50, 32).double() * (1 if role == "cross" else valid.unsqueeze(-1))
    results = []
    for at_once in (1 << 18, scores):
        monkeypatch.setattr(_block_choice, "scores_at_once", lambda device, at_once=at_once: at_once)
        output = attention(*inputs, **masks).output
        results.append((output * (weight != 0), *torch.autograd.grad((output * weight).sum(), inputs)))
    torch.testing.assert_close(results[0], results[1])


def test_full_attention_gives_every_branch_its_keys_and_values() -> None:
    attention, full = make(**SMALL), make("encoder", "full")
    attention.adopt(full.state_dict())
    for branch in ("", "compressed_", "window_"):
        assert torch.equal(attention.get_submodule(f"{branch}k_proj").weight, full.k_proj.weight)
    assert torch.equal(attention.q_proj.weight, full.q_proj.weight)


test_sizes_that_do_not_fit_are_refused = refusals(
    make,
    ({"block": 6, "stride": 4}, "stride = 4 must divide block = 6 and selected_block = 64"),
    ({"block": 32, "stride": 16, "selected_block": 40}, "stride = 16 must divide block = 32 and selected_block = 40"),
    ({"block": 128}, "block = 128 must be at most selected_block = 64"),
)


def test_a_step_reads_selected_blocks_ended_blocks_and_the_window_only(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = make("decoder", **SMALL | {"selected": 4}), torch.randn(1, 40, 32).double()
    read: list[int] = []
    original = native_sparse.attend_step
    monkeypatch.setattr(
        native_sparse,
        "attend_step",
        lambda q, keys, *rest, **how: read.append(keys.shape[-2]) or original(q, keys, *rest, **how),
    )
    state, _ = attention.start(1)
    with torch.no_grad():
        for token in range(40):
            _, state = attention.step(x[:, token : token + 1], state)
    assert read[:3] == [1, 2, 3], "no block has ended"
    assert read[3::2] == [(t - 4) // 2 + 1 for t in range(4, 41)]
    assert read[4::2] == [min(t, 16) for t in range(4, 41)]
    assert state["near"]["keys"].shape[3] <= SMALL["window"] + 8
