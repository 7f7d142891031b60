"""Decoding with CTranslate2: the run's weights in CTranslate2's format."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import ctranslate2
import torch

from mtkit.benchmark.decoding import Decoded
from mtkit.decoding.engines.ctranslate2_conversion import convert, piece, token, vocabulary_map
from mtkit.decoding.engines.selection import unsupported_part
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.source import TrainedOn
from mtkit.errors import MtkitError
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import EOS

SIZES = (16, 32, 64, 128)
"""Segments per batch; the fastest is chosen."""


class CTranslate2:
    """CTranslate2 with mtkit's sentencepiece model, piece numbers as tokens, and its own search and batching."""

    program = "ctranslate2"
    arithmetics: ClassVar = {"cpu": ("float32", "int8"), "cuda": ("float16", "int8_float16")}
    """Measured arithmetics by device."""

    def __init__(
        self,
        run: Run,
        model: Network,
        settings: DecodingSettings,
        arithmetic: str,
        lexicon: Lexicon | None = None,
    ) -> None:
        """Convert the model; with a lexicon, its shortlists become CTranslate2's vocabulary map.

        Raises: MtkitError if CTranslate2 has no such model.
        """
        part = unsupported_part(run.recipe)
        if part is not None:
            raise MtkitError(f"--beside ctranslate2: its format has no {part}; leave it out")
        self.arithmetic = arithmetic
        self.shortlist = 0 if lexicon is None else lexicon.each
        self._tokenizers, self._settings = run.tokenizers, settings
        self._trained_on = TrainedOn.of([run])
        self._longest = (model.longest_source, model.longest_target)
        with TemporaryDirectory() as folder:
            convert(model, Path(folder) / "model")
            if lexicon is not None:
                (Path(folder) / "model" / "vmap.txt").write_text(vocabulary_map(lexicon), encoding="utf-8")
            device = model.output_weight.device
            threads = torch.get_num_threads()
            self._translator: Any = ctranslate2.Translator(
                str(Path(folder) / "model"),
                device=device.type,
                compute_type=arithmetic,
                # a batch per core, which is faster for CTranslate2 too
                inter_threads=threads if device.type == "cpu" else 1,
                intra_threads=1,
            )
            torch.set_num_threads(threads)  # the line above leaves this thread with one

    def sizes(self, beam: int) -> Sequence[int]:
        """Return the numbers of segments to choose from."""
        return SIZES

    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """Translate the longest segments first; a batch has the highest piece limit of its segments."""
        encoded = [pieces[: self._longest[0] - 1] for pieces in self._tokenizers.source.encode_lines(lines)]
        order = sorted(range(len(lines)), key=lambda line: -len(encoded[line]))
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        results = [self._begin([[*encoded[line], EOS] for line in batch], beam) for batch in batches]
        decoded: dict[int, Decoded] = {}
        for line, waiting in zip(chain(*batches), chain(*results), strict=True):
            pieces = list(map(piece, waiting.result().hypotheses[0]))
            text = self._tokenizers.target.decode([index for index in pieces if index != EOS])
            decoded[line] = Decoded(text, len(pieces))
        return [decoded[line] for line in range(len(lines))]

    def _begin(self, sources: Sequence[Sequence[int]], beam: int) -> list[Any]:
        """Begin to translate a batch; return CTranslate2's result of each segment, which can be waited for."""
        most, longest = self._settings.max_pieces, self._longest[1]
        results: list[Any] = self._translator.translate_batch(
            [list(map(token, pieces)) for pieces in sources],
            beam_size=beam,
            length_penalty=self._settings.length_penalty,
            max_decoding_length=max(self._trained_on.limit(pieces, None, longest, most) for pieces in sources),
            disable_unk=True,
            return_end_token=True,
            use_vmap=self.shortlist > 0,
            asynchronous=True,
        )
        return results
