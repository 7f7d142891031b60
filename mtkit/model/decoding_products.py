"""Linear maps in decoding: weights prepared once, and several maps of the same tokens in one product.

Inside the context `products`, the linear layers of a model and its output projection multiply by weights that are
rounded and laid out for the processor, and attentions compute queries, keys and values in one product. Prepared weights
are cached until the weights change, because text arrives in chunks; a change through `.data`, which PyTorch does not
count, is not noticed. Norms, softmax and other parts are computed as outside the context. Attentions that must not
round (`unrounded`) multiply in float32, except in their `roundable` maps. On the CPU, types below float32 also make
attentions by scaled dot products keep keys and values in bfloat16 (except a decoder's with more than 16 hypotheses),
and attentions by features their recent rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attention, unrounded_parts
from mtkit.attention.kernels.cpu.int8 import Int8, check_int8
from mtkit.attention.kernels.cpu.product import (
    Float32,
    Low,
    Plain,
    Product,
    Tiled,
    has_byte_tiles,
    packs_float32,
    tiles_float32,
)
from mtkit.attention.kernels.dot_product import is_plain
from mtkit.model.network import Network
from mtkit.model.sublayers import LayerNorm

LOOP_WEIGHTS = "weights_of_loop"
"""The method of modules that returns weights in the layout of a compiled loop."""


@contextmanager
def products(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model computes with prepared weights, without gradients.

    Types below float32 apply to all linear layers and the output projection; so does float32 if oneDNN or tiles are
    faster, else only to joint products. bfloat16 on CUDA applies to norms as well.

    Raises: MtkitError for int8 if the model is not on the CPU, or the processor has no such products.
    """
    device = next(model.parameters()).device
    if dtype == torch.int8:
        check_int8(device)
    prepared, unrounded = _prepared(model, dtype, device), unrounded_parts(model) - _roundable_maps(model)
    low = dtype == torch.int8 or is_low(dtype, device)
    has_exact = (low or dtype == torch.float32) and _float32(torch.float32, device) is not None
    exact = _prepared(model, torch.float32, device) if has_exact else None
    has_loops = dtype == torch.int8 and has_byte_tiles()
    replaced: list[tuple[nn.Module, str]] = []

    def replace(module: nn.Module, name: str, function: object) -> None:
        module.__dict__[name] = function
        replaced.append((module, name))

    try:
        for module in model.modules():
            if isinstance(module, HeadAttention):
                replace(module, "projected", partial(_projected, prepared, exact, unrounded))
                low_cache = low and hasattr(module, "cache_type") and is_plain(module.positions)
                if low_cache and module not in unrounded:
                    replace(module, "cache_type", torch.bfloat16)  # half the bytes, which a step waits for
            if hasattr(module, LOOP_WEIGHTS):
                replace(module, LOOP_WEIGHTS, partial(prepared.of_loop, module))
            if has_loops:
                from mtkit.model.compiled_steps import compiled_methods  # other types need none of it

                for name, method in compiled_methods(module, prepared.of):
                    replace(module, name, method)
            if isinstance(module, LayerNorm) and device.type == "cuda" and dtype == torch.bfloat16:
                replace(module, "forward", prepared.norm(module))
            if dtype != torch.float32 or _float32(dtype, device) is not None:
                for name, product in _multiplying(module, prepared, exact if module in unrounded else prepared):
                    replace(module, name, product)
        yield
    finally:
        for module, name in replaced:
            module.__dict__.pop(name, None)


def _multiplying(
    module: nn.Module, prepared: "_Prepared", of_maps: "_Prepared | None"
) -> Iterator[tuple[str, Callable[..., object]]]:
    """The methods of the module, by name, that products replace: of linear maps by `of_maps`, if there are any."""
    if type(module) is nn.Linear and of_maps is not None:
        product = of_maps.of(module)
        yield "forward", partial(_unless_exact, module, product) if isinstance(product, Plain) else product
    if isinstance(module, Network):
        output = prepared.output(module)
        yield "logits", output
        yield "logits_of", output.of


def _roundable_maps(model: nn.Module) -> set[nn.Module]:
    """The maps of `unrounded` attentions that may be rounded, and their parts."""
    attentions = [part for part in model.modules() if isinstance(part, Attention)]
    maps = (child for part in attentions for name, child in part.named_children() if name in part.roundable)
    return {module for linear in maps for module in linear.modules()}


def _unless_exact(linear: nn.Linear, product: Product, x: Tensor) -> Tensor:
    """The product, or the map in float32 if its caller has disabled autocast: rounding must not change its choices."""
    if x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type):
        return nn.Linear.forward(linear, x)
    return product(x)


def is_low(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether only linear layers compute in `dtype`, without autocast."""
    return dtype == torch.bfloat16 and device.type == "cpu"


def _float32(dtype: torch.dtype, device: torch.device) -> type[Float32 | Tiled] | None:
    """The product that is faster than PyTorch's in float32, if there is one."""
    if dtype != torch.float32 or device.type != "cpu":
        return None
    return Float32 if packs_float32() else Tiled if tiles_float32() else None


class _Prepared:
    """The products of a model in one type, prepared at their first use."""

    def __init__(self, prepare: Callable[[Tensor, Tensor | None], Product], state: object) -> None:
        self.state = state
        """Identifies the weights that they are made from."""
        self._prepare = prepare
        # keyed by ids: the products must not keep the model alive
        self._products: dict[tuple[int, ...], Product] = {}
        self._norms: dict[int, LayerNorm] = {}
        self._loops: dict[tuple[int, bool], object] = {}

    @torch.inference_mode(False)  # the cache is used outside too
    def of(self, *maps: nn.Linear) -> Product:
        """The product with the stacked weights of these maps."""
        key = tuple(map(id, maps))
        if key not in self._products:
            biases = [linear.bias.detach() for linear in maps if linear.bias is not None]
            weight = torch.cat([linear.weight.detach() for linear in maps])
            self._products[key] = self._prepare(weight, torch.cat(biases) if biases else None)
        return self._products[key]

    @torch.inference_mode(False)
    @torch.no_grad()
    def of_loop(self, module: nn.Module) -> object:
        """The module's weights in the layout of its loop; some directions differ in training."""
        key = id(module), module.training
        if key not in self._loops:
            self._loops[key] = getattr(type(module), LOOP_WEIGHTS)(module)
        return self._loops[key]

    @torch.inference_mode(False)
    def norm(self, module: LayerNorm) -> Callable[[Tensor], Tensor]:
        """The norm of bfloat16 vectors by bfloat16 weights (`LayerNorm`)."""
        if id(module) not in self._norms:
            low = LayerNorm(module.normalized_shape, module.eps, device=module.weight.device, dtype=torch.bfloat16)
            low.load_state_dict(module.state_dict())
            self._norms[id(module)] = low
        return self._norms[id(module)].forward

    @torch.inference_mode(False)
    def output(self, network: Network) -> Product:
        """The product with the output projection."""
        key = (id(network),)
        if key not in self._products:
            bias = network.output_bias
            product = self._prepare(network.output_weight.detach(), None if bias is None else bias.detach())
            if isinstance(product, Plain):
                product = Plain(product.weight, product.bias, wide=True)
            self._products[key] = product
        return self._products[key]


_CACHE: WeakKeyDictionary[nn.Module, dict[torch.dtype, _Prepared]] = WeakKeyDictionary()


def _forget(*_: object) -> None:
    """Free the products before an optimiser step, which changes weights; a fused one does not change their versions."""
    _CACHE.clear()


register_optimizer_step_pre_hook(_forget)


def _prepared(model: nn.Module, dtype: torch.dtype, device: torch.device) -> _Prepared:
    """The products of the model, prepared again if addresses or versions show changed weights."""
    laid_out = (
        buffer for module in model.modules() if hasattr(module, LOOP_WEIGHTS) for buffer in module.buffers(False)
    )
    state = [(weight.data_ptr(), weight._version) for weight in (*model.parameters(), *laid_out)]
    of_model = _CACHE.setdefault(model, {})
    if dtype not in of_model or of_model[dtype].state != state:
        of_model[dtype] = _Prepared(_preparation(dtype, device), state)
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


def _projected(
    prepared: _Prepared, exact: _Prepared | None, unrounded: set[nn.Module], tokens: Tensor, *maps: nn.Linear
) -> Sequence[Tensor]:
    """The results of `maps` for the same tokens, in one product if they are plain linear layers of one arithmetic.

    Maps that must not be rounded are multiplied by the `exact` products if there are any.
    """
    must_not = [linear in unrounded for linear in maps]
    of_maps = exact if all(must_not) else None if any(must_not) else prepared
    if of_maps is None or any(type(linear) is not nn.Linear or linear.bias is None for linear in maps):
        return [linear(tokens) for linear in maps]
    return of_maps.of(*maps)(tokens).split([linear.out_features for linear in maps], -1)
