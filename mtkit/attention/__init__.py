"""Attention mechanisms behind one contract; everything that a user's own code calls is here."""

from mtkit.attention.contract import ROLES, Attended, Attention, Beginning, Inputs, Site, State, reorder
from mtkit.attention.registry import Mechanism, build, mechanisms

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
