"""Model card, the README.md of an exported model: its use, training data, settings, scores and commands."""

import math
from collections.abc import Iterable
from typing import Any

from mtkit.data.lengths import ROOM
from mtkit.errors import MtkitError, RunError
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import run_sides
from mtkit.interchange.huggingface import CLASSES
from mtkit.recipe.settings import ONLY_WITH
from mtkit.runs import Origin, Run
from mtkit.storage.records import read_stored
from mtkit.terminal import markdown
from mtkit.text.languages import languages_of
from mtkit.text.tokenizer import BREAK, SPECIALS
from mtkit.training.run_folder import ancestors, imported_from, trained_on
from mtkit.version import __version__

USES = {
    "huggingface": """from transformers import {model}, MarianTokenizer

model = {model}.from_pretrained("FOLDER")
tokenizer = MarianTokenizer.from_pretrained("FOLDER")
batch = tokenizer(["{prefix}..."], return_tensors="pt", padding=True)
length = batch["input_ids"].shape[1]
output = model.generate(**batch, max_length={limit} + 1)
print(tokenizer.batch_decode(output, skip_special_tokens=True))""",
    "ctranslate2": """import ctranslate2
import sentencepiece

translator = ctranslate2.Translator("FOLDER")
source = sentencepiece.SentencePieceProcessor(model_file="FOLDER/source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="FOLDER/target.spm")


def translate(line):
    tokens = {prefix}source.encode(line, out_type=str)
    length = len(tokens) + 1
    results = translator.translate_batch(
        [tokens],
{search}
        max_decoding_length={limit} - 1,
        min_decoding_length=0,
        max_input_length=0,
        return_end_token=True,
        disable_unk=True,
        suppress_sequences=[["<s>"], ["<blank>"]{breaks}],
    )
    return target.decode([piece for piece in results[0].hypotheses[0] if piece != "</s>"])


print(translate("..."))""",
    "argos": """import argostranslate.package
import argostranslate.translate

argostranslate.package.install_from_path("FILE")
print(argostranslate.translate.translate("...", "{source}", "{target}"))""",
}
"""{format: Python code that translates with the run's decoding settings}. `length` includes the end of the source."""


def card(run: Run, checkpoint: str, to: str, compared: str, tag: str | None, caution: str) -> str:
    """Return the text of README.md.

    `to` is the format, `compared` the result of the token comparison, `tag` the piece before each source if there is
    one, and `caution` a warning about the use.
    """
    languages = dict.fromkeys(language for direction in run.directions for language in languages_of(direction))
    library, prefix, search = "transformers", f"{tag} " if tag else "", ""
    if to != "huggingface":
        library, prefix, search = "ctranslate2", f'["{tag}"] + ' if tag else "", _search(run)
    model = CLASSES[run.recipe.model.norm][1]
    source, target = languages_of(run.directions[0])
    # lines of documents that are joined need breaks
    breaks = "" if run.document_pieces else f', ["{SPECIALS[BREAK]}"]'
    code = {"model": model, "prefix": prefix, "limit": _limit(run), "search": search, "breaks": breaks}
    use = USES[to].format(**code, source=source, target=target)
    warning = f"{caution[0].upper()}{caution[1:]}.\n\n" if caution else ""
    parts = [
        "---\nlanguage:\n" + _bullets(map(_yaml_text, languages)),
        *(f"base_model: {name}\n" for name in _base_models(run)),
        f"library_name: {library}\npipeline_tag: translation\ntags:\n- translation\n- mtkit\n---\n\n",
        f"# Translation {', '.join(run.directions)}\n\n",
        f"{_made(run)}, exported by mtkit {__version__} from the checkpoint {checkpoint}: {compared}.\n\n",
        f"## Use\n\n```python\n{use}\n```\n\n",
        warning,
        f"## Data\n\n{_bullets(_data(run))}\n",
        f"## Settings\n\n{markdown([('setting', 'value'), *_settings(run)], left=(0, 1))}\n\n",
        _scores(run, checkpoint),
    ]
    if commands := run.about.get("commands"):
        parts.append("## Commands\n\n```bash\n" + "".join(f"{command}\n" for command in commands) + "```\n")
    return "".join(parts)


def _made(run: Run) -> str:
    version = run.about.get("mtkit", __version__)
    if imported := imported_from(run):
        return f"Imported by mtkit {version} from {imported}, which was trained elsewhere"
    earlier = ", which began with ".join(map(_origin, ancestors(run)))
    return f"Trained with mtkit {version}" + (f", beginning with the weights of {earlier}" if earlier else "")


def _base_models(run: Run) -> list[str]:
    """Return the model on the hub from which the run was made or trained; only hub models have a slash in the name."""
    imported = [imported_from(run), *(origin["imported_from"] for origin in ancestors(run))]
    return [name for name in imported if name is not None and "/" in name][:1]


def _origin(origin: Origin) -> str:
    imported = origin["imported_from"]
    return f"the run {origin['run']}" + (f" (imported from {imported})" if imported else "")


def _limit(run: Run) -> str:
    """Return Python code for the maximum number of target pieces, including the end, given the source `length`.

    mtkit's limit depends on the ratios of training pairs with a similar source length; the card has the largest ratio.
    """
    most, longest = run.recipe.decoding.max_pieces, run.recipe.model.max_length
    if most is not None:
        return str(min(most, longest))
    bins = run.lengths[0].bins if run.lengths else ()
    ratio = math.ceil(100 * max((lengths.highest for lengths in bins), default=0.0)) / 100
    least = "2 * length + 20" if ratio <= 2 else f"max(2 * length + 20, int({ratio} * length) + {ROOM + 1})"
    return f"min({least}, {longest})"


def _search(run: Run) -> str:
    """Return CTranslate2's arguments for the run's decoding settings, one per line."""
    from mtkit.decoding.engines.ctranslate2_engine import LEAST_PENALTY

    chosen = run.recipe.decoding
    arguments: dict[str, Any] = {"beam_size": chosen.beam if chosen.method == "beam" else 1}
    if chosen.method == "beam":
        arguments["length_penalty"] = chosen.length_penalty or LEAST_PENALTY
        arguments["coverage_penalty"] = chosen.coverage_penalty
    if chosen.method == "sample":
        arguments["sampling_topk"] = chosen.top_k
        arguments["sampling_topp"] = chosen.top_p
        arguments["sampling_temperature"] = chosen.temperature
    arguments["no_repeat_ngram_size"] = chosen.no_repeat_ngram
    return "\n".join(f"        {name}={value}," for name, value in arguments.items())


def _data(run: Run) -> list[str]:
    if imported_from(run):
        return [f"mtkit does not know the training data of {imported_from(run)}"]
    earlier = [f"{_origin(origin)} before: {text}" for origin in ancestors(run) for text in origin["data"]]
    return [*(trained_on(run) or ["not recorded"]), *earlier]


def _settings(run: Run) -> list[tuple[str, str]]:
    """Return the settings that had an effect."""
    recipe = run.recipe
    parts = {"model", "attention", "decoding"} | (set() if imported_from(run) else {"training"})
    sections = recipe.model_dump(mode="json", include=parts)
    without_effect = {
        # files of this machine; the card names them with the training data
        "model": {"embeddings"} | ({"cell", "form"} if recipe.model.architecture != "rnn" else set()),
        # init_from is a folder of this machine; the card names the run above
        "training": {"init_from"} | ({"muon_rate"} if recipe.training.optimizer != "muon" else set()),
        "decoding": {name for method, names in ONLY_WITH.items() if method != recipe.decoding.method for name in names},
        "attention": set[str](),
    }
    if "training" in sections and "precision" in run.about:
        sections["training"]["precision"] = run.about["precision"]
    return [
        (f"{part}.{key}", str(value))
        for part, values in sections.items()
        for key, value in values.items()
        if value and key not in without_effect[part]
    ]


def _scores(run: Run, checkpoint: str) -> str:
    """Return the scores of the sides that this checkpoint has translated without other runs.

    Decoding settings that differ from the run's are named, since the rest of the card describes the run's.
    """
    try:
        sides = run_sides([run], ())
    except MtkitError:
        return ""
    settings, rows = run.recipe.scoring, list[tuple[str, ...]]()
    decoding = run.recipe.decoding.model_dump(exclude={"batch_tokens"})
    for name, files in sides.items():
        record = run.folder / "translations" / f"{name}.json"
        about = read_stored(record, dict[str, Any], "translate again", error=RunError)
        if about.get("checkpoint") != checkpoint:  # another checkpoint's, or an ensemble's
            continue
        searched = about.get("settings", {}).items()
        changed = [f"{key} = {value}" for key, value in searched if value != decoding.get(key, value)]
        side = f"{name}, with {', '.join(changed)}" if changed else name
        scored = score_side(
            name,
            files,
            metrics=settings.metrics,
            language=run.target_language,
            tokenize=settings.tokenize,
            lowercase=settings.lowercase,
        )
        for score in scored.overall.scores[0]:
            rows.append((side, score.name, score.text, score.interval, f"`{score.signature}`"))
    heads = ("side", "metric", "score", "95% interval", "signature")
    return f"## Scores\n\n{markdown([heads, *rows], left=(0, 1, 3, 4))}\n\n" if rows else ""


def _yaml_text(text: str) -> str:
    """Quote a text that YAML 1.1 reads as a boolean, as the language no."""
    return f'"{text}"' if text.lower() in ("no", "on", "off", "yes", "y", "n") else text


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
