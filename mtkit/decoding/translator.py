"""The translator: a trained run, or several as an ensemble, loaded for translation."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mtkit.attention.kernels.cpu.int8 import check_int8
from mtkit.decoding.alignment import Alignment, align, check_weights
from mtkit.decoding.engines.model_engine import Ensemble, ModelEngine, find_dtype
from mtkit.decoding.engines.selection import on_ctranslate2, takes_ctranslate2, with_lexicon
from mtkit.decoding.engines.workers import Workers
from mtkit.decoding.forced import log_probs_of_lines
from mtkit.decoding.held_out import HeldOut, Speed, files_of, save, timed, translate_side
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.source import Directions, Documents, TrainedOn
from mtkit.decoding.translate import OnProgress, Translation, translate_lines
from mtkit.decoding.word_alignment import Heads, Links, link_lines
from mtkit.device import find_device
from mtkit.errors import MtkitError
from mtkit.model.network import Model, Network
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.storage.files import digest
from mtkit.text.tokenizer import Tokenizers

if TYPE_CHECKING:
    from mtkit.decoding.engines.ctranslate2_engine import CTranslate2Engine


class Translator:
    """The model of one run, or an ensemble of the models of several, with decoding settings."""

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
        say: Callable[[str], object] = lambda message: None,
    ) -> None:
        """Loads the checkpoint of each run; the default settings are those of the first run's recipe.

        `engine` is one of `mtkit.decoding.engines.selection.ENGINES`; `say` gets a message where it is not mtkit's own.
        With `forks`, mtkit's own decodes in processes (`mtkit.decoding.engines.workers`), as its own commands do.

        Raises: MtkitError for runs that do not share tokenizers and directions, and for an unavailable device, dtype or
        engine; RunError for a checkpoint that cannot be loaded.
        """
        settings = runs[0].recipe.decoding if settings is None else settings
        for run in runs:
            run.check_packages()
        self.runs, self.settings = runs, settings
        self._trained_on, self._asked = TrainedOn.of(runs), (engine, find_dtype(dtype), find_device(device))
        _, arithmetic, where = self._asked
        if arithmetic == torch.int8:
            check_int8(where)  # before models and text are read
        for other in runs[1:]:
            _check_alike(runs[0], other)
        elsewhere = takes_ctranslate2(engine, runs, settings, arithmetic, where)
        # "best" may be another in a moment, where a run is still training
        chosen = [run.checkpoint(checkpoint).name for run in runs]
        models = [run.load_model(one, str(where)) for run, one in zip(runs, chosen, strict=True)]
        for weights in (run.weights(one) for run, one in zip(runs, chosen, strict=True)):
            if not weights.with_name("state.json").exists():
                say(f"{weights} was not verified: no state.json beside it has its checksum")
        # now, as a training that goes on may drop the files
        self._weights = [digest(run.weights(one)) for run, one in zip(runs, chosen, strict=True)]
        self.model: Model = Ensemble(models) if len(models) > 1 else models[0]
        workers = Workers.where_possible(where) if forks and not elsewhere else None
        own, program = ModelEngine(self.model, settings, arithmetic, workers=workers), "mtkit"
        self.engine: ModelEngine | CTranslate2Engine = own
        if elsewhere:
            self.engine, program = on_ctranslate2(own, runs[0], chosen[0], say=say)
            say(f"{program} decodes (--engine {engine}); --engine mtkit decodes with mtkit's own search")
        elif workers is not None:
            with own.ready():
                pass  # processes begin now, before any thread reads text
        self.about: dict[str, Any] = {
            "checkpoint": " + ".join(chosen),
            "engine": program,
            "device": str(where),
            "dtype": dtype if arithmetic else "float32",
            "threads": torch.get_num_threads(),
            "shortlist": None,
            "settings": settings.model_dump(),
        }
        if len(runs) > 1:
            self.about["ensemble"] = [str(run.folder) for run in runs]

    def with_settings(self, settings: DecodingSettings) -> "Translator":
        """The same loaded model with other decoding settings; mtkit's own engine takes over what another cannot decode.

        Raises: MtkitError where an engine that was named cannot decode so.
        """
        other, engine, (name, arithmetic, where) = copy(self), self.engine, self._asked
        other.about = {**self.about, "settings": settings.model_dump()}
        if not isinstance(engine, ModelEngine) and not takes_ctranslate2(name, self.runs, settings, arithmetic, where):
            engine, other.about["engine"] = replace(engine.own, lexicon=engine.lexicon), "mtkit"
        other.settings, other.engine = settings, engine.with_settings(settings)
        return other

    def shorten(self, lexicon: Lexicon, say: Callable[[str], object] = lambda message: None) -> None:
        """Restricts later translations of lines to the pieces on the shortlists of the lexicon.

        Raises: MtkitError as `mtkit.decoding.engines.selection.with_lexicon`, which calls `say`.
        """
        self.engine = with_lexicon(self.engine, lexicon, self._asked[0], say=say)
        self.about["shortlist"] = lexicon.each
        if isinstance(self.engine, ModelEngine):
            self.about["engine"] = "mtkit"

    @property
    def network(self) -> Network:
        """The network of the run, for what an ensemble cannot do. Raises: MtkitError for an ensemble."""
        if isinstance(self.model, Ensemble):
            raise MtkitError("attention weights are those of one run, not of an ensemble; name a single run")
        return cast(Network, self.model)

    @property
    def tokenizers(self) -> Tokenizers:
        """The tokenizers, which all runs share."""
        return self.runs[0].tokenizers

    @property
    def document_pieces(self) -> int | None:
        """The maximum number of pieces of joined lines; None unless all runs were trained on documents."""
        return document_pieces(self.runs)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that determine a translation besides the text: hashes of the weights, settings, number type."""
        return {
            "weights": self._weights,
            "vocabulary": self.runs[0].vocabulary,
            "trained_on": self._trained_on.fingerprint,
            **self.engine.identity,
        }

    def directions(self, chosen: str | None, lines: int) -> Directions:
        """The same direction for a number of lines. Raises: MtkitError as `Directions.alike`."""
        return Directions.alike(self.runs[0].directions, chosen, lines)

    def lines(
        self,
        lines: Sequence[str],
        *,
        direction: Directions | str | None = None,
        documents: Sequence[int] | Sequence[str] | None = None,
        first: int = 0,
        on_progress: OnProgress | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> list[list[Translation]]:
        """The translations of lines; neighbouring lines with equal ids in `documents` are joined.

        `direction` is that of all lines, or holds that of each; None: the only one. `first` is the number of the first
        line among all, from 0. `stopped` is that of `translate_lines`.
        """
        pieces = self.document_pieces
        return translate_lines(
            self.engine,
            self.tokenizers,
            lines,
            directions=direction if isinstance(direction, Directions) else self.directions(direction, len(lines)),
            documents=None if documents is None or pieces is None else Documents(documents, pieces),
            trained_on=self._trained_on,
            numbers=range(first, first + len(lines)),
            on_progress=on_progress,
            stopped=stopped,
        )

    def align(self, source: str, target: str | None = None, *, direction: str | None = None) -> Alignment:
        """The attention of the run while it predicts each piece of `target`; None: the translation that it finds.

        Raises: MtkitError for an ensemble, for a text of several lines, and as `mtkit.decoding.alignment.align`.
        """
        network, directions = self.network, self.directions(direction, 1)
        if "\n" in source.strip() or "\n" in (target or "").strip():
            raise MtkitError("give one line of text")
        if target is None:
            target = self.lines([source], direction=direction)[0][0].text
        return align(network, self.tokenizers, source, target, directions=directions)

    def check_links(self) -> None:
        """Raises: MtkitError where words cannot be aligned: an ensemble, no weights, several translations a line."""
        check_weights(self.network)
        if self.settings.n_best > 1:
            raise MtkitError(
                f"words are aligned with one translation per line, and decoding.n_best = {self.settings.n_best}; "
                "set it to 1"
            )

    def links(
        self,
        lines: Sequence[str],
        translations: Sequence[Translation],
        heads: Heads,
        *,
        direction: str | None = None,
        documents: Sequence[int] | Sequence[str] | None = None,
    ) -> list[Links]:
        """The links between the words of each line and its translation, which `lines` gave with the same arguments."""
        pieces = self.document_pieces
        return link_lines(
            self.network,
            self.tokenizers,
            heads,
            lines,
            translations,
            directions=self.directions(direction, len(lines)),
            documents=None if documents is None or pieces is None else Documents(documents, pieces),
            trained_on=self._trained_on,
        )

    def force(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        directions: Directions | None,
        *,
        first: int = 0,
        on_progress: OnProgress | None = None,
    ) -> list[float]:
        """The log-probability of each given translation; direction None: the only one."""
        return log_probs_of_lines(
            self.engine,
            self.tokenizers,
            sources,
            targets,
            directions=directions and directions.among(self.runs[0].directions),
            first=first,
            on_progress=on_progress,
        )

    def held_out(
        self,
        side: HeldOut,
        *,
        joined: bool,
        say: Callable[[str], object] = lambda message: None,
        on_progress: OnProgress = lambda lines: None,
    ) -> tuple[list[list[Translation]], Speed, Path]:
        """Translates a side into the folder of the first run, by documents if `joined`; gives the path of the text too.

        The same call after an interruption goes on where it ended. The file name of an ensemble includes the names of
        the other runs: test+two. `say` gets messages for people.
        """
        run, side = self.runs[0], self._own(side)
        joined = joined and side.documents is not None and self.settings.n_best == 1
        side = side.renamed("+".join([side.name, *(other.folder.resolve().name for other in self.runs[1:])]))

        def translated(part: HeldOut, first: int) -> tuple[list[list[Translation]], Speed]:
            return timed(
                self.engine,
                self.tokenizers,
                part,
                joined=joined,
                trained_on=self._trained_on,
                first=first,
                on_progress=on_progress,
            )

        about = {**self.about, "by_documents": joined}  # what is written beside the time, which is of all calls
        identity = {**self.identity, **about, "document_pieces": self.document_pieces}
        folder = files_of(run, side.name)["txt"].parent  # before the work, as a link among the files is an error
        found, speed = translate_side(
            side, translated, folder, identity, joined=joined, say=say, on_progress=on_progress
        )
        return found, speed, save(run, side, found, speed, about)

    def links_of_side(
        self, side: HeldOut, translations: Sequence[Translation], heads: Heads, *, joined: bool
    ) -> list[Links]:
        """The links between the words of each segment and its translation, which `held_out` gave."""
        return link_lines(
            self.network,
            self.tokenizers,
            heads,
            side.sources,
            translations,
            trained_on=self._trained_on,
            **self._own(side).how(self.settings, joined=joined),
        )

    def _own(self, side: HeldOut) -> HeldOut:
        """The side with the directions and the limits of documents of these runs."""
        if side.directions is not None:
            side = replace(side, directions=side.directions.among(self.runs[0].directions))
        if side.documents is not None and self.document_pieces is not None:
            side = replace(side, documents=replace(side.documents, pieces=self.document_pieces))
        return side


def document_pieces(runs: Sequence[Run]) -> int | None:
    """The maximum number of pieces of joined lines for these runs; None where one was not trained on documents."""
    known = [run.document_pieces for run in runs]
    return min((pieces for pieces in known if pieces is not None), default=None) if all(known) else None


def joins_documents(
    runs: Sequence[Run],
    asked: bool | None,
    settings: DecodingSettings,
    *,
    scores: bool = False,
    forced: bool = False,
    say: Callable[[str], object],
) -> bool:
    """Whether lines of a document are translated together: as requested, by default if all runs were trained so.

    `say` gets a message where the default does not apply because of the settings, `scores`, or `forced` decoding.

    Raises: MtkitError where the request cannot be met.
    """
    trained = document_pieces(runs) is not None
    if asked and not trained:
        raise MtkitError("--documents needs a run trained on documents (data.documents in its recipe); leave it out")
    if not trained or asked is False:
        return False
    single = {"--scores": scores, "--target": forced, "--n-best above 1": settings.n_best > 1}
    for option, given in single.items():
        if given and asked:
            raise MtkitError(f"{option} needs lines that are translated one by one; give --sentences too")
        if given:
            say(f"with {option}, lines are translated one by one, not by documents")
            return False
    return True


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
