"""Base of attention that convolves score maps, images with one channel per head: it reads the map of the layer below.

The convolution must not see hidden scores: hidden entries are zero before it (not -inf, which would spread), the
softmax masks again after it, and the carried map is zero there too. In the decoder and cross roles the kernel has only
the rows of a query and of those before it, since later queries are not known yet; columns reach both ways, because the
mask has zeroed later keys. So a step needs the few previous rows that the convolution reads; they are kept for each
hypothesis and get one more zero column with each decoded token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import by_hypotheses, upcast
from mtkit.attention.options import refused
from mtkit.errors import MtkitError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky": F.leaky_relu,
    "none": lambda x: x,
}

Convolve = Callable[[Tensor], Tensor]
Kernel = tuple[Tensor, Tensor]
"""Weight (H, H, rows, columns) and bias (H,) of a convolution."""


class Carried(NamedTuple):
    """The carry: the map, and the convolution if all layers share one."""

    map: Tensor
    """(B, H, T, S) as in `Pairs`, in at least float32; zero where hidden."""
    convolution: Kernel | None = None


class ConvolvedMaps(ScoreAttention):
    """Softmax attention whose map is made of this layer's scores and a convolution over the map of the layer below.

    A mechanism defines `combined`. In the first layer of a run, the map is the scores.
    """

    keeps_shapes = False

    def __init__(self, site: Site, *, kernel: int, act: str, share_conv: bool) -> None:
        super().__init__(site)
        if kernel % 2 == 0:
            raise refused("kernel", kernel, "be odd, to have a middle")
        self.reach = kernel // 2
        self.activation = ACTIVATIONS[act]
        self.share_conv = share_conv
        self.convolution: nn.Conv2d | None = None
        if site.layer == 1 or (site.layer > 1 and not share_conv):
            rows = kernel if site.role == "encoder" else self.reach + 1
            self.convolution = nn.Conv2d(site.heads, site.heads, (rows, kernel))
            nn.init.xavier_uniform_(self.convolution.weight)
            assert self.convolution.bias is not None
            nn.init.zeros_(self.convolution.bias)

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the kernel of each head over its own map, row by row, and the norms of its kernels over all maps."""
        learned = super().learned_numbers(inputs)
        if self.convolution is None:
            return learned
        weight = self.convolution.weight
        kernel = weight.diagonal().movedim(-1, 0).flatten(1)
        return learned | {"kernel": kernel.clone(), "kernel norm by head": weight.flatten(2).norm(dim=-1)}

    def combined(self, scores: Tensor, below: Tensor, convolve: Convolve) -> Tensor:
        """Return the map from this layer's scores and the map below, both (B, H, T, S), with one call of `convolve`."""
        raise NotImplementedError

    def logits(self, pairs: Pairs, carry: Carried | None) -> tuple[Tensor, Carried]:
        """Return the map A of `combined`; carries A. Raises: MtkitError above the first layer without a carry."""
        hidden, kernel = self._hidden(pairs), self._kernel(carry)
        image = self._map(
            self.scores(pairs), carry, lambda image: self._convolved(_zeroed(image, hidden), kernel, pairs)
        )
        return image, Carried(_zeroed(image, hidden), kernel if self.share_conv else None)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return the cache and, above the first layer, "rows" (B, N, H, R, S): the previous rows of the convolution's
        input.

        Before the first step they are zero, as beyond the border of the map.
        """
        memory = inputs.memory
        state, _ = super().begin(inputs)
        if self.site.layer > 0:
            width = 0 if memory is None else memory.shape[1]
            shape = (inputs.batch_size, inputs.hypotheses, self.site.heads, self.reach, width)
            state["rows"] = upcast(self.q_proj.weight).new_zeros(shape)
        return state, None

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        hidden = self._hidden(pairs)
        i, j = pairs.query_position, pairs.key_position
        kernel = self._kernel(inputs.carry)

        def convolve(image: Tensor) -> Tensor:
            assert kernel is not None
            weight, bias = kernel
            r, (rows, columns) = self.reach, weight.shape[2:]
            around = F.pad(_zeroed(image, hidden), (r, r, r, r))  # zeros beyond the borders
            total = bias[:, None, None].expand(len(inputs.query), -1, len(i), len(j))
            for row in range(rows):
                for column in range(columns):
                    part = around[:, :, row : row + len(i), column : column + len(j)]
                    total = total + torch.einsum("oc,bcij->boij", weight[:, :, row, column], part)
            return self.activation(total)

        logits = self._map(self.scores(pairs), inputs.carry, convolve)
        weights = self.softmax(logits, pairs)
        output = self.merge_heads(self.outputs(weights, pairs), inputs.query)
        return Attended(output, Carried(_zeroed(logits, hidden), kernel if self.share_conv else None), weights)

    def _map(self, scores: Tensor, carry: Carried | None, convolve: Convolve) -> Tensor:
        if self.site.layer == 0:
            return upcast(scores)
        assert carry is not None  # checked by `_kernel`
        return self.combined(upcast(scores), carry.map, convolve)

    def _kernel(self, carry: Carried | None) -> Kernel | None:
        """Return the layer's convolution, its own or the shared one; None in the first layer."""
        if self.site.layer == 0:
            return None
        if carry is None:
            raise MtkitError(f"layer {self.site.layer} of a run of convolved maps needs the carry of the layer below")
        if self.convolution is None:
            return carry.convolution
        assert self.convolution.bias is not None
        return self.convolution.weight, self.convolution.bias

    def _convolved(self, image: Tensor, kernel: Kernel | None, pairs: Pairs) -> Tensor:
        """Return the convolution of (B, H, T, S), with zeros beyond its borders, and the activation.

        Rows of zeros are added on both sides, but the kernel has no rows below its middle; so there is one output row
        per query and some more, which are cut off. In a step the previous rows come from the state, which is updated.
        """
        assert kernel is not None
        above, count = self.reach, image.shape[2]
        if pairs.state is not None:
            row = by_hypotheses(image, pairs.hypotheses).transpose(1, 2).unsqueeze(3)  # (B, N, H, 1, S)
            previous = pairs.state["rows"]
            previous = F.pad(previous, (0, row.shape[-1] - previous.shape[-1])).type_as(row)
            rows = torch.cat([previous, row], dim=3)  # (B, N, H, R + 1, S)
            pairs.state["rows"] = rows[:, :, :, 1:]
            image, above, count = rows.flatten(0, 1), 0, 1
        weight, bias = kernel
        with torch.autocast(image.device.type, enabled=False):
            convolved = F.conv2d(image, upcast(weight), upcast(bias), padding=(above, self.reach))
        convolved = self.activation(convolved[:, :, :count])
        # in a step of the cross role the hypotheses are queries
        return convolved if len(convolved) == len(pairs.q) else by_hypotheses(convolved, pairs.hypotheses)

    def _hidden(self, pairs: Pairs) -> Tensor | None:
        """Return the map's zeros: at masked scores and, if the kernel reads later rows, at padded rows."""
        visible = pairs.visible
        if visible is None:
            return None
        if self.site.role == "encoder" and pairs.valid is not None:
            visible = visible & pairs.valid[:, None, :, None]
        return ~visible


def _zeroed(image: Tensor, hidden: Tensor | None) -> Tensor:
    return image if hidden is None else image.masked_fill(hidden, 0.0)
