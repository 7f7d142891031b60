"""Training text with one side that a trained run translates from the other side.

FOLDER-translated/train-2.txt   the missing side of the second training corpus of the prepared data FOLDER
FOLDER-translated/train-2.json  what it is made of

A corpus without a target gets the run's translations as its target: sequence-level distillation (Kim and Rush, 2016,
https://aclanthology.org/D16-1139). A corpus without a source gets a source: back-translation (Sennrich et al., 2016,
https://aclanthology.org/P16-1009).
"""

from collections import deque
from itertools import islice
from pathlib import Path

from mtkit.data.resolve import with_languages, with_tokenizer
from mtkit.decoding.files import translate_file
from mtkit.decoding.translator import Translator
from mtkit.errors import RecipeError, RunError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.recipe.settings import run_folder_of
from mtkit.runs import named_run
from mtkit.storage.files import inside
from mtkit.storage.jobs import begin_outputs
from mtkit.terminal import ProgressBar, Say, quiet, silent
from mtkit.text.corpora import EMPTY_LINES, measure_file
from mtkit.text.languages import languages_of
from mtkit.text.text_files import Lines


def with_translations(
    settings: DataSettings,
    *,
    device: str = "auto",
    say: Say = quiet,
    progress: ProgressBar = silent,
) -> DataSettings:
    """Return the settings with a text file for each side that a run translates; missing files are translated first.

    A repeated call resumes. A file translated from the same text with the same weights and decoding settings is used
    again. The decoding settings are in the run's recipe. `say` gets messages for people.

    Raises: RunError for a missing run; RecipeError for a run of another direction; DataError for bad text.
    """
    settings, notes = with_languages(with_tokenizer(settings))
    for note in notes:
        say(note)
    folder = inside(settings.folder.parent, f"{settings.folder.name}-translated")
    train = [
        _completed(corpus, settings.direction_of(corpus), folder / f"train-{number}", device, say, progress)
        for number, corpus in enumerate(settings.train, start=1)
    ]
    return settings.model_copy(update={"train": tuple(train)})


def _completed(corpus: Corpus, direction: str, stem: Path, device: str, say: Say, progress: ProgressBar) -> Corpus:
    """Return the corpus with both sides; the missing one is translated into `stem`.txt."""
    if corpus.translated_by is None:
        return corpus
    given, missing = ("source", "target") if corpus.target is None else ("target", "source")
    text = Path(str(getattr(corpus, given)))
    output, record = inside(stem.parent, f"{stem.name}.txt"), inside(stem.parent, f"{stem.name}.json")
    facts, translator = measure_file(text), _translator(corpus.translated_by, device)
    if given == "target":
        direction = "-".join(reversed(languages_of(direction)))
    _check_direction(translator, direction)
    ids = None if corpus.documents in (None, EMPTY_LINES) else Path(str(corpus.documents))
    about = {
        **translator.identity,
        "direction": direction,
        "text": facts.sha256,
        "documents": corpus.documents if ids is None else measure_file(ids).sha256,
    }
    if begin_outputs(record, about, [output]):
        run = translator.runs[0].folder
        say(f"translating {facts.lines:,} lines of {text} with {run}, beam {translator.settings.beam}, into {output}")
        bar = iter(progress(range(facts.lines), f"translating {text.name}", facts.lines))
        notes = translate_file(
            translator,
            Lines(text),
            output,
            direction=direction,
            documents=False if corpus.documents is None else None,  # None: as the run was trained
            document_ids=None if translator.document_pieces is None else ids,
            say=say,
            on_progress=lambda lines: deque(islice(bar, lines), maxlen=0),
        )
        deque(bar, maxlen=0)
        for message in notes.messages():
            say(f"note: {message}")
    return corpus.model_copy(update={missing: output, "translated_by": None})


def _translator(run: Path, device: str) -> Translator:
    """Load the run in that folder, or with that name in ./mtkit-runs, with one translation per line."""
    if run_folder_of(run) == run and not run.is_dir():
        raise RunError(f"data.train: translated_by {run}: no such run folder; train that run first, or name another")
    loaded = named_run(run)
    return Translator([loaded], loaded.recipe.decoding.model_copy(update={"n_best": 1}), device=device, forks=True)


def _check_direction(translator: Translator, direction: str) -> None:
    known = translator.runs[0].directions
    if direction not in known:
        raise RecipeError(
            f"data.train: translated_by {translator.runs[0].folder}, which translates {', '.join(known)}, but the "
            f"corpus needs {direction}; name another run"
        )
