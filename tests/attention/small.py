"""Small attentions, and tokens in float64 with padding for them, by role."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention, build
from mtkit.errors import MtkitError

ROLES = ["encoder", "decoder", "cross"]
VALID = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def maker(
    name: str, role: str = "encoder", *, double: bool = False, stir: float = 0.0, seed: int | None = None, **site: Any
) -> Callable[..., Any]:
    """A function that builds attentions in evaluation, of width 32 with 4 heads unless `site` says otherwise.

    The arguments here are the defaults of its own. stir: deviation of numbers added to all parameters, so that none is
    zero. seed: what it sets PyTorch's generator to.
    """
    default_name, default_role = name, role

    def make(role: str = default_role, name: str = default_name, **arguments: Any) -> Any:
        if seed is not None:
            torch.manual_seed(seed)
        attention = build(name, **{"role": role, "d_model": 32, "heads": 4} | site | arguments).eval()
        for parameter in attention.parameters() if stir else ():
            parameter.data.add_(stir * torch.randn_like(parameter))
        return attention.double() if double else attention

    return make


def refusals(make: Callable[..., Any], *cases: tuple[dict[str, Any], str], **common: Any) -> Callable[..., None]:
    """Return a test that `make` refuses the options of each case with an error that matches the case's pattern."""

    @pytest.mark.parametrize(("options", "message"), cases)
    def test(options: dict[str, Any], message: str) -> None:
        with pytest.raises(MtkitError, match=message):
            make(**common | options)

    return test


def inputs(role: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Queries (2, 7, 32), a memory (2, 7, 32) in the cross role, and the masks; a decoder's tokens are all valid."""
    memory = torch.randn(2, 7, 32).double() if role == "cross" else None
    masks = {} if role == "decoder" else {"memory_valid" if role == "cross" else "query_valid": VALID}
    return torch.randn(2, 7, 32).double(), memory, masks


def tokens(*shape: int) -> Tensor:
    """Random vectors (*shape, 32) in float64."""
    return torch.randn(*shape, 32, dtype=torch.float64)


def adopting(make: Callable[..., Any], full: Attention, **arguments: Any) -> Any:
    """An attention in the role of `full` that has taken over its weights."""
    attention = make(full.site.role, **arguments)
    attention.adopt(full.state_dict())
    return attention


def check_zero_keys(make: Callable[..., Any], role: str, **options: Any) -> None:
    """Compares outputs with those of full attention if all keys are zero: both are uniform means."""
    full = make(role, "full", **{slot: name for slot, name in options.items() if slot == "projection"})
    torch.nn.init.zeros_(full.k_proj.weight)
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 6, 32) if role == "cross" else None
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2]) if role == "cross" else None
    attended = adopting(make, full, **options)(x, memory, memory_valid=valid)
    torch.testing.assert_close(attended.output, full(x, memory, memory_valid=valid).output, rtol=1e-5, atol=1e-5)
