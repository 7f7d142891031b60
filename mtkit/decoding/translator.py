"""The translator: a trained run, or several as an ensemble, loaded for translation."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from mtkit.attention.contract import ROLES
from mtkit.attention.kernels.cpu.int8 import check_int8
from mtkit.decoding.alignment import Alignment, align, check_weights
from mtkit.decoding.alignment_heads import Heads, heads_for
from mtkit.decoding.contexts import Context, ContextLimits
from mtkit.decoding.engines.model_engine import Ensemble, ModelEngine, find_dtype
from mtkit.decoding.engines.selection import make_ctranslate2_engine, uses_ctranslate2, with_lexicon
from mtkit.decoding.forced import Forced, force_lines
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.held_out import HeldOut
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.documents import document_pieces
from mtkit.decoding.lines.source import Directions, Documents, SourceLines, TrainedOn
from mtkit.decoding.output_steps import Step, output_steps
from mtkit.decoding.parallel import Workers
from mtkit.decoding.translate import translate_lines
from mtkit.decoding.translation import OnProgress, Translation
from mtkit.decoding.word_alignment import Links, link_lines, link_targets
from mtkit.device import find_device
from mtkit.errors import MtkitError
from mtkit.model.network import Model, Network
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.storage.files import digest
from mtkit.terminal import ProgressBar, Say, quiet, silent
from mtkit.text.tokenizer import Tokenizers


class Translator:
    """The model of one run, or an ensemble of several models, with decoding settings."""

    def __init__(
        self,
        runs: Sequence[Run],
        settings: DecodingSettings | None = None,
        *,
        checkpoint: str = "best",
        device: str = "auto",
        dtype: str = "auto",
        engine: str = "mtkit",
        forks: bool = False,
        say: Say = quiet,
    ) -> None:
        """Load the checkpoint of each run; the default settings are in the first run's recipe.

        `engine` is one of `mtkit.decoding.engines.selection.ENGINES`; `say` gets a message if it is not mtkit's engine.
        With `forks`, mtkit's engine decodes in processes (`mtkit.decoding.parallel`), as in mtkit's commands.

        Raises: MtkitError for runs that do not share tokenizers and directions, for more pieces of joined lines than
        their models can read, and for an unavailable device, dtype or engine; RunError for a checkpoint that cannot be
        loaded; DataError or RunError for damaged tokenizers.
        """
        settings = runs[0].recipe.decoding if settings is None else settings
        for run in runs:
            run.check_packages()
        self.runs, self.settings = runs, settings
        self._glossary: Glossary | None = None
        self._trained_on = TrainedOn.of(runs)
        self._engine_name, self._arithmetic, self._device = engine, find_dtype(dtype), find_device(device)
        if self._arithmetic == torch.int8:
            check_int8(self._device)  # before models and text are read
        for other in runs[1:]:
            _check_alike(runs[0], other)
        with_ctranslate2 = self._uses_ctranslate2(settings)
        # a run that is still training may change "best" at any moment
        chosen = [run.checkpoint(checkpoint).name for run in runs]
        models = [run.load_model(one, str(self._device)) for run, one in zip(runs, chosen, strict=True)]
        files = [run.weights(one) for run, one in zip(runs, chosen, strict=True)]
        for file in files:
            if not file.with_name("state.json").exists():
                say(f"{file} was not verified: it has no state.json with its checksum")
        self._weights = [digest(file) for file in files]  # before a continued training can remove the files
        self.tokenizers: Tokenizers = runs[0].tokenizers
        """The tokenizers, which all runs share."""
        self.model: Model = Ensemble(models) if len(models) > 1 else models[0]
        workers = Workers.where_possible(self._device) if forks and not with_ctranslate2 else None
        self.engine = ModelEngine(self.model, settings, self._arithmetic, workers=workers)
        self._check_document_pieces()
        if with_ctranslate2:
            self.engine = make_ctranslate2_engine(self.engine, runs[0], chosen[0], say=say)
            say(f"{self.engine.program} decodes (--engine {engine}); --engine mtkit decodes with mtkit's own search")
        elif workers is not None:
            with self.engine.ready():
                pass  # start the processes before any thread reads text
        self.about: dict[str, Any] = {
            "checkpoint": " + ".join(chosen),
            "engine": self.engine.program,
            "device": str(self._device),
            "dtype": dtype if self._arithmetic else "float32",
            "threads": torch.get_num_threads(),
            "shortlist": None,
            "settings": settings.model_dump(),
        }
        if len(runs) > 1:
            self.about["ensemble"] = [str(run.folder) for run in runs]

    def with_settings(self, settings: DecodingSettings) -> "Translator":
        """Return this translator with other decoding settings; mtkit's engine is used if another does not support them.

        Raises: MtkitError if the user named an engine that does not support them, for more pieces of joined lines than
        the models can read, and as `require` if there is a glossary.
        """
        if self.has_glossary:
            _check_glossary(settings, self.about["shortlist"])
        other, engine = copy(self), self.engine
        other.about = {**self.about, "settings": settings.model_dump()}
        if engine is not engine.own and not self._uses_ctranslate2(settings):
            engine, other.about["engine"] = engine.own, engine.own.program
        other.settings, other.engine = settings, engine.with_settings(settings)
        other._check_document_pieces()
        return other

    def _uses_ctranslate2(self, settings: DecodingSettings) -> bool:
        return uses_ctranslate2(self._engine_name, self.runs, settings, self._arithmetic, self._device)

    def _check_document_pieces(self) -> None:
        pieces, longest = self.settings.document_pieces, self.engine.longest_source
        if pieces is not None and longest is not None and pieces >= longest:
            raise MtkitError(
                f"decoding.document_pieces = {pieces} is too large for the model, which reads {longest:,} pieces with "
                f"the end mark (model.max_length); give at most {longest - 1}"
            )

    def shorten(self, lexicon: Lexicon, say: Say = quiet) -> None:
        """Restrict translations from now on to the pieces on the shortlists of the lexicon.

        Raises: MtkitError as `mtkit.decoding.engines.selection.with_lexicon`, which calls `say`, and if there is a
        glossary.
        """
        if self.has_glossary:
            _check_glossary(self.settings, lexicon.each)
        self.engine = with_lexicon(self.engine, lexicon, self._engine_name, say=say)
        self.about |= {"shortlist": lexicon.each, "engine": self.engine.program}

    def require(self, glossary: Glossary) -> None:
        """Require the terms of the glossary in translations from now on, by mtkit's engine.

        Raises: MtkitError without beam search, with a shortlist or forbidden repetitions, and if the user named another
        engine.
        """
        _check_glossary(self.settings, self.about["shortlist"])
        if self._engine_name == "ctranslate2":
            raise MtkitError("CTranslate2 does not support a glossary; leave --engine out")
        self._glossary, self.engine = glossary, self.engine.own
        self.about |= {"glossary": glossary.size, "engine": self.engine.program}

    @property
    def has_glossary(self) -> bool:
        """Whether translations must contain the terms of a glossary."""
        return self._glossary is not None

    @property
    def network(self) -> Network:
        """The network of the run. Raises: MtkitError for an ensemble."""
        if isinstance(self.model, Ensemble):
            raise MtkitError("an ensemble has no attention weights; name a single run")
        return cast(Network, self.model)

    @property
    def document_pieces(self) -> int | None:
        """The maximum number of pieces in joined lines; None unless all runs were trained on documents."""
        trained = document_pieces(self.runs)
        return trained and (self.settings.document_pieces or trained)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that determine the translation of a text: hashes of the weights, settings, number type."""
        return {
            "weights": self._weights,
            "vocabulary": self.runs[0].vocabulary,
            "trained_on": self._trained_on.fingerprint,
            "glossary": self._glossary and self._glossary.fingerprint,
            **self.engine.identity,
        }

    def directions(self, chosen: str | None, lines: int) -> Directions:
        """Return the same direction for a number of lines. Raises: MtkitError as `Directions.alike`."""
        return Directions.alike(self.runs[0].directions, chosen, lines)

    def source(
        self,
        lines: Sequence[str],
        *,
        direction: Directions | str | None = None,
        documents: Sequence[int] | Sequence[str] | None = None,
        prefixes: Sequence[str] | None = None,
        first: int = 0,
    ) -> SourceLines:
        """Return the lines with the limits and directions of these runs; `documents` are the ids of documents to join.

        `direction` is the direction of all lines, or contains one for each; None: the only one of the runs. `prefixes`
        are the texts with which the translations must begin. `first` is the number of the first line among all that
        are translated, from 0.

        Raises: MtkitError for a direction that the runs do not support, and as `check_prefixes` if there are prefixes.
        """
        if prefixes is not None:
            self.check_prefixes()
        if isinstance(direction, Directions):
            directions = direction.among(self.runs[0].directions)
        else:
            directions = self.directions(direction, len(lines))
        pieces = self.document_pieces
        joined = None if documents is None or pieces is None else Documents(documents, pieces, self.settings.context)
        numbers = range(first, first + len(lines))
        return SourceLines(lines, directions, joined, self._trained_on, numbers, prefixes, self._glossary)

    def side_lines(self, side: HeldOut, *, joined: bool) -> SourceLines:
        """Return the source lines of a side; documents that are `joined` allow one translation per line."""
        documents = side.documents if joined and self.settings.n_best == 1 else None
        ids = None if documents is None else documents.ids
        return self.source(side.sources, direction=side.directions, documents=ids)

    def translate(
        self,
        lines: SourceLines | Sequence[str],
        *,
        direction: str | None = None,
        on_progress: OnProgress = lambda lines: None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[list[Translation]]:
        """Return the translations of lines from `source`, or of plain lines in one direction; see `translate_lines`.

        Raises: MtkitError as `source` and `translate_lines`.
        """
        if not isinstance(lines, SourceLines):
            lines = self.source(lines, direction=direction)
        return translate_lines(self.engine, self.tokenizers, lines, on_progress=on_progress, stopped=stopped)

    def align(
        self,
        source: str,
        target: str | Translation | None = None,
        *,
        direction: str | None = None,
        roles: Sequence[str] = ROLES,
    ) -> Alignment:
        """Return the run's attention of these `roles` at each piece of `target`; None: of the run's translation.

        A translation of one part has the pieces that the model produced; other text is encoded.

        Raises: MtkitError for an ensemble, for a text of several lines, and as `mtkit.decoding.alignment.align`.
        """
        network, directions = self.network, self.directions(direction, 1)
        wanted = self._target_of(source, target, direction)
        return align(network, self.tokenizers, source, wanted, directions=directions, roles=roles)

    def output_steps(
        self, source: str, target: str | None = None, *, top: int = 5, direction: str | None = None
    ) -> list[Step]:
        """Return the `top` likeliest pieces at each step of predicting `target`; None: of the run's translation.

        Raises: as `align`; a run without attention weights has distributions.
        """
        network, directions = self.network, self.directions(direction, 1)
        wanted = self._target_of(source, target, direction)
        return output_steps(network, self.tokenizers, source, wanted, top=top, directions=directions)

    def _target_of(self, source: str, target: str | Translation | None, direction: str | None) -> str | tuple[int, ...]:
        """Return a given text, or the pieces of a translation of one part; by default, the run's translation.

        Raises: MtkitError for several lines.
        """
        if not isinstance(target, Translation) and "\n" in source.strip() + (target or "").strip():
            raise MtkitError("give one line of text")
        if target is None:
            target = self.translate([source], direction=direction)[0][0]
        if isinstance(target, str):
            return target
        return target.pieces if target.parts == 1 and target.pieces else target.text

    def check_prefixes(self) -> None:
        """Raises: MtkitError if the user named an engine that cannot begin translations with given text."""
        if self._engine_name == "ctranslate2":
            raise MtkitError("CTranslate2 does not support prefixes; leave --engine out")

    def check_links(self) -> None:
        """Raises: MtkitError if words cannot be aligned: an ensemble, no weights, several translations per line."""
        check_weights(self.network)
        if self.settings.n_best > 1:
            raise MtkitError(
                f"words are aligned with one translation per line, and decoding.n_best = {self.settings.n_best}; "
                "set it to 1"
            )

    def word_heads(self, data: Path | None = None, *, say: Say = quiet, progress: ProgressBar = silent) -> Heads:
        """Return the heads that align words, chosen at first use by prepared data (None: the run's); see `heads_for`.

        Raises: MtkitError for an ensemble; RunError for a damaged file of heads.
        """
        run = self.runs[0]
        folder = run.recipe.data.folder if data is None else data
        return heads_for(run, self.network, self._weights[0], folder, say=say, progress=progress)

    def links(self, lines: SourceLines, translations: Sequence[Translation], heads: Heads) -> list[Links]:
        """Return the links between the words of each line and its translation, which `translate` returned."""
        return link_lines(self.network, self.tokenizers, heads, lines, translations)

    def link_targets(self, lines: SourceLines, targets: Sequence[str], heads: Heads) -> list[Links]:
        """Link the words of each line with the words of a given translation; see `word_alignment.link_targets`."""
        return link_targets(self.network, self.tokenizers, heads, lines, targets)

    def force_pieces(
        self,
        lines: SourceLines | Sequence[str],
        targets: Sequence[str],
        contexts: Sequence[Context] | None = None,
        limits: ContextLimits | None = None,
        *,
        alike: Sequence[Hashable] | None = None,
        on_progress: OnProgress = lambda lines: None,
    ) -> list[Forced]:
        """Return the piece log-probabilities of given translations; see `mtkit.decoding.forced.force_lines`."""
        if not isinstance(lines, SourceLines):
            lines = self.source(lines)
        return force_lines(
            self.engine, self.tokenizers, lines, targets, contexts, limits, alike=alike, on_progress=on_progress
        )

    def context_limits(self, direction: str | None = None) -> ContextLimits | None:
        """Return the limits of context in this direction (None: the first); None if the runs use none."""
        limits = ContextLimits.of(self.runs, direction or self.runs[0].directions[0])
        pieces = self.settings.document_pieces
        return limits if limits is None or pieces is None else replace(limits, pieces=pieces)


def _check_alike(one: Run, other: Run) -> None:
    if one.vocabulary != other.vocabulary:
        raise MtkitError(
            f"{one.folder} and {other.folder} have different tokenizers; "
            "an ensemble needs runs that were trained on the same prepared data"
        )
    if one.directions != other.directions:
        raise MtkitError(
            f"{one.folder} was trained on {', '.join(one.directions)} and {other.folder} on "
            f"{', '.join(other.directions)}; an ensemble needs runs with the same directions"
        )


def _check_glossary(settings: DecodingSettings, shortlist: int | None) -> None:
    """Raises: MtkitError if a glossary does not combine with these settings, or with a shortlist."""
    if settings.method != "beam":
        raise MtkitError(f"a glossary needs beam search, and decoding.method = {settings.method}")
    if settings.no_repeat_ngram:
        raise MtkitError(
            f"decoding.no_repeat_ngram = {settings.no_repeat_ngram} may forbid a term of the glossary that occurs "
            "twice; set it to 0"
        )
    if shortlist is not None:
        raise MtkitError("a shortlist leaves out pieces that terms of the glossary need; leave one out")
