"""SortCut: its equations as loops, its exactness limits, and what it reads of the source."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.content.sorting import order, scores_of, softmax_over, sorted_block
from tests.attention.small import maker

OPTIONS = [{}, {"sinkhorn_iters": 0}, {"sinkhorn_sortnet": "mlp"}, {"sortcut_blocks": 1}, {"sortcut_blocks": 9}]

make = maker("sinkhorn-sortcut", d_model=8, heads=2, max_length=64, stir=0.1)


def naive(attention: Any, x: Tensor, source: Tensor, size: int, cut: int) -> Tensor:
    """The catalogue's equations for the queries x (T, D) of one segment, which is its own source in the encoder."""
    heads = []
    for head in range(2):
        some = slice(4 * head, 4 * head + 4)
        q, k, v = attention.q_proj(x)[:, some], attention.k_proj(source)[:, some], attention.v_proj(source)[:, some]
        asking = q if source is x else k
        scores = scores_of(attention, source, asking, k, head, size, causal=False)
        weights = order(scores, attention.temperature, attention.iterations, causal=False)
        keys, values = (
            [row for n in range(len(weights[:cut])) for row in sorted_block(weights[n], each, size).values()]
            for each in (k, v)
        )
        heads.append(torch.stack([softmax_over(query, keys, values) for query in q]))
    return attention.out_proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("role", ["encoder", "cross"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_equations_block_by_block(role: str, options: dict[str, Any]) -> None:
    """A ragged batch; outputs and the gradients of tokens and parameters, in float64."""
    attention = make(role, sinkhorn_block=3, **options).double()
    source, lengths = torch.randn(4, 11, 8, dtype=torch.float64, requires_grad=True), [11, 9, 4, 1]
    valid = torch.arange(11) < torch.tensor(lengths).unsqueeze(1)
    cut, inputs = options.get("sortcut_blocks", 2), [source, *attention.parameters()]
    if role == "encoder":
        output = attention(source, query_valid=valid).output[valid]
        pairs = [(row[:n], row[:n]) for row, n in zip(source, lengths, strict=True)]
        expected = torch.cat([naive(attention, one, one, 3, cut) for one, _ in pairs])
    else:
        query = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)
        inputs.append(query)
        output = attention(query, source, memory_valid=valid).output.flatten(0, 1)
        expected = torch.cat(
            [naive(attention, x, row[:n], 3, cut) for x, row, n in zip(query, source, lengths, strict=True)]
        )
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(output)
    ours, literal = (
        torch.autograd.grad((each * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for each in (output, expected)
    )
    torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-9)


def both(role: str, block: int, **options: Any) -> tuple[Any, Any, tuple[Tensor, Tensor | None]]:
    """`full` and SortCut with the same projections, and inputs of 12 tokens."""
    full, sortcut = make(role, "full"), make(role, sinkhorn_block=block, **options)
    sortcut.adopt(full.state_dict())
    return full, sortcut, (torch.randn(2, 12, 8), torch.randn(2, 12, 8) if role == "cross" else None)


@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_one_block_of_all_is_full_attention(role: str) -> None:
    full, sortcut, given = both(role, 12)
    torch.testing.assert_close(sortcut(*given).output, full(*given).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_all_blocks_of_a_permutation_are_full_attention(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full, sortcut, given = both(role, 4, sortcut_blocks=3)
    order = torch.eye(3)[[2, 0, 1]].expand(2, 2, 3, 3)
    monkeypatch.setattr(sortcut, "order", lambda *_: order)
    torch.testing.assert_close(sortcut(*given).output, full(*given).output, rtol=1e-5, atol=1e-5)
    sortcut.sorted_blocks = 2
    assert not torch.allclose(sortcut(*given).output, full(*given).output, atol=1e-3)


def test_decoding_keeps_the_cut_alone() -> None:
    """c b rows a segment, whatever the length of the source."""
    sortcut = make("cross", sinkhorn_block=4, sortcut_blocks=2)
    for length in (12, 40):
        state, _ = sortcut.start(3, torch.randn(3, length, 8), hypotheses=5)
        assert state["shared"]["keys"].shape == (3, 2, 8, 4)
