"""Linear maps as decoding computes them."""

from mtkit.model.products.context import is_low, products

__all__ = ["is_low", "products"]
