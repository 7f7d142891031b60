"""Linformer: its exactness limit, its sharing of matrices, and its hard length."""

import pytest
import torch

from mtkit.errors import MtkitError
from tests.attention.small import maker, refusals

SHARE = ["none", "head", "kv", "layer"]

make = maker("linformer", max_length=9)


@pytest.mark.parametrize("share", SHARE)
@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_identity_matrices_give_full_attention(share: str, role: str) -> None:
    """rank = S = longest, E = F = I."""
    full, linformer = make(role, "full", memory_length=9), make(role, memory_length=9, rank=9, share=share)
    linformer.adopt(full.state_dict())
    with torch.no_grad():
        for matrices in (linformer.key_slots, linformer.value_slots):
            if matrices is not None:
                matrices.copy_(torch.eye(9))
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 9, 32) if role == "cross" else None
    torch.testing.assert_close(linformer(x, memory).output, full(x, memory).output, rtol=1e-5, atol=1e-5)


def test_an_identity_slot_beyond_the_segment_is_a_key_of_zeros() -> None:
    """The limit needs S = longest: empty slots have logit 0 and are never masked."""
    full, linformer = make(name="full"), make(rank=9)
    linformer.adopt(full.state_dict())
    with torch.no_grad():
        linformer.key_slots.copy_(torch.eye(9))
        linformer.value_slots.copy_(torch.eye(9))
    x = torch.randn(1, 6, 32)
    q, k, v = linformer.queries(x), *linformer.keys_values(x)
    k, v = (torch.nn.functional.pad(each, (0, 0, 0, 3)) for each in (k, v))
    heads = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
    torch.testing.assert_close(linformer(x).output, linformer.merge_heads(heads, x))
    assert not torch.allclose(linformer(x).output, full(x).output, atol=1e-3)


@pytest.mark.parametrize("share", SHARE)
@pytest.mark.parametrize("projection", [None, "multi-query"])
def test_forward_is_the_equation_written_out(share: str, projection: str | None) -> None:
    linformer = make(rank=4, share=share, projection=projection).double()
    x, valid = torch.randn(2, 7, 32, dtype=torch.float64), torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    torch.testing.assert_close(linformer(x, query_valid=valid).output, linformer.naive(x, query_valid=valid).output)


@pytest.mark.parametrize("share", SHARE)
@torch.no_grad()
def test_at_first_a_query_gets_what_it_looks_for(share: str) -> None:
    """Of few positions beside the slots: more where `full` has more, not at random."""
    full, linformer = make(name="full"), make(max_length=200, rank=64, share=share)
    linformer.adopt(full.state_dict())
    x = torch.randn(8, 12, 32)
    q, (k, _) = linformer.queries(x), linformer.keys_values(x)
    e, f = (each[:, :, :12] for each in linformer._matrices(None))
    ours = (q @ (e @ k).transpose(-1, -2) / 8**0.5).softmax(-1) @ f
    theirs = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    pair = torch.stack([(each - each.mean(2, keepdim=True)).flatten() for each in (ours, theirs)])
    assert pair.corrcoef()[0, 1] > 0.6


@pytest.mark.parametrize(("share", "count"), [("none", 2 * 4 * 5 * 9), ("head", 2 * 5 * 9), ("kv", 5 * 9)])
def test_sharing_saves_matrices(share: str, count: int) -> None:
    full, linformer = make(name="full"), make(rank=5, share=share)
    assert sum(p.numel() for p in linformer.parameters()) - sum(p.numel() for p in full.parameters()) == count


@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_layers_that_share_read_the_matrix_of_the_first(role: str) -> None:
    first, second = (make(role, rank=5, share="layer", layer=layer, layers=2) for layer in range(2))
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 8, 32) if role == "cross" else None
    assert not any("slots" in name for name, _ in second.named_parameters())
    carry = first(x, memory).carry
    output = second(x, memory, carry=carry).output
    output.sum().backward()
    assert first.key_slots.grad.any()
    if memory is not None:
        _, carry = first.start(2, memory)
        state, _ = second.start(2, memory, carry=carry)
        torch.testing.assert_close(second.step(x, state)[0].output, output)
    with pytest.raises(MtkitError, match="first layer"):
        second(x, memory)


def test_more_positions_than_it_was_built_for_are_refused() -> None:
    assert make().longest == 9
    cross = make("cross", memory_length=12)
    assert cross.longest == 12
    cross(torch.randn(1, 20, 32), torch.randn(1, 12, 32))  # the queries are not limited
    for attend in (cross, lambda query, memory: cross.start(1, memory)):
        with pytest.raises(MtkitError, match="12 positions, not 13"):
            attend(torch.randn(1, 1, 32), torch.randn(1, 13, 32))
    with pytest.raises(MtkitError, match="encoder, cross"):
        make("decoder")


def test_nothing_to_attend_to_gives_zero() -> None:
    cross = make("cross")
    heads: list[torch.Tensor] = []
    cross.out_proj.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0]))
    cross(torch.randn(1, 3, 32), torch.randn(1, 5, 32), memory_valid=torch.zeros(1, 5, dtype=torch.bool))
    assert not heads[0].any()


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"share": "heads"}, "did you mean 'head'"),
    ({"rank": 0}, "rank = 0 must"),
)
