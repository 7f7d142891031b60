"""Attention whose maps of scores are images, a channel for each head: a convolution reads the map of the layer below.

The convolution sees no score that must stay hidden: what the mask hides is zero before it (not -inf, which would
spread), the softmax masks again after it, and what travels up the layers is zero there too. In the decoder and cross
roles its kernel has only the rows of a query and of those before it, since the queries after it are not known yet;
columns reach both ways, for the mask has zeroed those of later keys. So a step needs the few previous rows that the
convolution reads, kept for each hypothesis and wider by a zero column with each decoded token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.contract import Attended, Site, State
from mtkit.attention.engines.heads.key_value_attention import KeyValueAttention
from mtkit.attention.engines.softmax.dot_product import (
    by_hypotheses,
    safe_softmax,
    scores_of,
    visible_keys,
    weigh,
    widened,
)
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
    """What goes up the layers: the map, and the convolution where all layers share one."""

    map: Tensor
    """(B, H, T, S), or the newest row of each hypothesis (B, N, H, S), in float32 at least; zero where hidden."""
    convolution: Kernel | None = None


class ConvolvedMaps(KeyValueAttention):
    """Softmax attention with a map made of this layer's scores and a convolution over what comes from below.

    A mechanism says how in `mixed`. The first layer of a run has nothing below: its map is its scores.
    """

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

    def mixed(self, scores: Tensor, below: Tensor, convolve: Convolve) -> Tensor:
        """The map from this layer's scores and the map below, both (B, H, T, S), with one call of `convolve`."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
        need_weights: bool = False,
    ) -> Attended:
        """softmax(A) V, the map A by `mixed`; carries A. Raises: MtkitError above the first layer without a carry."""
        valid = query_valid if memory is None else memory_valid
        q = self.queries(query)
        k, v = self.keys_values(query if memory is None else memory)
        visible = visible_keys(q, k, self.site.causal, valid)
        hidden = self._hidden(visible, query_valid)
        kernel = self._kernel(carry)
        logits = self._map(
            scores_of(q, k, self.scale), carry, lambda image: self._convolved(_zeroed(image, hidden), kernel)
        )
        heads, weights = weigh(
            logits,
            q,
            v,
            scale=self.scale,
            visible=visible,
            positions=self.positions,
            query_position=torch.arange(q.shape[2], device=q.device),
            key_position=torch.arange(k.shape[2], device=q.device),
            dropout=self.dropout,
        )
        losses = self.losses(heads, v, weights, query_valid, memory_valid)
        carried = self._carried(_zeroed(logits, hidden), kernel)
        return Attended(self.joined(heads), carried, weights if need_weights else None, losses)

    def start(
        self,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        *,
        hypotheses: int = 1,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
    ) -> tuple[State, Any]:
        """The keys and values, and above the first layer "rows" (B, N, H, R, S): what the convolution read before.

        Before the first step they are zero, as beyond the border of the map.
        """
        state, _ = super().start(batch_size, memory, memory_valid, hypotheses=hypotheses)
        if self.site.layer > 0:
            width = 0 if memory is None else memory.shape[1]
            shape = (batch_size, hypotheses, self.site.heads, self.reach, width)
            state["rows"] = widened(self.q_proj.weight).new_zeros(shape)
        return state, None

    def step(
        self, query: Tensor, state: State, *, carry: Any = None, need_weights: bool = False
    ) -> tuple[Attended, State]:
        """The newest row of the map of each hypothesis; O(H²) for each key within the kernel's reach."""
        hypotheses = query.shape[1]
        newest, state = self.newest(query, state)
        hidden = None if newest.visible is None else ~newest.visible  # (B, 1, 1, S)
        kernel = self._kernel(carry)

        def convolve(row: Tensor) -> Tensor:
            row = _zeroed(row, hidden).unsqueeze(3)
            before = F.pad(state["rows"], (0, row.shape[-1] - state["rows"].shape[-1])).type_as(row)
            image = torch.cat([before, row], dim=3)  # (B, N, H, R + 1, S)
            state["rows"] = image[:, :, :, 1:]
            convolved = self._convolved(image.flatten(0, 1), kernel, above=0)  # (B*N, H, 1, S)
            return convolved.squeeze(2).unflatten(0, (-1, hypotheses))

        scores = by_hypotheses(scores_of(newest.q, newest.keys, self.scale), hypotheses).transpose(1, 2)
        logits = self._map(scores, carry, convolve)  # (B, N, H, S)
        heads, weights = weigh(
            logits.transpose(1, 2) if self.site.role == "cross" else logits.flatten(0, 1).unsqueeze(2),
            newest.q,
            newest.values,
            scale=self.scale,
            visible=newest.visible,
            positions=self.positions,
            query_position=newest.query_position,
            key_position=newest.key_position,
        )
        output = self.joined(by_hypotheses(heads, hypotheses))
        carried = self._carried(_zeroed(logits, hidden), kernel)
        return Attended(output, carried, by_hypotheses(weights, hypotheses) if need_weights else None), state

    def naive(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        carry: Any = None,
        **_: Any,
    ) -> Attended:
        """The same with whole masks, and the convolution as a sum over the places of its kernel."""
        source, valid = (query, query_valid) if memory is None else (memory, memory_valid)
        q = self.queries(query)
        k, v = (x.repeat_interleave(self.site.heads // x.shape[1], 1) for x in self.keys_values(source))
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        visible = torch.ones(len(q), 1, len(i), len(j), dtype=torch.bool)
        if self.site.causal:
            visible = visible & (j <= i)
        if valid is not None:
            visible = visible & valid[:, None, None, :]
        shown = visible
        if self.site.role == "encoder" and valid is not None:
            shown = visible & valid[:, None, :, None]
        kernel = self._kernel(carry)

        def convolve(image: Tensor) -> Tensor:
            assert kernel is not None
            weight, bias = kernel
            r, (rows, columns) = self.reach, weight.shape[2:]
            around = F.pad(image * shown, (r, r, r, r))  # zeros beyond the borders
            total = bias[:, None, None].expand(len(q), -1, len(i), len(j))
            for row in range(rows):
                for column in range(columns):
                    part = around[:, :, row : row + len(i), column : column + len(j)]
                    total = total + torch.einsum("oc,bcij->boij", weight[:, :, row, column], part)
            return self.activation(total)

        logits = self._map(torch.einsum("bhtk,bhsk->bhts", q, k) * self.scale, carry, convolve)
        bias_of = None if self.positions is None else self.positions.bias(q, i[:, 0], j, self.scale)
        weights = safe_softmax(logits if bias_of is None else logits + bias_of, visible)
        heads = torch.einsum("bhts,bhsv->bhtv", weights, v)
        extra = None if self.positions is None else self.positions.values(weights, i[:, 0], j)
        output = self.joined(heads if extra is None else heads + extra)
        return Attended(output, self._carried(logits * shown, kernel), weights)

    def _map(self, scores: Tensor, carry: Carried | None, convolve: Convolve) -> Tensor:
        if self.site.layer == 0:  # what stands below is none of its own
            return widened(scores)
        assert carry is not None  # `_kernel` has asked for it
        return self.mixed(widened(scores), carry.map, convolve)

    def _kernel(self, carry: Carried | None) -> Kernel | None:
        """The layer's convolution, its own or the shared one; None in the first layer."""
        if self.site.layer == 0:
            return None
        if carry is None:
            raise MtkitError(f"layer {self.site.layer} of a run of convolved maps needs what the layer below carries")
        if self.convolution is None:
            return carry.convolution
        assert self.convolution.bias is not None
        return self.convolution.weight, self.convolution.bias

    def _carried(self, image: Tensor, kernel: Kernel | None) -> Carried:
        return Carried(image, kernel if self.share_conv else None)

    def _convolved(self, image: Tensor, kernel: Kernel | None, *, above: int | None = None) -> Tensor:
        """The convolution of (B, H, T, S) with zeros beyond its borders, and the activation.

        As many rows of zeros on both sides, and a kernel without rows below its middle, give a row for each query and
        some behind the last, which are cut off; `above` is the number of zero rows where the image brings rows itself.
        """
        assert kernel is not None
        weight, bias = kernel
        padding = (self.reach if above is None else above, self.reach)
        with torch.autocast(image.device.type, enabled=False):
            convolved = F.conv2d(image, widened(weight), widened(bias), padding=padding)
        return self.activation(convolved[:, :, : image.shape[2]])

    def _hidden(self, visible: Tensor | None, query_valid: Tensor | None) -> Tensor | None:
        """Where the map is zero: what the mask hides and, for a kernel that reads later rows, the padded rows."""
        if visible is None:
            return None
        if self.site.role == "encoder" and query_valid is not None:
            visible = visible & query_valid[:, None, :, None]
        return ~visible


def _zeroed(image: Tensor, hidden: Tensor | None) -> Tensor:
    return image if hidden is None else image.masked_fill(hidden, 0.0)
