"""Features part by part: the same outputs and gradients as with the features of all positions at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.bases import feature_attention
from mtkit.attention.kernels.feature_sums import Keys, attend_all, attend_parts, masked
from tests.attention.kernels.test_feature_sums import EPS, agree, features, written_out


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
