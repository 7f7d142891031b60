"""The public API of the attention mechanisms, for users' own code.

    attention = build("longformer", role="encoder", d_model=256, heads=4, window_radius=64)
    output = attention(tokens, query_valid=valid).output  # tokens (B, T, 256), valid (B, T); output (B, T, 256)

`mechanisms()` describes all mechanisms, `mtkit.attention.contract` inputs, outputs and decoding.
"""

from mtkit.attention.construction import build
from mtkit.attention.contract import ROLES, Attended, Attention, Beginning, Inputs, Site, State
from mtkit.attention.registry import Mechanism, mechanisms
from mtkit.attention.states import reorder

__all__ = [
    "ROLES",
    "Attended",
    "Attention",
    "Beginning",
    "Inputs",
    "Mechanism",
    "Site",
    "State",
    "build",
    "mechanisms",
    "reorder",
]
