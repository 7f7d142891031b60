"""BigBird: its limits, its equation block by block, its last block and its global vectors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import ROLES, build
from mtkit.attention.kernels.random_pattern import RandomBlocks
from mtkit.attention.kernels.reproducible import hashed, random_key
from mtkit.errors import MtkitError
from tests.attention.small import maker, refusals

LENGTHS = [50, 31, 12, 3]

make = maker("bigbird", d_model=16, heads=2, layers=2, block_size=4, bigbird_random=2)


def drawn(own: int, head: int, rest: list[int], *, count: int, key: int) -> set[int]:
    """`count` of the blocks left, one after the other, each by the hash of its slot."""
    left, taken = list(rest), set()
    start = hashed(hashed(torch.tensor(key + head)) + own)
    for slot in range(min(count, len(rest))):
        taken.add(left.pop(int(hashed(start + slot)) * len(left) // 2**32))
    return taken


def blocks_seen(own: int, head: int, blocks: int, *, causal: bool, ends: tuple[int, int], **draw: int) -> set[int]:
    """{0, N-1, a-1, a, a+1} and what is drawn from the rest; in the past alone if causal. Windows of three blocks."""
    first, last = ends
    everything = set(range(own + 1 if causal else blocks))
    is_global = {each for each in everything if each < first or (not causal and each >= blocks - last)}
    if own in is_global and not causal:
        return everything
    seen = is_global | (everything & {own - 1, own, own + 1})
    return seen | drawn(own, head, sorted(everything - seen), **draw)


def naive(attention: Any, x: Tensor, lengths: list[int], ends: tuple[int, int], *, count: int = 2) -> Tensor:
    """The heads' outputs (B, T, D) before the last projection, one query, head and segment at a time."""
    site = attention.site
    key, width = random_key(site.seed, ROLES.index(site.role), site.layer), 16 // site.heads
    q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    segments = []
    for b, length in enumerate(lengths):
        rows = [x.new_zeros(16)] * x.shape[1]
        for i in range(length):
            outputs = []
            for h in range(site.heads):
                blocks = blocks_seen(i // 4, h, -(-length // 4), causal=site.causal, ends=ends, count=count, key=key)
                at = [j for j in range(i + 1 if site.causal else length) if j // 4 in blocks]
                own = slice(h * width, (h + 1) * width)
                outputs.append((k[b, at, own] @ q[b, i, own] / width**0.5).softmax(0) @ v[b, at, own])
            rows[i] = torch.cat(outputs)
        segments.append(torch.stack(rows))
    return torch.stack(segments)


def segments(*lengths: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(len(lengths), max(lengths), 16, dtype=torch.float64, requires_grad=True)
    return x, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def check_gradients(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    weight = torch.randn_like(outputs[0])
    fast, literal = (torch.autograd.grad((each * weight).sum(), inputs, allow_unused=True) for each in outputs)
    for one, other in zip(fast, literal, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("role", "options", "ends"),
    [
        ("encoder", {}, (1, 1)),
        ("encoder", {"bigbird_global": 3}, (2, 1)),
        ("encoder", {"bigbird_global": 0}, (0, 0)),
        ("decoder", {}, (2, 0)),
        ("decoder", {"bigbird_global": 0}, (0, 0)),
    ],
)
def test_it_is_the_equation_with_gradients(role: str, options: dict[str, Any], ends: tuple[int, int]) -> None:
    attention = make(role, layer=1, seed=3, **options).double()
    x, valid = segments(*LENGTHS)
    literal = attention.out_proj(naive(attention, x, LENGTHS, ends))
    outputs = [attention(x, query_valid=valid).output[valid], literal[valid]]
    torch.testing.assert_close(*outputs)
    check_gradients(outputs, [x, *attention.parameters()])


def test_global_vectors_are_blocks_of_their_own_ahead_of_the_tokens() -> None:
    attention = make(bigbird_form="etc").double()
    x, valid = segments(*LENGTHS)
    nodes = attention.first_nodes
    assert nodes.shape == (8, 16)
    both = torch.cat([nodes.expand(4, -1, -1), x], dim=1)
    rows = attention.out_proj(naive(attention, both, [8 + length for length in LENGTHS], (2, 0)))
    update = attention.node_update
    literal = update.norm(both[:, :8] + rows[:, :8])
    literal = update.feed_forward_norm(literal + update.feed_forward(literal))
    attended = attention(x, query_valid=valid)
    torch.testing.assert_close(attended.output[valid], rows[:, 8:][valid])
    torch.testing.assert_close(attended.carry, literal)
    outputs = [
        torch.cat([one[valid].flatten(), other.flatten()])
        for one, other in ((attended.output, attended.carry), (rows[:, 8:], literal))
    ]
    check_gradients(outputs, [x, *attention.parameters()])


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("count", [0, 1, 3])
@torch.no_grad()
def test_as_many_blocks_as_are_seen_are_full_attention(role: str, count: int) -> None:
    """Four blocks and those drawn, because the block beside a global one has only one more neighbour."""
    attention, full = make(role, bigbird_random=count), build("full", role=role, d_model=16, heads=2).eval()
    full.load_state_dict(attention.state_dict())
    length = 4 * (4 + count)
    x, valid = torch.randn(2, length, 16), torch.arange(length) < torch.tensor([[length], [length - 9]])
    one, other = (each(x, query_valid=valid).output[valid] for each in (attention, full))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    longer = torch.randn(1, length + 4, 16)
    assert (attention(longer).output - full(longer).output).abs().max() > 1e-3


@torch.no_grad()
def test_draws_differ_by_seed_layer_and_head_and_not_by_batch() -> None:
    x = torch.randn(1, 160, 16)

    def pairs(**site: Any) -> Tensor:
        return make(**site)(x, need_weights=True).weights > 0

    once = pairs()
    assert torch.equal(once, pairs(dropout=0.1))
    assert not torch.equal(once, pairs(seed=2))
    assert not torch.equal(once, pairs(layer=1))
    assert not torch.equal(once[:, 0], once[:, 1])
    assert (once[0, :, 4:156].sum(-1) == 7 * 4).logical_or(once[0, :, 4:156].sum(-1) == 6 * 4).all()  # beside an end


@torch.no_grad()
def test_decoding_picks_blocks_once_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    picks, picked = RandomBlocks.picks, []
    monkeypatch.setattr(RandomBlocks, "picks", lambda self, block: picked.append(block.tolist()) or picks(self, block))
    attention = make("decoder")
    state, _ = attention.start(1)
    for token in torch.randn(40, 1, 1, 16):
        _, state = attention.step(token, state)
    assert picked == [[block] for block in range(10)]


@torch.no_grad()
def test_the_last_block_is_that_of_the_segment() -> None:
    attention, x = make(), torch.randn(1, 61, 16)
    other = x.clone()
    other[:, 41] += 1  # in the last block of 42 tokens
    valid = (torch.arange(61) < 42).unsqueeze(0)
    reached = [
        (attention(one, query_valid=mask).output - attention(two, query_valid=mask).output).abs().amax((0, 2)) > 0
        for one, two, mask in ((x, other, valid), (x, other, None))
    ]
    assert reached[0][:42].all()
    assert not reached[1].all()


@torch.no_grad()
def test_what_one_layer_gathers_the_next_gives_to_all() -> None:
    below, above, x = make(bigbird_form="etc"), make(bigbird_form="etc", layer=1), torch.randn(1, 160, 16)
    other = x.clone()
    other[:, 80] += 1
    one, two = (above(x, carry=below(each).carry).output for each in (x, other))
    assert (one - two).abs().amax((0, 2)).min() > 1e-6
    assert above(x, carry=below(x).carry).carry is None
    with pytest.raises(MtkitError, match="carries"):
        above(x)


test_what_cannot_be_is_refused = refusals(
    make,
    ({"role": "encoder", "bigbird_window": 4}, "odd"),
    ({"role": "decoder", "bigbird_form": "etc"}, "itc in the decoder role"),
    ({"role": "encoder", "bigbird_form": "external"}, "itc, etc"),
    ({"role": "encoder", "bigbird_form": "etc", "positions": "rotary"}, "positions"),
    ({"role": "encoder", "positions": "alibi"}, "alibi"),
    ({"role": "cross"}, "cross"),
)


@pytest.mark.peer
@torch.no_grad()
def test_it_agrees_with_transformers_on_the_same_draws() -> None:
    """Its own draws are all block 0 outside training, which then counts several times: it is given ours.

    Segments fill their last block and the batch, because its last block is that of the batch.
    """
    modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    config = modeling.BigBirdConfig(
        hidden_size=16, num_attention_heads=2, block_size=4, num_random_blocks=2, max_position_embeddings=64
    )
    ours, theirs = make().double(), modeling.BigBirdBlockSparseAttention(config).double().eval()
    for name in ("query", "key", "value"):
        getattr(theirs, name).load_state_dict(getattr(ours, f"{name[0]}_proj").state_dict())
    seen = ours(torch.zeros(1, 64, 16, dtype=torch.float64), need_weights=True).weights[0, :, ::4, ::4] > 0
    near = (torch.arange(16) - torch.arange(16).unsqueeze(1)).abs() <= 1
    near[:, [0, -1]] = True
    picks = [[row.nonzero().flatten().tolist() for row in (head & ~near)[1:-1]] for head in seen]
    theirs._bigbird_block_rand_mask_with_head = lambda **_: [torch.tensor(head).numpy() for head in picks]
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    mask = torch.ones(2, 64, dtype=torch.float64)
    blocked, band, rows, columns = modeling.BigBirdModel.create_masks_for_block_sparse_attn(mask, 4)
    heads, _ = theirs(x, band, rows, columns, blocked, blocked)
    torch.testing.assert_close(ours(x).output, ours.out_proj(heads))
