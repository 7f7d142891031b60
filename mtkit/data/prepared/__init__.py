"""Prepared data: what `mtkit prepare` wrote, opened; what other rooms use of it is here."""

from mtkit.data.prepared.columns import Tokens
from mtkit.data.prepared.folder import Prepared, Side, open_prepared

__all__ = ["Prepared", "Side", "Tokens", "open_prepared"]
