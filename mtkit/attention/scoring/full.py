"""Scaled dot-product attention: every query weighs every key by the softmax of their scaled product.

Paper: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv 1706.03762, equation 1.
Departures: none.
Cost: O(T S) time (`mtkit.attention.bases.product_attention`).
"""

from mtkit.attention.bases.product_attention import ProductAttention


class Full(ProductAttention):
    """Scaled dot-product attention over all keys."""

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Vaswani et al. 2017, arXiv 1706.03762"
