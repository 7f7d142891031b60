"""Memory-compressed attention: its exactness limit, block means, what a decoder's query sees, and its state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.attention.small import ROLES, maker, refusals

each_groups = pytest.mark.parametrize("groups", ["heads", "full"])

make = maker("memory-compressed")


def adopted(role: str, **options: Any) -> tuple[Any, Any]:
    """`full`, and this mechanism with its projections."""
    full, compressed = make(role, "full"), make(role, **options)
    compressed.adopt(full.state_dict())
    return full, compressed


@each_groups
@pytest.mark.parametrize("role", ROLES)
def test_blocks_of_one_token_are_full_attention_at_first(role: str, groups: str) -> None:
    """The identity kernel; no token is seen twice in the decoder."""
    full, compressed = adopted(role, factor=1, groups=groups)
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 7, 32) if role == "cross" else None
    torch.testing.assert_close(compressed(x, memory).output, full(x, memory).output, rtol=1e-5, atol=1e-5)


@each_groups
def test_the_kernels_start_as_block_means(groups: str) -> None:
    """Attention over the means of the memory, where it is made of whole blocks: projections are linear."""
    full, compressed = adopted("cross", factor=3, groups=groups)
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 12, 32)
    means = memory.unflatten(1, (4, 3)).mean(2)
    torch.testing.assert_close(compressed(x, memory).output, full(x, means).output, rtol=1e-5, atol=1e-5)


def test_one_block_over_all_is_the_mean_of_the_values() -> None:
    """However the query looks."""
    compressed = make("cross", factor=6)
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 6, 32)
    expected = compressed.out_proj(compressed.v_proj(memory).mean(1, keepdim=True)).expand(-1, 5, -1)
    torch.testing.assert_close(compressed(x, memory).output, expected)


def reached(compressed: Any, length: int, query: int) -> set[int]:
    """The positions whose values reach the output of a query."""
    with torch.no_grad():
        compressed.q_proj.weight.zero_()  # so that keys do not matter
        compressed.q_proj.bias.zero_()
    x = torch.randn(1, length, 32, requires_grad=True)
    [gradient] = torch.autograd.grad(compressed(x).output[0, query].sum(), x)
    return set(gradient[0].abs().amax(-1).nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("first", "query", "seen"),
    [
        ("token", 0, {0}),
        ("token", 1, {0}),
        ("token", 2, {0, 1, 2}),  # the block's last token sees it
        ("token", 4, {0, 1, 2}),
        ("token", 5, set(range(6))),
        ("null", 1, set()),
        ("null", 2, {0, 1, 2}),
    ],
)
def test_a_causal_query_sees_the_blocks_that_have_ended(first: str, query: int, seen: set[int]) -> None:
    assert reached(make("decoder", factor=3, first=first), 8, query) == seen


def test_an_encoder_query_sees_the_last_block_before_it_is_full() -> None:
    assert reached(make(factor=3), 8, 0) == set(range(8))


def test_the_first_token_counts_as_one_block_among_others() -> None:
    """Its own value and that of one block, with equal weights where queries are zero."""
    compressed = make("decoder", factor=3)
    with torch.no_grad():
        compressed.q_proj.weight.zero_()
    x = torch.randn(1, 3, 32)
    values = compressed.v_proj(x)[0]
    expected = compressed.out_proj((values[0] + values.mean(0)) / 2)
    torch.testing.assert_close(compressed(x).output[0, 2], expected)


def test_a_query_before_all_blocks_gets_the_first_token_or_the_learned_value() -> None:
    x = torch.randn(2, 2, 32)
    token, null = make("decoder", factor=3), make("decoder", factor=3, first="null")
    for each in (0, 1):
        torch.testing.assert_close(token(x).output[:, each], token.out_proj(token.v_proj(x[:, 0])))
    with torch.no_grad():
        null.null_value.normal_()
    torch.testing.assert_close(null(x).output[:, 1], null.out_proj(null.null_value.flatten()).expand(2, -1))


@each_groups
def test_channels_mix_within_heads_or_across_them(groups: str) -> None:
    compressed = make(factor=3, groups=groups)
    sizes = {"heads": 4 * 3 * 8 * 8, "full": 3 * 32 * 32}
    assert compressed.key_kernel.numel() == compressed.value_kernel.numel() == sizes[groups]
    with torch.no_grad():
        compressed.value_kernel.normal_()
        compressed.out_proj.weight.copy_(torch.eye(32))
    x, other = torch.randn(1, 6, 32), compressed.v_proj.bias
    before = compressed(x).output
    with torch.no_grad():
        other[:8] += 1.0  # the values of the first head
    changed = (compressed(x).output - before).abs().amax((0, 1)) > 1e-6
    assert changed[:8].all()
    assert changed[8:].any() == (groups == "full")


def test_blocks_count_from_the_start_whatever_the_length() -> None:
    """A token more behind full blocks changes no block: to count from the end would move all borders."""
    compressed = make("decoder", factor=3)
    x = torch.randn(1, 10, 32)
    torch.testing.assert_close(compressed(x[:, :9]).output, compressed(x).output[:, :9])


@pytest.mark.parametrize(("first", "before"), [("token", 1), ("null", 1)])
@torch.no_grad()
def test_decoding_keeps_the_blocks_and_less_than_one_more_in_tokens(first: str, before: int) -> None:
    compressed = make("decoder", factor=4, first=first)
    state, _ = compressed.start(1, hypotheses=2)
    for t in range(1, 31):
        _, state = compressed.step(torch.randn(1, 2, 32), state)
        assert state["spans"]["count"] == before + t // 4
    tokens: Tensor = state["rows"]["keys"]
    assert tokens.shape[3] <= 8  # the least that a cache has room for


@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_nothing_to_attend_to_gives_zero(role: str) -> None:
    compressed = make(role, factor=3)
    with torch.no_grad():
        compressed.value_bias.normal_()
    heads: list[Tensor] = []
    compressed.out_proj.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0]))
    masks = {"memory_valid" if role == "cross" else "query_valid": torch.zeros(1, 5, dtype=torch.bool)}
    compressed(torch.randn(1, 5, 32), torch.randn(1, 5, 32) if role == "cross" else None, **masks)
    assert not heads[0].any()


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"groups": "head"}, "did you mean 'heads'"),
    ({"first": "tokens"}, "did you mean 'token'"),
    ({"factor": 0}, "factor = 0 must"),
    ({"positions": "rotary"}, "cannot combine with positions=rotary"),
)


@pytest.mark.peer
def test_it_agrees_with_memory_compressed_attention() -> None:
    """Causal, with the learned pair and without a mask, in whole blocks, as theirs begin elsewhere otherwise.

    Theirs has one kernel for keys and values, and divides by the square root of all channels. To install it:
    pip install --no-deps memory-compressed-attention
    """
    peer = pytest.importorskip("memory_compressed_attention")
    ours = make("decoder", factor=3, first="null").double()
    theirs = peer.MemoryCompressedAttention(32, heads=4, causal=True, compression_factor=3).double().eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.normal_(std=0.3 if name not in ("q_proj.bias", "k_proj.bias", "v_proj.bias") else 0.0)
        ours.value_kernel.copy_(ours.key_kernel)
        ours.value_bias.zero_()
        theirs.to_qkv.weight.copy_(torch.cat([2.0 * ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        theirs.compress_fn.conv.weight.copy_(ours.key_kernel.permute(0, 3, 2, 1).flatten(0, 1))
        theirs.compress_fn.conv.bias.zero_()
        theirs.null_k.copy_(ours.null_key.flatten())
        theirs.null_v.copy_(ours.null_value.flatten())
        theirs.to_out.load_state_dict(ours.out_proj.state_dict())
    x = torch.randn(2, 12, 32).double()
    torch.testing.assert_close(ours(x).output, theirs(x), rtol=1e-8, atol=1e-10)


def test_the_learned_pair_is_named_by_the_word_as_yaml_reads_it() -> None:
    by_word, by_none = (
        build("memory-compressed", role="decoder", d_model=32, heads=4, first=x) for x in ("null", None)
    )
    assert by_none.null_key.shape == by_word.null_key.shape
    with pytest.raises(MtkitError, match=r"first = 'tokn' must be one of token, null \(did you mean"):
        build("memory-compressed", role="decoder", d_model=32, heads=4, first="tokn")
