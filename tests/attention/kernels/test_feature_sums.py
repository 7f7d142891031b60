"""Sums of features over all keys and over prefixes, whole and in parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import build
from mtkit.attention.bases import feature_attention
from mtkit.attention.kernels.feature_sums import (
    Gates,
    Keys,
    attend_all,
    attend_causal,
    attend_parts,
    elu1,
    masked,
    read,
    sums_of,
)
from tests.contract.counting import saved_tensors

EPS = 1e-6


def features(length: int, *, keys: int = 4, values: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """phi_q (2, 4, T, 3), phi_k (2, G, T, 3) and v (2, G', T, 5), the features positive."""
    shapes = (2, 4, length, 3), (2, keys, length, 3), (2, values, length, 5)
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [each.requires_grad_() for each in (elu1(q), elu1(k), v)]


def written_out(phi_q: Tensor, phi_k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    phi_k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in (phi_k, v))
    similarity = torch.einsum("bhtm,bhsm->bhts", phi_q, phi_k)
    similarity = similarity.tril() if causal else similarity
    return torch.einsum("bhts,bhsv->bhtv", similarity / (similarity.sum(-1, keepdim=True) + EPS), v)


def agree(one: Callable[..., Tensor], other: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Outputs and gradients of both are the same to float64 precision."""
    outputs = one(*inputs), other(*inputs)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(output, inputs, direction, materialize_grads=True) for output in outputs]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 37])
def test_chunks_are_the_triangle_of_similarities(length: int) -> None:
    agree(
        lambda *x: attend_causal(*x, Keys, eps=EPS, chunk=8), lambda *x: written_out(*x, causal=True), features(length)
    )


@pytest.mark.parametrize("length", [1, 3, 4, 5, 37])
def test_similarities_of_few_keys_and_sums_of_many_are_one_equation(length: int) -> None:
    agree(lambda *x: attend_all(*x, eps=EPS), lambda *x: written_out(*x, causal=False), features(length))


@pytest.mark.parametrize(("keys", "values"), [(4, 4), (2, 2), (1, 4)])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_few_rows_are_read_as_sums_of_many_are(length: int, keys: int, values: int) -> None:
    phi_q, phi_k, v = (x.detach() for x in features(length, keys=keys, values=values))
    scale = 3 * torch.randn(*phi_k.shape[:3], 1, dtype=torch.float64)
    held = sums_of(Keys(phi_k, scale), v)
    assert len(held) == (2 if length * (3 + 6) < 3 * 6 else 1)
    expected = written_out(phi_q, phi_k * scale.exp() * 1e9, v, causal=False)  # beside which EPS is nothing
    torch.testing.assert_close(read(phi_q, held, like=v), expected)


@pytest.mark.parametrize("length", [3, 9])
@pytest.mark.parametrize("real", [0, 2])
def test_a_key_whose_scale_is_nowhere_does_not_count(length: int, real: int) -> None:
    phi_q, phi_k, v = (x.detach() for x in features(length))
    scale = 5 * torch.randn(2, 4, length, 1, dtype=torch.float64)
    valid = (torch.arange(length) < real).view(1, 1, -1, 1)
    got = attend_all(phi_q, masked(Keys(phi_k, scale), valid), v, floor=1e-20)
    if real == 0:
        assert not got.any()
    else:
        few = attend_all(phi_q, Keys(phi_k[:, :, :real], scale[:, :, :real]), v[:, :, :real], floor=1e-20)
        torch.testing.assert_close(got, few)


@pytest.mark.parametrize(("keys", "values"), [(4, 4), (2, 2), (1, 1), (1, 4), (4, 2)])
def test_neighbouring_heads_share_keys_and_values(keys: int, values: int) -> None:
    inputs = features(11, keys=keys, values=values)
    agree(lambda *x: attend_causal(*x, Keys, eps=EPS, chunk=4), lambda *x: written_out(*x, causal=True), inputs)
    agree(lambda *x: attend_all(*x, eps=EPS), lambda *x: written_out(*x, causal=False), inputs)


def gated(phi_q: Tensor, phi_k: Tensor, v: Tensor, kept: Tensor, added: Tensor) -> Tensor:
    """The recurrence of `Gates`, one position after the other."""
    phi_k, v, kept, added = (x.repeat_interleave(4 // x.shape[1], 1) for x in (phi_k, v, kept, added))
    v1, outputs = torch.cat([v, torch.ones_like(v[..., :1])], -1), []
    sums = torch.zeros(2, 4, phi_k.shape[-1], v1.shape[-1], dtype=v.dtype)
    for t in range(v.shape[2]):
        here = slice(t, t + 1)
        sums = kept[:, :, here].exp() * sums + added[:, :, here] * phi_k[:, :, here].mT @ v1[:, :, here]
        total = phi_q[:, :, here] @ sums
        outputs.append(total[..., :-1] / total[..., -1:])
    return torch.cat(outputs, 2)


def gates_for(v: Tensor) -> list[Tensor]:
    logits = 3 * torch.randn(*v.shape[:3], 1, dtype=v.dtype)
    return [F.logsigmoid(logits).detach().requires_grad_(), torch.sigmoid(-logits).detach().requires_grad_()]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 23])
@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_gated_sums_are_the_recurrence_with_gradients(length: int, keys: int, scaled: bool) -> None:
    """Where keys come with a log scale, exponents are far beyond float64 but for what is relative."""
    inputs = features(length, keys=keys, values=keys)
    inputs += gates_for(inputs[2])
    scale = torch.randn(2, keys, length, 1, dtype=torch.float64, requires_grad=True)

    def parts(phi_q: Tensor, phi_k: Tensor, v: Tensor, kept: Tensor, added: Tensor) -> Tensor:
        return attend_causal(phi_q, phi_k, v, Keys, gates=Gates(kept, added), chunk=4)

    def scaled_parts(phi_q: Tensor, k: Tensor, v: Tensor, kept: Tensor, added: Tensor, scale: Tensor) -> Tensor:
        """Scales come with the keys, as one more feature."""
        q, k = (F.pad(phi_q, (0, 1)), torch.cat([k, scale], -1))
        gates = Gates(kept, added)
        return attend_causal(q, k, v, lambda x: Keys(x[..., :-1], x[..., -1:] + 900), gates=gates, chunk=4)

    def scaled_sums(phi_q: Tensor, k: Tensor, v: Tensor, kept: Tensor, added: Tensor, scale: Tensor) -> Tensor:
        return gated(phi_q, k * (scale + 20).exp(), v, kept, added)

    if scaled:
        agree(scaled_parts, scaled_sums, [*inputs, scale])
    else:
        agree(parts, gated, inputs)


def test_padding_forgets_nothing_and_adds_nothing() -> None:
    """In the middle here, so that it would be seen."""
    inputs = [x.detach() for x in features(13)]
    inputs += [x.detach() for x in gates_for(inputs[2])]
    real = torch.tensor([0, 1, 2, 5, 6, 7, 8, 11, 12])
    valid = torch.zeros(2, 13, dtype=torch.bool).index_fill(1, real, True)

    def parts(*x: Tensor, valid: Tensor | None = None) -> Tensor:
        return attend_causal(*x[:3], Keys, gates=Gates(*x[3:]), valid=valid, chunk=4)

    torch.testing.assert_close(parts(*inputs, valid=valid)[:, :, real], parts(*(x[:, :, real] for x in inputs)))


def test_gates_that_close_forget_all_and_stay_finite() -> None:
    inputs = features(9)
    kept, added = (torch.full((2, 4, 9, 1), value, dtype=torch.float64, requires_grad=True) for value in (-1e4, 1.0))
    output = attend_causal(*inputs, Keys, gates=Gates(kept, added), chunk=4)
    torch.testing.assert_close(output, inputs[2].detach())  # each sees itself alone
    gradients = torch.autograd.grad(output.sum(), [*inputs, kept, added])
    assert all(each.isfinite().all() for each in gradients)


def test_a_key_with_zero_features_does_not_count() -> None:
    phi_q, phi_k, v = (x.detach() for x in features(9))
    padded = phi_k.clone()
    padded[:, :, 6:] = 0.0
    kept = attend_all(phi_q, phi_k[:, :, :6], v[:, :, :6], eps=EPS)
    torch.testing.assert_close(attend_all(phi_q, padded, v, eps=EPS), kept)
    assert not attend_all(phi_q, torch.zeros_like(phi_k), v, eps=EPS).any()


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_leaves_the_sums_in_float32(causal: bool) -> None:
    """A count of 600 in bfloat16 would stop at 256, and the mean of 1 and 3 with it."""
    ones = torch.ones(1, 1, 600, 2, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 3.0]).repeat(300).view(1, 1, 600, 1).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        means = (
            attend_causal(ones, ones, v, lambda x: Keys(x.float()), eps=EPS, chunk=64)
            if causal
            else attend_all(ones, ones, v, eps=EPS)
        )
    assert means.dtype == torch.bfloat16
    assert means[0, 0, -1].item() == 2.0


def test_what_backward_keeps_grows_with_the_length_and_no_faster() -> None:
    def kept(length: int) -> tuple[int, int]:
        saved = saved_tensors(lambda: attend_causal(*features(length), Keys, eps=EPS, chunk=8))
        sizes = [x.numel() for x in saved]
        return sum(sizes), max(sizes)

    (short, _), (long, largest) = kept(256), kept(1024)
    assert long < 4.1 * short
    assert largest < 2 * 4 * 1024 * 3 * 5  # not the (T, M, V) of all prefix sums


def test_elu1_is_elu_plus_one_without_its_rounding() -> None:
    x = torch.tensor([-12.0, -1.0, 0.0, 0.5, 3.0], requires_grad=True)
    torch.testing.assert_close(elu1(x), torch.nn.functional.elu(x.double()).add(1).float())
    assert elu1(x)[0].item() == pytest.approx(torch.tensor(-12.0).double().exp().item(), rel=1e-6)
    assert torch.autograd.grad(elu1(x).sum(), x)[0][2].item() == 1.0
    assert torch.autograd.gradcheck(elu1, torch.randn(20, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 37])
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_parts_are_the_matrix_of_similarities(length: int, keys: int) -> None:
    agree(
        lambda *x: attend_parts(*x, Keys, eps=EPS, chunk=8),
        lambda *x: written_out(*x, causal=False),
        features(length, keys=keys, values=2 if keys == 2 else 4),
    )


@pytest.mark.parametrize("real", [0, 3, 8, 20])
def test_scales_and_padding_are_those_of_all_keys_at_once(real: int) -> None:
    """Scales apart by more than an exponential can hold; also where a segment has no key, or parts have none."""
    q, k, v = features(20)
    scale = (300 * torch.randn(2, 4, 20, 1, dtype=torch.float64)).requires_grad_()
    valid = torch.stack([torch.ones(20, dtype=torch.bool), torch.arange(20) < real])

    def parts(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        with_scale = torch.cat([k, scale], -1)
        return attend_parts(q, with_scale, v, lambda x: Keys(x[..., :3], x[..., -1:]), valid=valid, chunk=4, floor=1e-3)

    def at_once(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return attend_all(q, masked(Keys(k, scale), valid[:, None, :, None]), v, floor=1e-3)

    agree(parts, at_once, [q, k, v, scale])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {}),
        ("performer", {"features": 9}),
        ("performer", {"features": 9, "feature_map": "trig", "projection": "grouped-query"}),
        ("rfa", {"features": 9}),
    ],
)
@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_a_mechanism_gives_the_same_in_parts(
    name: str, options: dict[str, Any], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = build(name, role=role, d_model=16, heads=4, **options).double()
    query, memory = (torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True) for length in (11, 14))
    tokens = {"encoder": [query], "cross": [query, memory]}[role]
    valid = torch.arange(tokens[-1].shape[1]) < torch.tensor([[tokens[-1].shape[1]], [5]])
    masks = {"query_valid": valid} if role == "encoder" else {"memory_valid": valid}
    inputs = [*tokens, *attention.parameters()]

    def run(*_: Tensor) -> Tensor:
        return attention(*tokens, **masks).output

    def in_parts(*_: Tensor) -> Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(feature_attention, "PART", 4)
            return run()

    agree(in_parts, run, inputs)
