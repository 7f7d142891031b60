"""Linear layers in 8-bit integers, for decoding on the CPU: less to multiply and less to read, at nearly the same BLEU.

Weights are rounded once, to seven bits, each output's by a scale of its own (Kim et al., "From Research to Production
and Back: Ludicrously Fast Neural Machine Translation", WNGT 2019); activations at each product, to eight, each row by a
scale of its own, so that no translation depends on what is translated beside it. Sums are exact in 32 bits. Attention
itself, norms, softmax and whatever is no linear layer stay in float32, and so do all products of attentions that must
not round (`unrounded`).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mtkit.attention.contract import unrounded_parts
from mtkit.errors import MtkitError
from mtkit.model.network import Network

LARGEST = 63
"""Of a rounded weight: seven bits, so that activations can have eight.
Processors without VNNI sum pairs of products in 16 bits first, which hold no more."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Rounded:
    """A weight W (O, I), rounded row by row, and its bias b (O,)."""

    integers: Tensor
    """(O, I) int8."""
    scales: Tensor
    """(O,) float32."""
    product: Product
    """x (..., I) to x W^T + b (..., O), x rounded to 8 bits."""

    def of(self, rows: Tensor) -> Product:
        """The product with these rows (K,) of the weight alone, without bias."""
        return _product(self.integers[rows], self.scales[rows], None)


_ROUNDED: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]], _Rounded]] = WeakKeyDictionary()
"""For each module what it multiplies by, and the places and versions of the weights it was made of: rounding them takes
as long as translating dozens of sentences, and text comes in chunks."""


@contextmanager
def int8_products(model: nn.Module) -> Iterator[None]:
    """Inside, the linear layers of a model and its output projection compute in 8-bit integers, without gradients.

    Raises: MtkitError where the model is not on the CPU, or the processor has no such products.
    """
    check_int8(next(model.parameters()).device)
    unrounded = unrounded_parts(model)
    linears = [each for each in model.modules() if type(each) is nn.Linear and each not in unrounded]
    whole = [each for each in model.modules() if isinstance(each, Network)]
    try:
        for linear in linears:
            linear.__dict__["forward"] = _rounded(linear, linear.weight, linear.bias).product
        for each in whole:
            rounded = _rounded(each, each.output_weight, None)
            each.__dict__["logits"], each.__dict__["logits_of"] = rounded.product, rounded.of
        yield
    finally:
        for linear in linears:
            linear.__dict__.pop("forward", None)
        for each in whole:
            each.__dict__.pop("logits", None)
            each.__dict__.pop("logits_of", None)


def check_int8(device: torch.device) -> None:
    """Raises: MtkitError where there are no such products."""
    if device.type != "cpu" or torch.backends.quantized.engine == "none":
        raise MtkitError("int8 runs on CPUs only (x86-64 or Arm); give --device cpu, or --dtype bfloat16")


def _rounded(module: nn.Module, weight: Tensor, bias: Tensor | None) -> _Rounded:
    """The module's weights rounded, anew where they have changed since."""
    state = [(each.data_ptr(), each._version) for each in (weight, bias) if each is not None]
    if module not in _ROUNDED or _ROUNDED[module][0] != state:
        values = weight.detach().float()
        scales = values.abs().amax(1).clamp(min=1e-12) / LARGEST
        integers = (values * scales.reciprocal()[:, None]).round().to(torch.int8)
        with warnings.catch_warnings():  # not for threads, but what it hushes is said once in a process
            warnings.simplefilter("ignore")  # PyTorch announces other ways to int8, which need another package
            product = _product(integers, scales, bias)
        _ROUNDED[module] = (state, _Rounded(integers, scales, product))
    return _ROUNDED[module][1]


def _product(integers: Tensor, scales: Tensor, bias: Tensor | None) -> Product:
    """x (..., I) to x W^T + b (..., O) for W (O, I), its rows in units of the scales (O,), and bias (O,)."""
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    weight = torch._make_per_channel_quantized_tensor(integers, scales, zeros, 0)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    added = None if bias is None else bias.detach().float()

    def product(x: Tensor) -> Tensor:
        rows = x.float().reshape(-1, x.shape[-1])
        units = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True).clamp_(min=1e-30).div_(127)
        # the operator takes its unit from the smallest and the largest number: a row more, of both, makes it 1
        ours = rows.new_full((len(rows) + 1, rows.shape[1]), 127.0)
        torch.div(rows, units, out=ours[:-1])
        ours[-1, 0] = -128.0
        sums: Tensor = torch.ops.quantized.linear_dynamic(ours, packed, False)[:-1]
        result = sums.mul_(units) if added is None else torch.addcmul(added, sums, units)
        return result.unflatten(0, x.shape[:-1])

    return product
