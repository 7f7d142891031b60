"""The model card: README.md of an exported model, with what it was trained on, its settings, its scores and its use."""

import math
from collections.abc import Sequence
from typing import Any

from mtkit.data.lengths import ROOM
from mtkit.errors import MtkitError, RunError
from mtkit.evaluation.report import score_side
from mtkit.evaluation.scores import Score
from mtkit.evaluation.systems import run_sides
from mtkit.interchange.huggingface import CLASSES
from mtkit.recipe.settings import ONLY_WITH
from mtkit.runs import Origin, Run
from mtkit.storage.records import read_stored
from mtkit.terminal import markdown
from mtkit.text.languages import languages_of
from mtkit.training.run_folder import imported_from, origins, trained_on
from mtkit.version import __version__

USES = {
    "huggingface": """from transformers import {model}, MarianTokenizer

model = {model}.from_pretrained("FOLDER")
tokenizer = MarianTokenizer.from_pretrained("FOLDER")
batch = tokenizer(["{prefix}..."], return_tensors="pt", padding=True)
length = batch["input_ids"].shape[1]
found = model.generate(**batch, max_length={limit} + 1)
print(tokenizer.batch_decode(found, skip_special_tokens=True))""",
    "ctranslate2": """import ctranslate2
import sentencepiece

translator = ctranslate2.Translator("FOLDER")
source = sentencepiece.SentencePieceProcessor(model_file="FOLDER/source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="FOLDER/target.spm")


def translate(line):
    tokens = {prefix}source.encode(line, out_type=str)
    length = len(tokens) + 1
    found = translator.translate_batch(
        [tokens],
{search}
        max_decoding_length={limit} - 1,
        min_decoding_length=0,
        max_input_length=0,
        return_end_token=True,
        disable_unk=True,
        suppress_sequences=[["<s>"], ["<blank>"]],
    )
    return target.decode([piece for piece in found[0].hypotheses[0] if piece != "</s>"])


print(translate("..."))""",
}
"""Python code by library that translates with the run's decoding settings. `length` counts the end of the source."""


def card(run: Run, checkpoint: str, to: str, compared: str, tag: str | None, caution: str) -> str:
    """The text of README.md; `compared` says how its tokens were compared, `tag` is what goes before each source.

    `caution` follows the lines that use it.
    """
    languages = list(dict.fromkeys(each for way in run.directions for each in languages_of(way)))
    library = {"huggingface": "transformers", "ctranslate2": "ctranslate2"}[to]
    search = _search(run) if to == "ctranslate2" else ""
    use = USES[to].format(
        model=CLASSES[run.recipe.model.norm][1], prefix=_prefix(to, tag), limit=_limit(run), search=search
    )
    parts = [
        "---\nlanguage:\n" + "".join(f"- {each}\n" for each in languages),
        *(f"base_model: {name}\n" for name in _base_models(run)),
        f"library_name: {library}\npipeline_tag: translation\ntags:\n- translation\n- mtkit\n---\n\n",
        f"# Translation {', '.join(run.directions)}\n\n",
        f"{_made(run)}, exported by mtkit {__version__} from the checkpoint {checkpoint}: {compared}.\n\n",
        f"## Use\n\n```python\n{use}\n```\n\n",
        caution and _sentence(caution),
        f"## Data\n\n{_bullets(_data(run))}\n",
        f"## Settings\n\n{markdown([('setting', 'value'), *_settings(run)], left=(0, 1))}\n\n",
        _scores(run, checkpoint),
    ]
    if commands := run.about.get("commands"):
        parts.append("## Commands\n\n```bash\n" + "".join(f"{each}\n" for each in commands) + "```\n")
    return "".join(parts)


def _made(run: Run) -> str:
    version = run.about.get("mtkit", __version__)
    if imported := imported_from(run):
        return f"Imported by mtkit {version} from {imported}, which was trained elsewhere"
    earlier = ", which began with ".join(map(_origin, origins(run)))
    return f"Trained with mtkit {version}" + (f", beginning with the weights of {earlier}" if earlier else "")


def _base_models(run: Run) -> list[str]:
    """The model on the hub that the run was made of, directly or by training; no other one has a slash in its name."""
    imported = [imported_from(run), *(each["imported_from"] for each in origins(run))]
    return [name for name in imported if name is not None and "/" in name][:1]


def _origin(origin: Origin) -> str:
    imported = origin["imported_from"]
    return f"the run {origin['run']}" + (f" (imported from {imported})" if imported else "")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}.\n\n"


def _prefix(to: str, tag: str | None) -> str:
    if tag is None:
        return ""
    return f"{tag} " if to == "huggingface" else f'["{tag}"] + '


def _limit(run: Run) -> str:
    """Python code for the maximum number of target pieces, the end counted, given the `length` of the source.

    mtkit's limit depends on the ratios of training pairs with a similar source length; the card has the largest ratio.
    """
    most, longest = run.recipe.decoding.max_pieces, run.recipe.model.max_length
    if most is not None:
        return str(min(most, longest))
    bins = run.lengths[0].bins if run.lengths else ()
    ratio = math.ceil(100 * max((each.highest for each in bins), default=0.0)) / 100
    least = "2 * length + 20" if ratio <= 2 else f"max(2 * length + 20, int({ratio} * length) + {ROOM + 1})"
    return f"min({least}, {longest})"


def _search(run: Run) -> str:
    """CTranslate2's arguments for the run's decoding settings, one per line."""
    from mtkit.decoding.engines.ctranslate2_engine import LEAST_PENALTY

    chosen = run.recipe.decoding
    given: dict[str, Any] = {"beam_size": chosen.beam if chosen.method == "beam" else 1}
    if chosen.method == "beam":
        given |= {
            "length_penalty": chosen.length_penalty or LEAST_PENALTY,
            "coverage_penalty": chosen.coverage_penalty,
        }
    if chosen.method == "sample":
        given |= {
            "sampling_topk": chosen.top_k,
            "sampling_topp": chosen.top_p,
            "sampling_temperature": chosen.temperature,
        }
    given["no_repeat_ngram_size"] = chosen.no_repeat_ngram
    return "\n".join(f"        {name}={value}," for name, value in given.items())


def _data(run: Run) -> list[str]:
    if imported_from(run):
        return [f"mtkit does not know the training data of {imported_from(run)}"]
    earlier = [f"{_origin(each)} before: {text}" for each in origins(run) for text in each["data"]]
    return [*(trained_on(run) or ["the run does not say"]), *earlier]


def _settings(run: Run) -> list[tuple[str, str]]:
    """Return the settings that had an effect."""
    recipe = run.recipe
    parts = {"model", "attention", "decoding"} | (set() if imported_from(run) else {"training"})
    found = recipe.model_dump(mode="json", include=parts)
    without = {
        "model": {"cell", "form"} if recipe.model.architecture != "rnn" else set(),
        # the run that it names is told above, and its folder is of this machine
        "training": {"init_from"} | ({"muon_rate"} if recipe.training.optimizer != "muon" else set()),
        "decoding": {name for method, names in ONLY_WITH.items() if method != recipe.decoding.method for name in names},
        "attention": set[str](),
    }
    if "training" in found and "precision" in run.about:
        found["training"]["precision"] = run.about["precision"]
    return [
        (f"{part}.{key}", str(value))
        for part, its in found.items()
        for key, value in its.items()
        if value and key not in without[part]
    ]


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
