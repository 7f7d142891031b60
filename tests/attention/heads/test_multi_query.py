"""Multi-query attention: one key and value head for all, in `full` and around other mechanisms."""

import pytest
import torch

from tests.attention.small import ROLES, maker

make = maker("multi-query")


@pytest.mark.parametrize("name", ["full", "realformer", "linear", "linformer"])
@pytest.mark.parametrize("role", ROLES)
def test_heads_with_equal_keys_and_values_are_reproduced(name: str, role: str) -> None:
    if name == "linformer" and role == "decoder":
        return
    many, one = make(role, name), make(role, name, projection="multi-query")
    with torch.no_grad():
        for linear in (many.k_proj, many.v_proj):
            torch.nn.init.normal_(linear.bias)
            linear.weight.copy_(linear.weight[:8].repeat(4, 1))
            linear.bias.copy_(linear.bias[:8].repeat(4))
    one.adopt(many.state_dict())  # pooling heads that are equal leaves them as they are
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 9, 32) if role == "cross" else None
    torch.testing.assert_close(one(x, memory).output, many(x, memory).output, rtol=1e-5, atol=1e-5)


def test_the_cache_of_a_step_is_as_many_times_smaller_as_there_are_heads() -> None:
    states = [make("decoder", name).start(2, hypotheses=3)[0] for name in ("full", "multi-query")]
    for name in ("keys", "values"):
        assert states[0]["shared"][name].numel() == 4 * states[1]["shared"][name].numel()
    memory = torch.randn(2, 9, 32)
    assert make("cross").start(2, memory)[0]["shared"]["keys"].shape == (2, 1, 9, 8)
