"""Around decoding: the arithmetic, and the model as decoding needs it."""

from collections.abc import Callable

import pytest
import torch

from mtkit.attention.registry import mechanisms
from mtkit.decoding.engines.model_engine import decoding_with, find_dtype
from mtkit.decoding.search.beam import beam_search
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.recipe import DecodingSettings, make_recipe
from tests.decoding.tiny import TinyModel, batch_of, random_sources


def test_types_by_name() -> None:
    assert find_dtype("auto") is None
    assert find_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(MtkitError, match="float32"):
        find_dtype("int4")


def cuda_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fails", [cuda_out_of_memory, lambda: torch.empty(1 << 50)])
def test_memory_that_gives_out_is_one_clear_error(fails: Callable[[], object]) -> None:
    model = TinyModel().train()
    with (
        pytest.raises(MtkitError, match="single segment to translate; lower"),
        decoding_with(model, None),
    ):
        fails()
    assert model.training


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), decoding_with(TinyModel(), None):
        torch.ones(2) + torch.ones(3)


def test_decoding_leaves_the_model_as_it_was() -> None:
    model = TinyModel().train()
    with decoding_with(model, torch.bfloat16):
        assert not model.training
        assert not (model.weight * 2).requires_grad
    assert model.training
    with decoding_with(model, None):
        assert (model.weight @ model.weight.T).dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "role"), [(each.name, role) for each in mechanisms().values() for role in sorted(each.roles)]
)
def test_what_decoding_leaves_behind_can_be_trained_with(name: str, role: str, dtype: torch.dtype | None) -> None:
    """As validation amid training does: what attentions keep from call to call must serve both."""
    sizes = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1, "max_length": 48}
    recipe = make_recipe({"model": sizes, "attention": {role: name}})
    model = build_model(recipe, source_vocabulary=32, target_vocabulary=32)
    sources = random_sources(3, vocabulary=32, longest=20)
    with decoding_with(model, dtype):
        beam_search(model, batch_of(sources, 8), DecodingSettings(beam=2))
    model.train()
    batch = batch_of(sources, 8)
    output = model(batch.source, batch.source, source_valid=batch.valid)
    (model.logits(output.hidden).log_softmax(-1)[..., 4:].sum() + sum(output.losses.values())).backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())
    model.after_update(1, 10)
    with decoding_with(model, dtype):
        beam_search(model, batch_of(sources, 8), DecodingSettings(beam=2))
