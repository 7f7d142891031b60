"""Grouped-query attention: its two limits, and which heads make a group."""

import pytest
import torch

from mtkit.errors import MtkitError
from tests.attention.small import ROLES, maker

make = maker("grouped-query")


@pytest.mark.parametrize("role", ROLES)
def test_as_many_groups_as_heads_is_full_and_one_group_is_multi_query(role: str) -> None:
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 9, 32) if role == "cross" else None
    for other, kv_heads in (("full", 4), ("multi-query", 1)):
        wanted, grouped = make(role, other), make(role, kv_heads=kv_heads)
        grouped.load_state_dict(wanted.state_dict())
        torch.testing.assert_close(grouped(x, memory).output, wanted(x, memory).output, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("role", ROLES)
def test_neighbouring_heads_make_a_group(role: str) -> None:
    """Heads 0 and 1 read the first key head, 2 and 3 the second; not 0 and 2."""
    full, grouped = make(role, "full"), make(role, kv_heads=2)
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 9, 32) if role == "cross" else None
    grouped.load_state_dict(
        full.state_dict()
        | {
            f"{name}.{part}": getattr(full.get_submodule(name), part)[:16]
            for name in ("k_proj", "v_proj")
            for part in ("weight", "bias")
        }
    )
    outputs = []
    for order in ([0, 0, 1, 1], [0, 1, 0, 1]):
        rows = torch.cat([8 * head + torch.arange(8) for head in order])
        spread = make(role, "full")
        spread.load_state_dict(
            full.state_dict()
            | {
                f"{name}.{part}": getattr(full.get_submodule(name), part)[rows]
                for name in ("k_proj", "v_proj")
                for part in ("weight", "bias")
            }
        )
        outputs.append(spread(x, memory).output)
    got = grouped(x, memory).output
    torch.testing.assert_close(got, outputs[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, outputs[1], atol=1e-3)


def test_groups_must_divide_the_heads() -> None:
    for kv_heads, rule in ((0, "be a whole number"), (3, "divide the 4 heads"), (8, "divide the 4 heads")):
        with pytest.raises(MtkitError, match=f"kv_heads = {kv_heads} must {rule}"):
            make("encoder", kv_heads=kv_heads)
