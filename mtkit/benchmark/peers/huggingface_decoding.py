"""Decoding with Hugging Face's generate(): the run's weights in the class that computes the same.

Pre-norm models use Pegasus's architecture, post-norm models Marian's; mtkit's position tables replace theirs.
"""

from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor

from mtkit.benchmark.peers.decoding import PeerDecoder
from mtkit.errors import MtkitError
from mtkit.interchange.huggingface import CLASSES, SPECIAL_IDS, configuration, tensors
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run
from mtkit.text.tokenizer import PAD


class HuggingFaceDecoder(PeerDecoder):
    """Hugging Face's generate() with its cache."""

    program = "huggingface"
    arithmetics: ClassVar = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        """Convert the model. Raises: MtkitError if Hugging Face has no such model."""
        super().__init__(run, model, settings, arithmetic)
        if run.recipe.model.tie != "all" or run.recipe.model.activation == "swiglu":
            raise MtkitError("--beside huggingface takes models with model.tie = all and no swiglu; leave it out")
        self._model: Any = convert(run.recipe, model).to(self.device, getattr(torch, arithmetic))

    def generate(self, source: Tensor, beam: int, limit: int) -> list[list[int]]:
        """Return what generate() does, without its first piece, which is BOS."""
        how = transformers.GenerationConfig(
            num_beams=beam,
            do_sample=False,
            length_penalty=self.settings.length_penalty,
            max_new_tokens=limit,
            **SPECIAL_IDS,
        )
        generated = self._model.generate(source, attention_mask=(source != PAD).long(), generation_config=how)
        return [row[1:] for row in generated.tolist()]


def convert(recipe: Recipe, model: Network) -> Any:
    """Return the model as a Pegasus or Marian model, in evaluation mode, in float32 on the CPU."""
    kind = getattr(transformers, CLASSES[recipe.model.norm][1])
    built = kind(kind.config_class(**configuration(recipe, model)))
    built.load_state_dict(tensors(recipe, model), strict=False)  # a tied weight has one name
    return built.eval()
