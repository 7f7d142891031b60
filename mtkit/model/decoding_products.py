"""Linear maps as decoding computes them: weights prepared once, and several maps of the same tokens in one product.

While the context `products` is open, the linear layers of a model and its output projection multiply by weights that
have been rounded and laid out for the processor, and attentions compute queries, keys and values in one product. What
was prepared is kept as long as the weights stay the same, because text comes in chunks; a change through `.data`, which
PyTorch does not count, goes unseen. Attention itself, norms, softmax and whatever is no linear layer are computed as
without the context, and so are all products of attentions that must not round (`unrounded`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import unrounded_parts
from mtkit.attention.kernels.cpu.int8 import Int8, check_int8
from mtkit.attention.kernels.cpu.product import Float32, Low, Plain, Product, Tiled, packs_float32, tiles_float32
from mtkit.model.network import Network


@contextmanager
def products(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model computes with prepared weights, without gradients: int8 and, on the CPU, bfloat16 in all linear
    layers and the output projection, float32 so where oneDNN or tiles are faster, and other types in joint products.

    Raises: MtkitError for int8 where the model is not on the CPU, or the processor has no such products.
    """
    device = next(model.parameters()).device
    if dtype == torch.int8:
        check_int8(device)
    kept, unrounded, replaced = _kept(model, dtype, device), unrounded_parts(model), list[tuple[nn.Module, str]]()

    def replace(module: nn.Module, name: str, by: object) -> None:
        module.__dict__[name] = by
        replaced.append((module, name))

    try:
        for each in model.modules():
            if isinstance(each, HeadAttention) and each not in unrounded:
                replace(each, "projected", partial(_projected, kept))
            if dtype == torch.int8 or is_low(dtype, device) or _float32(dtype, device) is not None:
                if type(each) is nn.Linear and each not in unrounded:
                    replace(each, "forward", kept.of(each))
                if isinstance(each, Network):
                    output = kept.output(each)
                    replace(each, "logits", output)
                    replace(each, "logits_of", output.of)
        yield
    finally:
        for module, name in replaced:
            module.__dict__.pop(name, None)


def is_low(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers alone compute in `dtype`, without autocast."""
    return dtype == torch.bfloat16 and device.type == "cpu"


def _float32(dtype: torch.dtype, device: torch.device) -> type[Float32 | Tiled] | None:
    """What multiplies faster than PyTorch in float32, where there is such a thing."""
    if dtype != torch.float32 or device.type != "cpu":
        return None
    return Float32 if packs_float32() else Tiled if tiles_float32() else None


class _Kept:
    """The products of a model in one arithmetic, prepared where they are first asked for."""

    def __init__(self, prepare: Callable[[Tensor, Tensor | None], Product], state: object) -> None:
        self.state = state
        """The weights of which they are made."""
        self._prepare = prepare
        # by what is multiplied, not with it: the model, whose products these are, must not be held by them
        self._products: dict[tuple[int, ...], Product] = {}

    @torch.inference_mode(False)  # what is kept serves outside as well
    def of(self, *maps: nn.Linear) -> Product:
        """The product with the weights of these maps, one below the other."""
        key = tuple(map(id, maps))
        if key not in self._products:
            biases = [each.bias.detach() for each in maps if each.bias is not None]
            weight = torch.cat([each.weight.detach() for each in maps])
            self._products[key] = self._prepare(weight, torch.cat(biases) if biases else None)
        return self._products[key]

    @torch.inference_mode(False)
    def output(self, network: Network) -> Product:
        """The product with the output projection."""
        key = (id(network),)
        if key not in self._products:
            bias = network.output_bias
            self._products[key] = self._prepare(network.output_weight.detach(), None if bias is None else bias.detach())
        return self._products[key]


_KEPT: WeakKeyDictionary[nn.Module, dict[torch.dtype, _Kept]] = WeakKeyDictionary()


_STEPS = [0]
"""Steps that any optimiser has made: a fused one changes weights without raising their versions."""


def _count_step(*_: object) -> None:
    _STEPS[0] += 1


register_optimizer_step_post_hook(_count_step)


def _kept(model: nn.Module, dtype: torch.dtype, device: torch.device) -> _Kept:
    """The products of the model, new ones where places, versions or steps show changed weights."""
    state = (_STEPS[0], [(each.data_ptr(), each._version) for each in model.parameters()])
    of_model = _KEPT.setdefault(model, {})
    if dtype not in of_model or of_model[dtype].state != state:
        of_model[dtype] = _Kept(_preparation(dtype, device), state)
    return of_model[dtype]


def _preparation(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor, Tensor | None], Product]:
    if dtype == torch.int8:
        return Int8.rounded
    if is_low(dtype, device):
        return Low
    faster = _float32(dtype, device)
    if faster is not None:
        return faster
    return lambda weight, bias: Plain(weight.to(dtype), None if bias is None else bias.to(dtype))


def _projected(kept: _Kept, tokens: Tensor, *maps: nn.Linear) -> Sequence[Tensor]:
    """What `maps` make of the same tokens, in one product where they are plain."""
    if any(type(each) is not nn.Linear or each.bias is None for each in maps):
        return [each(tokens) for each in maps]
    return kept.of(*maps)(tokens).split([each.out_features for each in maps], -1)
