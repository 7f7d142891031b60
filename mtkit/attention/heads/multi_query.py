"""Multi-query attention: all query heads read one key head and one value head.

Paper: Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019, arXiv 1911.02150.
Departures: the feed-forward network is not widened to make up for the parameters saved.
Cost: as full attention in training; a step's cache of keys and values is H times smaller, which is the purpose.
"""

from mtkit.attention.contract import Site
from mtkit.attention.slots import KeyValueGroups


class MultiQuery(KeyValueGroups):
    """One key head and one value head for all query heads."""

    paper = "Shazeer 2019, arXiv 1911.02150"

    def __init__(self, site: Site) -> None:
        super().__init__(site, kv_heads=1)
