"""The recurrent encoder: a vector for each source token, and the states in which the layers end."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mtkit.attention.engines.softmax.dot_product import widened
from mtkit.model.recurrent.cells import CellState


class RecurrentEncoder(nn.Module):
    """Layers of gated or LSTM units over the source, in one direction or in both; float32 in every precision.

    Padding is not read: sequences are packed, so that a segment's states are those it has alone.
    """

    unrounded = True
    """Rounded weights would not fit `nn.GRU`, whose biases stay in float32."""

    def __init__(self, cell: str, width: int, layers: int, dropout: float, *, both_ways: bool) -> None:
        """`cell` is "gru" or "lstm"; `width` is that of the tokens and of each direction's states."""
        super().__init__()
        kind = {"gru": nn.GRU, "lstm": nn.LSTM}[cell]
        between = dropout if layers > 1 else 0.0
        self.layers = kind(width, width, layers, batch_first=True, dropout=between, bidirectional=both_ways)
        for name, parameter in self.layers.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
                if cell == "lstm" and name.startswith("bias_ih"):
                    nn.init.ones_(parameter.detach()[width : 2 * width])
            else:
                start = nn.init.orthogonal_ if name.startswith("weight_hh") else nn.init.xavier_uniform_
                for part in parameter.detach().split(width):
                    start(part)

    def forward(self, x: Tensor, valid: Tensor | None, lengths: Tensor | None = None) -> tuple[Tensor, list[CellState]]:
        """x (B, S, D) and valid (B, S) to annotations (B, S, D), 2D both ways, and each layer's last states (B, D).

        Annotations of padding are zero. Last states are those of the forward direction. `lengths` (B,): how many tokens
        of each segment are real, on the CPU; if None, they are copied from the device, for which the host waits.
        """
        with torch.autocast(x.device.type, enabled=False):
            if valid is None:
                annotations, last = self.layers(widened(x))
                states = last if isinstance(last, tuple) else (last,)
            else:
                counts = valid.sum(1).clamp(min=1)
                lengths = counts.cpu() if lengths is None else lengths.clamp(min=1)
                # longest first, by an order made on the device: PyTorch would copy it there and back, and wait
                order = counts.argsort(descending=True)
                sorted_lengths = lengths.sort(descending=True).values
                packed = pack_padded_sequence(widened(x).index_select(0, order), sorted_lengths, batch_first=True)
                annotations, last = self.layers(packed)
                annotations, _ = pad_packed_sequence(annotations, batch_first=True, total_length=x.shape[1])
                back = order.argsort()
                annotations = annotations.index_select(0, back)
                states = tuple(each.index_select(1, back) for each in (last if isinstance(last, tuple) else (last,)))
        every = 2 if self.layers.bidirectional else 1
        return annotations, list(zip(*(each[::every].unbind(0) for each in states), strict=True))
