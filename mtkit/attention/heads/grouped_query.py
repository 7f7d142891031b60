"""Grouped-query attention: neighbouring query heads share a key head and a value head.

Paper: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
EMNLP 2023, arXiv 2305.13245, section 2.
Departures: none. The paper groups only the heads of the decoder's attentions, which have decoding steps.
Cost: as full attention in training; a step's cache of keys and values is H / kv_heads times smaller.
"""

from mtkit.attention.contract import Site
from mtkit.attention.options import Positive
from mtkit.attention.slots import KeyValueGroups


class GroupedQuery(KeyValueGroups):
    """A key head and a value head for each group of neighbouring query heads.

    kv_heads: number of key heads and of value heads; must divide the number of heads.
    """

    paper = "Ainslie et al. 2023, arXiv 2305.13245"

    def __init__(self, site: Site, *, kv_heads: Positive = 2) -> None:
        super().__init__(site, kv_heads)
