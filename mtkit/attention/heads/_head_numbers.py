"""A projection whose queries and keys have another number of heads than the model, and whose values have another."""

from mtkit.attention.contract import Site
from mtkit.attention.options import refused
from mtkit.attention.slots import Projection


class HeadNumbers(Projection):
    """Key heads, and value heads, share the width of the model equally, as heads do elsewhere."""

    def __init__(self, site: Site, key_heads: int, value_heads: int) -> None:
        """Raises: MtkitError where they do not divide the width."""
        super().__init__(site)
        for option, heads in (("key_heads", key_heads), ("value_heads", value_heads)):
            if site.d_model % heads:
                raise refused(option, heads, f"divide the model's width {site.d_model}")
        self.heads = self.key_heads = key_heads
        self.value_heads = value_heads
        self.key_width = site.d_model // key_heads
        self.value_width = site.d_model // value_heads

    @property
    def joined_width(self) -> int:
        """The width of the model."""
        return self.value_heads * self.value_width
