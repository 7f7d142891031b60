"""Gated delta rule: the papers' recurrence from the raw weights in every role, its limits, and the plain delta rule."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import Inputs, build
from mtkit.attention.linear._decayed_sums import Terms, read_both_ways, read_causal, sums_after
from mtkit.attention.linear.delta import Writes, memory_after
from mtkit.attention.linear.delta import read_causal as read_delta
from tests.attention.small import refusals

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gate": "channel"},
    {"gate": "channel", "gate_floor": -2.0, "negative_eigenvalues": True, "short_conv": 0, "output_gate": "silu"},
    {"value_expand": 2.0, "key_expand": 0.5},
]


def make(role: str = "decoder", **arguments: Any) -> Any:
    torch.manual_seed(0)
    return build("gated-delta", **{"role": role, "d_model": 32, "heads": 4, "chunk": 5} | arguments).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64)


def mixed(delta: Any, joined: Tensor, *, flip: bool) -> Tensor:
    """PyTorch's convolution over earlier or later inputs, and SiLU."""
    if delta.convolution is not None:
        joined = joined.flip(1) if flip else joined
        kernel = delta.convolution.weight.flip(0).T.unsqueeze(1)
        joined = F.conv1d(F.pad(joined.mT, (kernel.shape[2] - 1, 0)), kernel, groups=joined.shape[2]).mT
        joined = joined.flip(1) if flip else joined
    return joined * joined.sigmoid()


def gates(delta: Any, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """alpha (B, T, H, K) and beta (B, T, H)."""
    layers = delta.decay_proj if options.get("gate") == "channel" else [delta.decay_proj]
    logits = x
    for layer in layers:
        logits = logits @ layer.weight.T
    logits = (logits + delta.decay_bias).unflatten(-1, (4, -1))
    rate = delta.log_rate.exp().unsqueeze(-1)
    floor = options.get("gate_floor")
    log_alpha = -rate * F.softplus(logits) if floor is None else floor * (rate * logits).sigmoid()
    beta = (x @ delta.beta_proj.weight.T).sigmoid() * (2 if options.get("negative_eigenvalues") else 1)
    return log_alpha.exp().expand(-1, -1, -1, delta.projection.key_width), beta


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def scan(delta: Any, x: Tensor, options: dict[str, Any], *, flip: bool = False) -> tuple[Tensor | None, Tensor]:
    """S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_t-1 + beta_t k_t v_t^T: reads (B, T, H V), and the last sums.

    flip: from the end, read after the decay and before the write.
    """
    maps = [delta.k_proj, delta.v_proj] if delta.site.role == "cross" else [delta.q_proj, delta.k_proj, delta.v_proj]
    parts = mixed(delta, torch.cat([linear(x) for linear in maps], -1), flip=flip)
    *q, k, v = parts.split([linear.out_features for linear in maps], -1)
    k, v = unit(k.unflatten(-1, (4, -1))), v.unflatten(-1, (4, -1))
    alpha, beta = gates(delta, x, options)
    sums, outputs = torch.zeros(len(x), 4, k.shape[-1], v.shape[-1], dtype=x.dtype), []
    order = range(x.shape[1])[::-1] if flip else range(x.shape[1])
    for t in order:
        kept = alpha[:, t].unsqueeze(-1) * sums
        erased = torch.eye(k.shape[-1]).double() - beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None, :]
        sums = erased @ kept + beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        if q:
            row = unit(q[0].unflatten(-1, (4, -1)))[:, t].unsqueeze(-2)
            outputs.append((row @ (kept if flip else sums)).flatten(1))
    return torch.stack(outputs[::-1] if flip else outputs, 1) if q else None, sums


def finished(delta: Any, heads: Tensor, x: Tensor, options: dict[str, Any]) -> Tensor:
    """W_O (RMS norm of each head * gate)."""
    by_head = heads.unflatten(-1, (4, -1))
    rows = (by_head / (by_head.square().mean(-1, keepdim=True) + 1e-5).sqrt() * delta.norm.weight).flatten(2)
    gate = x
    for layer in delta.gate_proj if options.get("gate") == "channel" else [delta.gate_proj]:
        gate = gate @ layer.weight.T
    kda = options.get("gate") == "channel" and "output_gate" not in options
    output: Tensor = delta.out_proj(rows * (gate.sigmoid() if kda else gate * gate.sigmoid()))
    return output


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_it_is_the_recurrence_of_the_papers(role: str, options: dict[str, Any]) -> None:
    delta, x, query = make(role, **options), tokens(2, 13), tokens(2, 4)
    delta.norm.weight.copy_(torch.rand_like(delta.norm.weight))
    heads, sums = scan(delta, x, options)
    if role == "cross":
        q = delta.q_proj(query)
        q = unit((q * q.sigmoid()).unflatten(-1, (4, -1)))
        heads = torch.einsum("bthk,bhkv->bthv", q, sums).flatten(2)
        output, own = delta(query, x).output, query
    else:
        output, own = delta(x).output, x
        if role == "encoder":
            heads = heads + scan(delta, x, options, flip=True)[0]
    torch.testing.assert_close(output, finished(delta, heads, own, options), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("width", [1, 6])
@torch.no_grad()
def test_without_decay_it_is_the_delta_rule(width: int) -> None:
    q, k = (F.normalize(torch.randn(2, 3, 23, 6, dtype=torch.float64), dim=-1) for _ in range(2))
    v, beta = torch.randn(2, 3, 23, 5, dtype=torch.float64), torch.rand(2, 3, 23, 1, dtype=torch.float64)
    terms = Terms(q, k, v, torch.zeros(2, 3, 23, width, dtype=torch.float64), beta)
    torch.testing.assert_close(read_causal(terms, 7), read_delta(q, Writes(k, v, beta), 7))
    torch.testing.assert_close(sums_after(terms, 7), memory_after(Writes(k, v, beta), 7))


@torch.no_grad()
def test_a_rate_of_almost_zero_keeps_all() -> None:
    delta = make()
    delta.log_rate.fill_(-60.0)
    assert delta.decays_of(tokens(2, 5)).exp().eq(1).all()


@torch.no_grad()
def test_a_place_written_again_holds_what_was_written_last() -> None:
    """beta = 1, no decay, keys at right angles."""
    k = torch.eye(6, dtype=torch.float64)[[0, 3, 0, 5, 3, 3, 0, 1]].view(1, 1, 8, 6)
    v, ones = torch.randn(1, 1, 8, 5, dtype=torch.float64), torch.ones(1, 1, 8, 1, dtype=torch.float64)
    q = torch.eye(6, dtype=torch.float64)[3].expand(1, 1, 8, 6)
    found = read_causal(Terms(q, k, v, torch.zeros_like(ones), ones), 3)[0, 0]
    last = [None, 1, 1, 1, 4, 5, 5, 5]
    wanted = torch.stack([torch.zeros(5).double() if j is None else v[0, 0, j] for j in last])
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_keys_at_right_angles_add_up() -> None:
    k = torch.eye(6, dtype=torch.float64)[[4, 0, 2, 1]].view(1, 1, 4, 6)
    v, beta = torch.randn(1, 1, 4, 5, dtype=torch.float64), torch.rand(1, 1, 4, 1, dtype=torch.float64)
    terms = Terms(torch.randn_like(k), k, v, torch.zeros_like(beta), beta)
    torch.testing.assert_close(read_both_ways(terms, terms, 2), terms.q @ (k.mT @ (beta * v)))


@torch.no_grad()
def test_one_token_gives_its_value_by_beta_and_its_match_with_the_query() -> None:
    bare = {"norm": "none", "output_gate": "none", "short_conv": 0}
    for role in ("encoder", "decoder"):
        delta, x = make(role, **bare), tokens(3, 1)
        q, k, v = (F.silu(p(x)).unflatten(-1, (4, 8)) for p in (delta.q_proj, delta.k_proj, delta.v_proj))
        match = (unit(q) * unit(k)).sum(-1, keepdim=True)
        beta = (x @ delta.beta_proj.weight.T).sigmoid().unsqueeze(-1)
        torch.testing.assert_close(delta(x).output, delta.out_proj((beta * match * v).flatten(2)))


@torch.no_grad()
def test_equal_channels_are_a_head() -> None:
    head, channel, x = make(output_gate="silu"), make(gate="channel", output_gate="none"), tokens(2, 13)
    head.gate_proj = None
    state = {name: value for name, value in head.state_dict().items() if not name.startswith("decay")}
    channel.load_state_dict(state, strict=False)
    channel.decay_proj[0].weight.copy_(F.pad(head.decay_proj.weight, (0, 0, 0, 4)))  # rank 8, of which 4 are used
    channel.decay_proj[1].weight.copy_(torch.eye(4, 8).repeat_interleave(8, 0))
    channel.decay_bias.copy_(head.decay_bias.repeat_interleave(8))
    torch.testing.assert_close(channel(x).output, head(x).output)


@torch.no_grad()
def test_the_source_is_the_memory_that_a_decoder_has_after_it() -> None:
    cross, x = make("cross", short_conv=0), tokens(2, 11)
    decoder = make(short_conv=0)
    decoder.load_state_dict(cross.state_dict())
    torch.testing.assert_close(cross(x[:, -1:], x).output, decoder(x).output[:, -1:])


@torch.no_grad()
def test_padding_behind_a_source_does_not_fade_it() -> None:
    cross, x, query = make("cross", gate="channel"), tokens(2, 11), tokens(2, 3)
    padded = torch.cat([x, 1e3 * tokens(2, 6)], 1)
    valid = (torch.arange(17) < 11).expand(2, 17)
    torch.testing.assert_close(cross(query, padded, memory_valid=valid).output, cross(query, x).output)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_thousand_alike_keys_in_float32_stay_near_float64(gate: str) -> None:
    """Keys that are nearly the same make the triangular systems hardest; twice the value, too."""
    delta = make(gate=gate, negative_eigenvalues=True, chunk=64)
    x = tokens(1, 1) + 0.05 * tokens(1, 1000)
    exact = delta(x).output
    output = delta.float()(x.float()).output
    torch.testing.assert_close(output.double(), exact, rtol=1e-3, atol=1e-3)
    output.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in delta.parameters() if parameter.grad is not None)


@torch.no_grad()
def test_a_floor_bounds_the_decay_and_shares_are_means() -> None:
    delta, x = make(gate="channel", gate_floor=-2.0), 100 * tokens(2, 9)
    assert delta.decays_of(x).min() >= -2.0
    assert delta.decays_of(x).max() <= 0.0
    numbers = make().learned_numbers(Inputs(x / 100))
    alpha, beta = gates(make(), x / 100, {})
    torch.testing.assert_close(numbers["kept share"].double(), alpha.mean((0, 1, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(numbers["replaced share"].double(), beta.mean((0, 1)), rtol=1e-5, atol=1e-6)


test_options_that_cannot_be_are_refused = refusals(
    make,
    ({"gate": "heads"}, "did you mean 'head'"),
    ({"gate_floor": 1.0}, "gate_floor = 1"),
    ({"chunk": 0}, "chunk = 0"),
    ({"output_gate": "relu"}, "output_gate = 'relu'"),
    ({"role": "cross", "positions": "rotary"}, "cross"),
)
