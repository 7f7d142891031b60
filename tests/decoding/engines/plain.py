"""Small models that other programs have too, and what they translate."""

from typing import Any

import torch
from torch.nn import functional as F

from mtkit.model.build import build_model
from mtkit.model.transformer import Transformer
from mtkit.recipe import Recipe, make_recipe
from mtkit.text.tokenizer import BOS, EOS
from tests.decoding.tiny import random_sources

V = 40
"""Pieces of both vocabularies."""


def recipe_of(attention: str = "full", options: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """A recipe with a small model."""
    sizes = {"d_model": 32, "heads": 4, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 2, "max_length": 32}
    named = {"name": attention, "options": options or {}}
    return make_recipe({"model": sizes | {"dropout": 0.0} | changes, "attention": named})


def shifted_model(recipe: Recipe) -> Transformer:
    """A model whose norms and biases, which a conversion could forget, are not as initialised."""
    model = build_model(recipe, source_vocabulary=V, target_vocabulary=V).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel())) * 0.2)
    return model


def reversing_model(recipe: Recipe, updates: int = 100) -> Transformer:
    """A model that has begun to learn to reverse a segment: it ends most translations, and repeats itself in some.

    It has learned that PAD, UNK and BOS never come, as models do that are trained for longer.
    """
    model = build_model(recipe, source_vocabulary=V, target_vocabulary=V)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(1)
    for update in range(updates):
        words = torch.randint(EOS + 2, V, (32, 1 + update % 7), generator=generator)
        ends = torch.full((32, 1), EOS)
        target = torch.cat([words.flip(1), ends], 1)
        target_in = torch.cat([torch.full_like(ends, BOS), target[:, :-1]], 1)
        logits = model.logits(model(torch.cat([words, ends], 1), target_in).hidden)
        never = logits.log_softmax(-1)[..., :EOS]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.1 * (never + 15.0).relu().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def sources_of(count: int) -> list[list[int]]:
    """Segments of 1 to 9 words."""
    return random_sources(count, vocabulary=V)
