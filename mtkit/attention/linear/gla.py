"""Gated linear attention: every channel of a head's sums fades at a rate that the token decides.

Paper: Yang, Wang, Shen, Panda and Kim, "Gated Linear Attention Transformers with Hardware-Efficient Training", ICML
2024, arXiv 2312.06635, sections 4.1 to 4.4.
Departures: the encoder role is an extension: a second scan from the end with the same gates. The output norm divides by
the root mean square, as the authors' code does; the paper has a layer norm (norm layer). Keys are as wide as values by
default, so that the weights of `full` load; the paper's are half as wide (key_expand 0.5). Dropout acts on the gated
and normalised outputs.
Cost: O(T (c K + c V + K V)) time for chunks of c, and O(T K log c) exponentials; O(T) memory. A step reads and writes
K V numbers per head, at any position.
"""

from typing import Annotated, Unpack

from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.linear._decayed_attention import DecayedAttention, Heads, unbiased
from mtkit.attention.linear._decayed_sums import Terms
from mtkit.attention.options import Positive, Within


class GLA(DecayedAttention):
    """Sums over earlier tokens that each token fades by learned gates, one for each channel of the keys.

    gate_rank: rank of the map from tokens to gates. gate_temperature: a gate is a sigmoid to the power of 1 over this;
    higher values forget less. gate_bias: initial bias before the sigmoid. key_expand, value_expand: width of a head's
    keys and values, in shares of the plain width. short_conv: taps of a convolution on queries, keys and values; 0:
    none. norm: norm of a head's output. output_gate: activation of the output gate. chunk: number of positions computed
    at once.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"decoder"})
    by_channel = True
    paper = "Yang et al. 2023, arXiv 2312.06635"
    variants = (
        {"norm": "none", "output_gate": "none", "gate_temperature": 1.0},
        {"short_conv": 3, "key_expand": 0.5, "norm": "layer", "output_gate": "sigmoid"},
    )

    def __init__(
        self,
        site: Site,
        *,
        gate_rank: Positive = 16,
        gate_temperature: Annotated[float, Within(1e-2, 1e4)] = 16.0,
        gate_bias: Annotated[float, Within(-100.0, 100.0)] = 0.0,
        **shared: Unpack[Heads],
    ) -> None:
        super().__init__(site, **shared)
        self.temperature = gate_temperature
        self.decay_down = unbiased(site.d_model, gate_rank)
        self.decay_up = xavier_linear(gate_rank, site.heads * self.projection.key_width, gate_bias)

    def terms(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Terms:
        """Return scaled queries, keys and values, and the gates of the tokens."""
        return Terms(q * self.scale, k, v, self.decays_of(tokens))

    def decays_of(self, tokens: Tensor) -> Tensor:
        """Return log sigmoid(W_2 W_1 x + b) / temperature, (B, H, T, K)."""
        logits = upcast(self.decay_up(self.decay_down(tokens)))
        return F.logsigmoid(logits.unflatten(-1, (self.site.heads, -1)).transpose(1, 2)) / self.temperature
