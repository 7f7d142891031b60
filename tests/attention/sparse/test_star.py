"""Star-Transformer: its equation token by token, its ring, and the way of its relay through the layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import build
from mtkit.attention.kernels.dot_product import attend
from mtkit.attention.sparse.star import attend_few
from mtkit.errors import MtkitError
from tests.attention.small import refusals

LENGTHS = [17, 9, 3, 2, 1]
CARRY = {"star_memory": "carry"}


def make(role: str = "encoder", layer: int = 0, **options: Any) -> Any:
    torch.manual_seed(layer + 1)
    attention = build("star", role=role, d_model=16, heads=2, layer=layer, layers=3, **options).eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return attention.double()


def segments() -> tuple[Tensor, Tensor]:
    x = torch.randn(len(LENGTHS), LENGTHS[0], 16, dtype=torch.float64, requires_grad=True)
    return x, torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS).unsqueeze(1)


def multi_head(attention: Any, prefix: str, query: Tensor, keys: Tensor) -> Tensor:
    """MHA(query (D,), keys (S, D)), by the projections of that prefix."""
    q_proj, k_proj, v_proj, out_proj = (
        getattr(attention, f"{prefix}{name}") for name in ("q_proj", "k_proj", "v_proj", "out_proj")
    )
    heads = []
    for q, k, v in zip(*(p(x).split(8, -1) for p, x in ((q_proj, query), (k_proj, keys), (v_proj, keys))), strict=True):
        heads.append((k @ q / 8**0.5).softmax(0) @ v)
    output: Tensor = out_proj(torch.cat(heads))
    return output


def neighbours(i: int, length: int, *, closed: bool, causal: bool) -> list[int]:
    """i - 1, i and i + 1, around the ring if closed, each once."""
    around = {i - 1, i} if causal else {i - 1, i, i + 1}
    return sorted({j % length for j in around} if closed else {j for j in around if 0 <= j < length})


def literal(
    attention: Any, tokens: Tensor, relay: Tensor | None, *, closed: bool, embedded: Tensor | None = None
) -> Tensor:
    """The outputs (T, D) of one segment; without a relay, each position has the one that reads its prefix."""
    rows = []
    for i in range(len(tokens)):
        near = neighbours(i, len(tokens), closed=closed, causal=relay is None)
        s = multi_head(attention, "relay_", attention.relay, tokens[: i + 1]) if relay is None else relay
        keys = [*tokens[near], s] if embedded is None else [*tokens[near], embedded[i], s]
        rows.append(multi_head(attention, "", tokens[i], torch.stack(keys)))
    return torch.stack(rows)


def check(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    torch.testing.assert_close(*outputs)
    weight = torch.randn_like(outputs[0])
    fast, wanted = (torch.autograd.grad((each * weight).sum(), inputs, allow_unused=True) for each in outputs)
    for one, other in zip(fast, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{}, {"star_ring": "open"}, {"star_relay": "mean"}])
def test_a_rebuilt_relay_reads_all_and_is_read_by_all(options: dict[str, Any]) -> None:
    attention, (x, valid) = make(**options), segments()
    wanted = []
    for b, length in enumerate(LENGTHS):
        tokens = x[b, :length]
        asked = tokens.mean(0) if "star_relay" in options else attention.relay
        relay = multi_head(attention, "relay_", asked, tokens)
        wanted.append(literal(attention, tokens, relay, closed="star_ring" not in options))
    attended = attention(x, query_valid=valid)
    assert attended.carry is None
    check([attended.output[valid], torch.cat(wanted)], [x, *attention.parameters()])


@pytest.mark.parametrize("options", [{}, {"star_embed_key": True}, {"star_relay": "mean"}])
def test_a_carried_relay_is_updated_between_the_layers(options: dict[str, Any]) -> None:
    """s^t = LN(ReLU(MHA(s^(t-1), [s^(t-1); h^t]))) and h_i = MHA(h_i, [h_(i-1); h_i; h_(i+1); e_i; s])."""
    first, second, (x, valid) = make(**CARRY, **options), make(layer=1, **CARRY, **options), segments()
    below = first(x, query_valid=valid)
    between = x + below.output
    above = second(between, query_valid=valid, carry=below.carry)
    wanted, relays = [], []
    for b, length in enumerate(LENGTHS):
        tokens = x[b, :length]
        relay = tokens.mean(0) if "star_relay" in options else first.relay
        inner = tokens + literal(first, tokens, relay, closed=True)
        relay = second.relay_norm(multi_head(second, "relay_", relay, torch.cat([relay.unsqueeze(0), inner])).relu())
        wanted.append(
            literal(second, inner, relay, closed=True, embedded=tokens if "star_embed_key" in options else None)
        )
        relays.append(relay)
    torch.testing.assert_close(above.carry[:, 0], torch.stack(relays))
    check([above.output[valid], torch.cat(wanted)], [x, *first.parameters(), *second.parameters()])


def test_in_the_decoder_the_relay_reads_the_past() -> None:
    attention, (x, _) = make("decoder"), segments()
    wanted = torch.stack([literal(attention, tokens, None, closed=False) for tokens in x])
    check([attention(x).output, wanted], [x, *attention.parameters()])


@pytest.mark.parametrize("length", [1, 2, 3])
@torch.no_grad()
def test_up_to_three_tokens_are_full_attention_over_them_and_the_relay(length: int) -> None:
    attention, full = make(**CARRY), build("full", role="cross", d_model=16, heads=2).eval().double()
    attention.adopt(full.state_dict())
    x = torch.randn(1, length, 16, dtype=torch.float64)
    wanted = full(x, torch.cat([x, attention.relay.expand(1, 1, -1)], dim=1)).output
    torch.testing.assert_close(attention(x).output, wanted)


@torch.no_grad()
def test_a_segment_of_padding_has_an_equation_too() -> None:
    attention, (x, valid) = make(), segments()
    valid[1] = False
    outputs = [form(x, query_valid=valid).output for form in (attention, attention.naive)]
    torch.testing.assert_close(*(output[valid] for output in outputs))


@torch.no_grad()
def test_decoding_keeps_one_token_and_the_sums_of_the_relay() -> None:
    attention = make("decoder")
    state, _ = attention.start(1)
    sizes = []
    for _ in range(40):
        _, state = attention.step(torch.randn(1, 1, 16, dtype=torch.float64), state)
        tensors = [state["keys"], state["values"], *state["relay"].values()]
        sizes.append(sum(each.numel() for each in tensors))
    assert set(sizes) == {16 + 16 + 2 * (1 + 8)}


@torch.no_grad()
def test_the_last_layer_carries_nothing_and_the_others_ask_for_the_relay() -> None:
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    last = make(layer=2, **CARRY)
    assert last(x, carry=torch.randn(1, 1, 16, dtype=torch.float64)).carry is None
    with pytest.raises(MtkitError, match="carries"):
        last(x)
    assert isinstance(last.relay_norm, nn.LayerNorm)


test_what_cannot_be_is_refused = refusals(
    make,
    ({"role": "decoder", **CARRY}, "local in the decoder role"),
    ({"role": "decoder", "star_ring": "closed"}, "open in the decoder role"),
    ({"role": "decoder", "star_relay": "mean"}, "learned in the decoder role"),
    ({"role": "encoder", "star_embed_key": True}, "star_memory is carry"),
    ({"role": "encoder", "star_ring": "round"}, "closed, open"),
    ({"role": "cross"}, "cross"),
)


def test_each_query_weighs_its_own_keys() -> None:
    q, k, v, k_all, v_all = (torch.randn(2, heads, n, 6) for heads, n in ((4, 5), (2, 5), (2, 5), (2, 1), (2, 1)))
    seen = torch.arange(5) > torch.tensor([[0], [3]])  # (2, 5)
    heads = attend_few(q, [(k, v, seen), (k_all, v_all, None)], scale=0.3)
    for i in range(5):
        keys, values = (torch.cat([own[:, :, i : i + 1], every], 2) for own, every in ((k, k_all), (v, v_all)))
        valid = torch.stack([seen[:, i], torch.ones(2, dtype=torch.bool)], dim=1)
        wanted, _ = attend(q[:, :, i : i + 1], keys, values, scale=0.3, valid=valid)
        torch.testing.assert_close(heads[:, :, i : i + 1], wanted)


def test_a_query_that_sees_nothing_gets_zero() -> None:
    q, k, v = (torch.randn(1, 2, 4, 6) for _ in range(3))
    heads = attend_few(q, [(k, v, torch.zeros(1, 4, dtype=torch.bool))], scale=0.3)
    assert heads.abs().max() == 0
