"""The model card: README.md of an exported model, with what it was trained on, its settings, its scores and its use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mtkit
from mtkit.errors import MtkitError, RunError
from mtkit.evaluation.scores import Score
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import run_sides
from mtkit.interchange.outward.huggingface import CLASSES
from mtkit.languages import languages_of
from mtkit.recipe.data import Corpus
from mtkit.runs import Run
from mtkit.stored import read_stored
from mtkit.tables import markdown

USES = {
    "huggingface": """from transformers import {model}, MarianTokenizer

model = {model}.from_pretrained("FOLDER")
tokenizer = MarianTokenizer.from_pretrained("FOLDER")
batch = tokenizer(["{prefix}..."], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))""",
    "ctranslate2": """import ctranslate2
import sentencepiece

translator = ctranslate2.Translator("FOLDER")
source = sentencepiece.SentencePieceProcessor(model_file="FOLDER/source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="FOLDER/target.spm")
found = translator.translate_batch([{prefix}source.encode("...", out_type=str)], disable_unk=True)
print(target.decode(found[0].hypotheses[0]))""",
}
"""How a model is used, by library."""


def card(run: Run, checkpoint: str, to: str, compared: str, tag: str | None, caution: str) -> str:
    """The text of README.md; `compared` says how its tokens were compared, `tag` is what goes before each source.

    `caution` follows the lines that use it.
    """
    languages = list(dict.fromkeys(each for way in run.directions for each in languages_of(way)))
    library = {"huggingface": "transformers", "ctranslate2": "ctranslate2"}[to]
    use = USES[to].format(model=CLASSES[run.recipe.model.norm][1], prefix=_prefix(to, tag))
    parts = [
        "---\nlanguage:\n" + "".join(f"- {each}\n" for each in languages),
        f"library_name: {library}\npipeline_tag: translation\ntags:\n- translation\n- mtkit\n---\n\n",
        f"# Translation {', '.join(run.directions)}\n\n",
        f"Trained with mtkit {run.about.get('mtkit', mtkit.__version__)}, exported by mtkit {mtkit.__version__} from ",
        f"the checkpoint {checkpoint}: {compared}.\n\n## Use\n\n```python\n{use}\n```\n\n",
        caution and _sentence(caution),
        f"## Data\n\n{_bullets(_data(run))}\n",
        f"## Settings\n\n{markdown([('setting', 'value'), *_settings(run)], left=(0, 1))}\n\n",
        _scores(run, checkpoint),
    ]
    if commands := run.about.get("commands"):
        parts.append("## Commands\n\n```bash\n" + "".join(f"{each}\n" for each in commands) + "```\n")
    return "".join(parts)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}.\n\n"


def _prefix(to: str, tag: str | None) -> str:
    if tag is None:
        return ""
    return f"{tag} " if to == "huggingface" else f'["{tag}"] + '


def _data(run: Run) -> list[str]:
    data, known = run.recipe.data, run.about.get("lengths") or {}
    text = [_name(each) for each in data.train]
    if not text and run.about.get("data") is not None:
        text = [f"the built-in corpus of mtkit, seed {data.builtin.seed}"]
    pairs = [f"{way}: {sum(each.pairs for each in its.bins):,} training pairs" for way, its in known.items()]
    return [*text, *pairs] or ["the run does not say"]


def _name(corpus: Corpus) -> str:
    if corpus.dataset is not None:
        return str(corpus.dataset)
    files = [corpus.file] if corpus.file is not None else [corpus.source, corpus.target]
    return " and ".join(Path(file).name for file in files if file is not None)


def _settings(run: Run) -> list[tuple[str, str]]:
    parts = run.recipe.model_dump(mode="json", include={"model", "attention", "training", "decoding"})
    return [(f"{part}.{key}", str(value)) for part, its in parts.items() for key, value in its.items() if value]


def _scores(run: Run, checkpoint: str) -> str:
    """Scores of the sides that this checkpoint alone has translated."""
    try:
        sides = run_sides([run], ())
    except MtkitError:
        return ""
    settings, rows = run.recipe.scoring, list[tuple[str, ...]]()
    for name, files in sides.items():
        record = run.folder / "translations" / f"{name}.json"
        about = read_stored(record, dict[str, Any], "translate again", error=RunError)
        if about.get("checkpoint") != checkpoint:  # another one's, or an ensemble's
            continue
        scored = score_side(
            name,
            files,
            metrics=settings.metrics,
            language=run.target_language,
            tokenize=settings.tokenize,
            lowercase=settings.lowercase,
        )
        rows += [_row(name, each) for each in scored.overall.scores[0]]
    heads = ("side", "metric", "score", "95% interval", "signature")
    return f"## Scores\n\n{markdown([heads, *rows], left=(0, 1, 3, 4))}\n\n" if rows else ""


def _row(side: str, score: Score) -> tuple[str, ...]:
    interval = "" if score.low is None or score.high is None else f"{score.low:.2f} to {score.high:.2f}"
    return side, score.name, f"{score.value:.2f}", interval, f"`{score.signature}`"


def _bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {each}\n" for each in lines)
