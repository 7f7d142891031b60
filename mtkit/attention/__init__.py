"""The public API of the attention mechanisms, for users' own code."""

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
