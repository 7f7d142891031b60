"""Decoding with Hugging Face's generate(): the run's weights in the class that computes the same.

Pre-norm models use Pegasus's architecture, post-norm models Marian's; mtkit's position tables replace theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mtkit.benchmark.decoding import Decoded
from mtkit.decoding.engines.plain import check_plain
from mtkit.decoding.lines.source import TrainedOn
from mtkit.decoding.translate import padded
from mtkit.errors import MtkitError
from mtkit.interchange.huggingface import CLASSES, SPECIAL_IDS, configuration, tensors
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run
from mtkit.text.tokenizer import EOS, PAD

ARITHMETICS = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
"""Measured arithmetics by device."""

SIZES = (32, 64, 128)
"""Segments per batch; the fastest is chosen."""


class HuggingFaceDecoder:
    """Hugging Face's generate() with its cache, mtkit's sentencepiece model, and batches of similar lengths."""

    program = "huggingface"
    shortlist = 0

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        """Convert the model. Raises: MtkitError if Hugging Face has no such model."""
        check_plain(run.recipe, "--beside huggingface")
        if run.recipe.model.tie != "all" or run.recipe.model.activation == "swiglu":
            raise MtkitError("--beside huggingface takes models with model.tie = all and no swiglu; leave it out")
        self.arithmetic = arithmetic
        self._tokenizers, self._settings = run.tokenizers, settings
        self._trained_on = TrainedOn.of([run])
        self._longest = (model.longest_source, model.longest_target)
        self._device = model.output_weight.device
        self._model: Any = convert(run.recipe, model).to(self._device, getattr(torch, arithmetic))

    def sizes(self, beam: int) -> Sequence[int]:
        """Return the numbers of segments to choose from."""
        return SIZES

    @torch.no_grad()
    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """Translate the longest segments first; a batch has the highest piece limit of its segments."""
        encoded = [pieces[: self._longest[0] - 1] for pieces in self._tokenizers.source.encode_lines(lines)]
        order = sorted(range(len(lines)), key=lambda line: -len(encoded[line]))
        decoded: dict[int, Decoded] = {}
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            sources = [[*encoded[line], EOS] for line in chosen]
            most = self._settings.max_pieces
            limit = max(self._trained_on.limit(pieces, None, self._longest[1], most) for pieces in sources)
            generated = self._generate(padded(sources, self._device), beam, limit).tolist()
            for line, row in zip(chosen, generated, strict=True):
                pieces = row[1 : row.index(EOS)] if EOS in row else row[1:]
                decoded[line] = Decoded(self._tokenizers.target.decode(pieces), len(pieces) + 1)
        return [decoded[line] for line in range(len(lines))]

    def _generate(self, source: Tensor, beam: int, limit: int) -> Tensor:
        how = transformers.GenerationConfig(
            num_beams=beam,
            do_sample=False,
            length_penalty=self._settings.length_penalty,
            max_new_tokens=limit,
            **SPECIAL_IDS,
        )
        generated: Tensor = self._model.generate(source, attention_mask=(source != PAD).long(), generation_config=how)
        return generated


def convert(recipe: Recipe, model: Network) -> Any:
    """Return the model as a Pegasus or Marian model, in evaluation mode, in float32 on the CPU."""
    kind = getattr(transformers, CLASSES[recipe.model.norm][1])
    built = kind(kind.config_class(**configuration(recipe, model)))
    built.load_state_dict(tensors(recipe, model), strict=False)  # a tied weight has one name
    return built.eval()
