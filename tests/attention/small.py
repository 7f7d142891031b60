"""Small attentions in float64, and tokens with padding for them, by role."""

from typing import Any

import torch
from torch import Tensor

from mtkit.attention import build

ROLES = ["encoder", "decoder", "cross"]
VALID = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def small(name: str, role: str, **arguments: Any) -> Any:
    """An attention of width 32 with 4 heads, in evaluation."""
    return build(name, **{"role": role, "d_model": 32, "heads": 4} | arguments).double().eval()


def inputs(role: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Queries (2, 7, 32), a memory (2, 7, 32) in the cross role, and the masks; a decoder's tokens are all valid."""
    memory = torch.randn(2, 7, 32).double() if role == "cross" else None
    masks = {} if role == "decoder" else {"memory_valid" if role == "cross" else "query_valid": VALID}
    return torch.randn(2, 7, 32).double(), memory, masks
