"""Sinkhorn: its equations as loops, its exactness limits, its noise, and the cost of a step."""

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.errors import MtkitError
from tests.attention.content.sorting import order, scores_of, softmax_over, sorted_block
from tests.attention.small import maker
from tests.contract.counting import step_costs

OPTIONS = [
    {},
    {"sinkhorn_iters": 0},
    {"sinkhorn_iters": 2},
    {"sinkhorn_sortnet": "mlp", "sinkhorn_iters": 1},
    {"sinkhorn_temperature": 2.0},
]

make = maker("sinkhorn", d_model=8, heads=2, max_length=64, stir=0.1)


def naive(attention: Any, x: Tensor, role: str, size: int) -> Tensor:
    """The catalogue's equations for one segment (T, D)."""
    causal, heads = role == "decoder", []
    for head in range(2):
        some = slice(4 * head, 4 * head + 4)
        q, k, v = (linear(x)[:, some] for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
        scores = scores_of(attention, x, q, k, head, size, causal=causal)
        weights = order(scores, attention.temperature, attention.iterations, causal=causal)
        rows = []
        for i in range(len(x)):
            n = i // size
            past = slice(0, n * size) if causal else slice(None)
            near = slice(n * size, i + 1 if causal else (n + 1) * size)
            keys, values = (sorted_block(weights[n], each[past], size) for each in (k, v))
            rows.append(softmax_over(q[i], [*keys.values(), *k[near]], [*values.values(), *v[near]]))
        heads.append(torch.stack(rows))
    return attention.out_proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_equations_block_by_block(role: str, options: dict[str, Any]) -> None:
    """A ragged batch; outputs and the gradients of tokens and parameters, in float64."""
    attention = make(role, sinkhorn_block=3, **options).double()
    x, lengths = torch.randn(4, 11, 8, dtype=torch.float64, requires_grad=True), [11, 9, 4, 1]
    valid = torch.arange(11) < torch.tensor(lengths).unsqueeze(1)
    output = attention(x, query_valid=valid).output[valid]
    expected = torch.cat([naive(attention, row[:n], role, 3) for row, n in zip(x, lengths, strict=True)])
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    weight, inputs = torch.randn_like(output), [x, *attention.parameters()]
    ours, literal = (
        torch.autograd.grad((each * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for each in (output, expected)
    )
    torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("sortnet", ["attn", "mlp"])
def test_one_block_of_all_is_full_attention(role: str, sortnet: str) -> None:
    """b >= T: the sorted block is the own one once more, or there is none."""
    full, sinkhorn, x = make(role, "full"), make(role, sinkhorn_block=9, sinkhorn_sortnet=sortnet), torch.randn(2, 9, 8)
    sinkhorn.adopt(full.state_dict())
    valid = torch.arange(9) < torch.tensor([[9], [4]])
    ours, theirs = (each(x, query_valid=valid).output[valid] for each in (sinkhorn, full))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    narrow = make(role, sinkhorn_block=4)
    narrow.adopt(full.state_dict())
    assert not torch.allclose(narrow(x).output, full(x).output, atol=1e-3)


def test_the_order_as_it_was_is_attention_within_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    full, sinkhorn, x = make(name="full"), make(sinkhorn_block=4), torch.randn(2, 11, 8)
    sinkhorn.adopt(full.state_dict())
    monkeypatch.setattr(sinkhorn, "order", lambda *_: torch.eye(3).expand(2, 2, 3, 3))
    expected = torch.cat([full(part).output for part in x.split(4, dim=1)], dim=1)
    torch.testing.assert_close(sinkhorn(x).output, expected, rtol=1e-5, atol=1e-5)


def test_a_decoder_of_two_blocks_sees_the_one_before_whole() -> None:
    """Block 1 has nothing else to sort: it is full attention up to position 2 b - 1."""
    full, sinkhorn, x = make("decoder", "full"), make("decoder", sinkhorn_block=4), torch.randn(2, 8, 8)
    sinkhorn.adopt(full.state_dict())
    torch.testing.assert_close(sinkhorn(x).output, full(x).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_noise_is_of_training_and_drawn_anew_for_each_update(role: str) -> None:
    sinkhorn, x = make(role, sinkhorn_block=3), torch.randn(2, 11, 8)
    quiet = sinkhorn(x).output
    sinkhorn.train()
    noisy = [sinkhorn(x).output, sinkhorn(x).output]
    sinkhorn.after_update(1, 10)
    noisy.append(sinkhorn(x).output)
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.allclose(noisy[0], quiet, atol=1e-4)
    assert not torch.allclose(noisy[0], noisy[2], atol=1e-4)
    assert torch.equal(sinkhorn.eval()(x).output, quiet)
    assert not torch.allclose(
        make(role, sinkhorn_block=3, layer=1, layers=2)._gumbel(torch.arange(3)), sinkhorn._gumbel(torch.arange(3))
    )


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_noise_does_not_depend_on_padding(role: str) -> None:
    sinkhorn, x = make(role, sinkhorn_block=3).train(), torch.randn(2, 17, 8)
    valid = torch.arange(17) < torch.tensor([[8], [5]])
    alone = sinkhorn(x[:, :8], query_valid=valid[:, :8]).output[valid[:, :8]]
    torch.testing.assert_close(sinkhorn(x, query_valid=valid).output[valid], alone)


def test_noise_is_gumbel() -> None:
    """Mean 0.5772, variance pi²/6, and no number that is not finite."""
    noise = make()._gumbel(torch.arange(300))
    assert noise.isfinite().all()
    assert noise.shape == (2, 300, 300)
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.var().item() - 1.6449) < 0.03


def test_a_learned_order_has_a_maximum_length() -> None:
    sinkhorn = make(sinkhorn_sortnet="mlp", max_length=20, sinkhorn_block=4)
    assert sinkhorn.longest == 20
    assert make(max_length=20).longest is None
    with pytest.raises(MtkitError, match="20 positions, not 21: raise"):
        sinkhorn(torch.randn(1, 21, 8))


def test_a_step_reads_two_blocks_but_where_one_begins() -> None:
    touched = step_costs(make("decoder", sinkhorn_block=8), 190, 8)
    early, late = (statistics.median(touched[start + 1 : start + 8]) for start in (24, 176))
    assert late == early
