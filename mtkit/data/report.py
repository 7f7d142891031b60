"""The result of `prepare` as a compact table."""

from collections.abc import Sequence
from typing import Any, cast

from mtkit.data.cleaning import REASONS
from mtkit.data.prepare import Report
from mtkit.data.prepared import open_prepared
from mtkit.data.sides import RARE
from mtkit.terminal import aligned
from mtkit.text.languages import has_spaces, languages_of

NOTABLE = 0.001
"""Share of byte or unknown pieces from which on a side is named, and of odd lines from which on they are warned of."""

_PLACES = 6
"""Texts that a warning names at most."""

_SHOWN = 60
"""Characters of a target that are shown."""


def summary(report: Report, max_length: int) -> str:
    """Sides with their segments, words and pieces, what training leaves out and why, and the vocabulary.

    `max_length`: the tokens that the model can take, end mark counted; training leaves longer pairs out.
    """
    record, folder = cast(dict[str, Any], report.record), report.folder
    settings = record["settings"]
    ways = [*{corpus["direction"] for side in record["sides"].values() for corpus in side["corpora"]}]
    ends = _languages(ways[0], settings) if len(ways) == 1 else ("source", "target")
    if report.unchanged:
        head = f"{folder} is up to date: the same settings and the same text were prepared before"
    else:
        head = f"{folder} prepared in {record['seconds']:.1f} s"
    rows = [("", "segments", *(f"{what} {each}" for what in ("words", "pieces", "pieces/word") for each in ends))]
    for name, side in record["sides"].items():
        rows += _rows(name, side, settings)
    parts = [head, *report.notes, "", aligned(rows), "", *_cleaning(record["sides"]), *_repairs(record["inputs"])]
    parts += _oddities(record)
    if documents := settings["documents"]:
        parts.append(f"documents: training joins their segments anew each epoch, up to {documents['pieces']:,} pieces")
    too_long = open_prepared(folder).train.too_long(max_length)
    parts.append(f"left out of training besides: {too_long:,} too long (over {max_length:,} pieces)")
    return "\n".join(
        [*parts, _vocabulary(record), *_too_large(record), *_hard_to_spell(record["sides"]), *_altered(record)]
    )


def _rows(name: str, side: dict[str, Any], settings: dict[str, Any]) -> list[tuple[str, ...]]:
    """A side, and below it its directions where there are several, and its corpora, likewise."""
    corpora = side["corpora"]
    directions = list(dict.fromkeys(each["direction"] for each in corpora))
    rows = [_row(name, side, directions, settings)]
    if len(directions) > 1:
        for direction in directions:
            mine = [each for each in corpora if each["direction"] == direction]
            rows.append(_row(f"  {direction}", _summed(mine), [direction], settings))
    if len(corpora) > 1:
        given = (
            settings["train" if name == "train" else "valid"] if name in ("train", "valid") else settings["test"][name]
        )
        for number, (count, corpus) in enumerate(zip(corpora, given, strict=True), start=1):
            weight = f", weight {corpus['weight']:g}" if name == "train" and corpus["weight"] != 1 else ""
            rows.append(_row(f"  corpus {number}{weight}", count, [count["direction"]], settings))
    return rows


def _row(name: str, count: dict[str, Any], directions: Sequence[str], settings: dict[str, Any]) -> tuple[str, ...]:
    """What was counted in these directions; no words of a side that has a language without spaces between them."""
    words, pieces, ratios = [], [], []
    for place, side in enumerate(("source", "target")):
        spaced = all(has_spaces(_languages(each, settings)[place]) for each in directions)
        words.append(f"{count['words'][side]:,}" if spaced else "-")
        pieces.append(f"{count['pieces'][side]:,}")
        ratios.append(f"{count['pieces'][side] / max(count['words'][side], 1):.2f}" if spaced else "-")
    return (name, f"{count['segments']:,}", *words, *pieces, *ratios)


def _languages(direction: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Source and target of a direction; those of the settings may have hyphens of their own."""
    own = (settings["source_language"], settings["target_language"])
    return own if direction == "-".join(own) else languages_of(direction)


def _summed(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = {
        what: {side: sum(each[what][side] for each in counts) for side in ("source", "target")}
        for what in ("words", "pieces")
    }
    return {"segments": sum(each["segments"] for each in counts), **numbers}


def _cleaning(sides: dict[str, Any]) -> list[str]:
    """What is unusual about the lines of each side, as far as there is any, and what training does without."""
    rows = [
        (
            what,
            *(f"{side['found'].get(reason, 0):,}" for side in sides.values()),
            f"{sides['train']['left_out'].get(reason, 0):,}",
        )
        for reason, what in REASONS.items()
        if any(side["found"].get(reason) for side in sides.values())
    ]
    if not rows:
        lines = [
            "cleaning: no pair is empty, a duplicate, in a held-out side, the same on both sides or out of proportion"
        ]
    else:
        lines = aligned([("cleaning: pairs", *(f"in {name}" for name in sides), "left out of train"), *rows]).split(
            "\n"
        )
    for name, side in sides.items():
        for number, corpus in enumerate(side["corpora"], start=1):
            if line := corpus["suspicious_line"]:
                which = f"corpus {number} of {name}" if len(side["corpora"]) > 1 else name
                lines.append(f"warning: the sides of {which} seem not to match from about line {line:,}; look there")
    return [*lines, ""]


def _oddities(record: dict[str, Any]) -> list[str]:
    """Signs of damaged or processed text, a line each: how many lines of which text have it, and what to do.

    It is a warning if one line in a thousand of a text has the sign.
    """
    keeps = record["settings"]["tokenizer"]["normalization"] == "identity"
    source = "are kept (--normalization identity)" if keeps else "are dropped or become spaces"
    kinds = {
        "entities": "HTML entities, as &amp;: unescape them",
        "wrongly_decoded": "characters of a wrong decoding, as Ã¤ or U+FFFD: decode the original text as UTF-8",
        "invisible": f"control or invisible characters: in sources they {source}, in targets a model learns them",
        "subword_marks": "@@ between pieces of words: give plain text (sed 's/@@ //g'), which prepare cuts itself",
    }
    lines = []
    for kind, advice in kinds.items():
        found = [
            (count, side, name, first, count >= NOTABLE * each["lines"])
            for name, each in record["inputs"].items()
            for side, (count, first) in each.get("oddities", {}).get(kind, {}).items()
        ]
        places = [f"{count:,} {side} lines of {name} (from line {first:,} on)" for count, side, name, first, _ in found]
        if places:
            much = "warning" if any(notable for *_, notable in found) else "note"
            more = f" and of {len(places) - _PLACES} more texts" if len(places) > _PLACES else ""
            lines.append(f"{much}: {', '.join(places[:_PLACES])}{more} have {advice}")
    return lines


def _too_large(record: dict[str, Any]) -> list[str]:
    """A warning about each vocabulary most of whose pieces are rare in the training text."""
    if record["settings"].get("tokenizer_from"):
        return []
    return [
        f"warning: the {name} vocabulary is large for this text: {use['rare']:,} of {use['used']:,} pieces occur fewer "
        f"than {RARE} times in training; try --vocabulary {-(-use['enough'] // 8) * 8} (data.tokenizer.vocabulary)"
        for name, use in record["sides"]["train"].get("use", {}).items()
        if use["rare"] > use["used"] / 2
    ]


def _repairs(inputs: dict[str, Any]) -> list[str]:
    """What was put right while the text was read, and what looks like line ends but is kept."""
    names = {
        "carriage_returns": "carriage returns at line ends dropped",
        "byte_order_marks": "byte order marks dropped",
        "inner_newlines": "newlines within a field made spaces",
        "inner_carriage_returns": "carriage returns within lines",
        "line_separators": "U+2028 and U+2029 within lines",
    }
    found = {what: sum(each.get(what, 0) for each in inputs.values()) for what in names}
    told = [f"{number:,} {names[what]}" for what, number in found.items() if number]
    return [f"text: {', '.join(told)}"] if told else []


def _vocabulary(record: dict[str, Any]) -> str:
    settings, sizes = record["settings"]["tokenizer"], record["vocabulary"]
    size = f"{sizes['source']:,} pieces, joint" if settings["joint"] else f"{sizes['source']:,} and {sizes['target']:,}"
    lender = f" of {record['settings']['tokenizer_from']}" if record["settings"].get("tokenizer_from") else ""
    sides = record["sides"].values()
    total = sum(sum(count["pieces"].values()) for count in sides) or 1
    shares = {what: sum(sum(count[what].values()) for count in sides) / total for what in ("bytes", "unknown")}
    return (
        f"vocabulary{lender}: {size}, {settings['kind']}, normalisation {settings['normalization']} "
        f"{'of the source' if 'normalization' in record else 'of both sides'}; "
        f"bytes {shares['bytes']:.2%} of the pieces, unknown {shares['unknown']:.2%}"
    )


def _hard_to_spell(sides: dict[str, Any]) -> list[str]:
    """The sides with many pieces that the vocabulary has no letters for; all together they would hide."""
    lines = []
    for name, side in sides.items():
        found: dict[str, dict[str, int]] = {}
        for corpus in side["corpora"]:
            for end in ("source", "target"):
                counts = found.setdefault(f"{end} of {corpus['direction']}", {"pieces": 0, "bytes": 0, "unknown": 0})
                for what in counts:
                    counts[what] += corpus[what][end]
        for which, counts in found.items():
            shares = {what: counts[what] / (counts["pieces"] or 1) for what in ("bytes", "unknown")}
            if max(shares.values()) >= NOTABLE:
                told = ", ".join(f"{what} {share:.2%}" for what, share in shares.items())
                lines.append(f"  {name}, {which}: {told}")
    return lines


def _altered(record: dict[str, Any]) -> list[str]:
    """How many targets a model cannot write as they are, with one of them; data of earlier versions did not count."""
    if "normalization" not in record:
        told = (
            "targets were normalised too, by an earlier mtkit, so that a model cannot write what that took away; "
            "--overwrite prepares them as they are"
        )
        return [told] * (record["settings"]["tokenizer"]["normalization"] != "identity")
    sides = record["sides"].items()
    corpora = ((name, corpus) for name, side in sides for corpus in side["corpora"])
    examples = [(name, line) for name, corpus in corpora if (line := corpus.get("altered_line"))]
    if not examples:
        return ["targets: all come back from their pieces, runs of spaces and spaces at the ends aside"]
    found = [f"{side['altered']:,} in {name}" for name, side in sides if side.get("altered")]
    name, example = examples[0]
    text, back = example["text"], example["back"]
    pairs = enumerate(zip(text, back, strict=False))
    differs = next((place for place, (one, other) in pairs if one != other), min(len(text), len(back)))
    begin = max(0, differs - _SHOWN // 2)
    shown = [repr("..." * (begin > 0) + each[begin : begin + _SHOWN]) for each in (text, back)]
    return [
        f"targets that do not come back from their pieces: {', '.join(found)}; as line {example['line']:,} of {name}, "
        f"{shown[0]}, which comes back as {shown[1]}"
    ]
