from typing import Any

import pytest
import torch

from mtkit.text.tokenizer import BOS, EOS, PAD
from tests.decoding.engines.plain import recipe_of, shifted_model

pytestmark = pytest.mark.peer
pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "changes", [{}, {"norm": "post"}, {"activation": "gelu"}, {"positions": "sinusoidal-cat"}], ids=str
)
def test_it_gives_the_same_logits(changes: dict[str, Any]) -> None:
    from mtkit.benchmark.peers.huggingface_decoding import convert

    recipe = recipe_of(**changes)
    model = shifted_model(recipe)
    source = torch.tensor([[5, 9, 30, 7, EOS], [11, 6, EOS, PAD, PAD]])
    target_in = torch.tensor([[BOS, 8, 21, 6], [BOS, 33, 4, 17]])
    theirs = convert(recipe, model)
    with torch.no_grad():
        hidden = model(source, target_in, source_valid=source != PAD).hidden
        found = theirs(input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=target_in).logits
    torch.testing.assert_close(found, hidden @ model.output_weight.T, atol=1e-4, rtol=1e-4)
