"""The result of `prepare` as a compact table."""

from collections.abc import Sequence
from typing import Any, cast

from mtkit.data.cleaning import REASONS
from mtkit.data.place import CONTRASTIVE
from mtkit.data.prepare import Report
from mtkit.data.prepared import open_prepared
from mtkit.data.sides import RARE
from mtkit.terminal import aligned, stdout_width
from mtkit.text.languages import has_spaces, languages_of

FEW = 100
"""Lines of a validation or test side below which there is a warning."""

NOTABLE = 0.001
"""Minimum share of byte or unknown pieces for a side to be listed, and of odd lines for a warning."""

_PLACES = 6
"""Maximum texts in a warning."""

_SHOWN = 60
"""Maximum characters of a target that are shown."""


def summary(report: Report, max_length: int) -> str:
    """Return a table of sides with their segments, words and pieces, left-out pairs by reason, and the vocabulary.

    `max_length`: the tokens that the model can take, end mark counted; training leaves longer pairs out.
    """
    record, folder = cast(dict[str, Any], report.record), report.folder
    settings = record["settings"]
    directions = [*{corpus["direction"] for side in record["sides"].values() for corpus in side["corpora"]}]
    ends = _languages(directions[0], settings) if len(directions) == 1 else ("source", "target")
    if report.unchanged:
        head = f"{folder} is up to date: the same settings and the same text were prepared before"
    else:
        head = f"{folder} prepared in {record['seconds']:.1f} s"
    rows = [("", "segments", *(f"{what} {end}" for what in ("words", "pieces", "pieces/word") for end in ends))]
    for name, side in record["sides"].items():
        rows += _rows(name, side, settings)
    parts = [
        head,
        *report.notes,
        "",
        aligned(rows, width=stdout_width()),
        "",
        *_cleaning(record["sides"]),
        *_repairs(record["inputs"]),
    ]
    parts += [*_oddities(record), *_too_small(record)]
    if documents := settings["documents"]:
        joins = (
            "fills rows with their segments" if documents["whole"] else "joins their segments differently each epoch"
        )
        parts.append(f"documents: training {joins}, up to {documents['pieces']:,} pieces")
    if (folder / CONTRASTIVE).is_file():
        parts.append(f"contrastive pairs of the test sides, with their context: {folder / CONTRASTIVE}")
    too_long = open_prepared(folder).train.too_long(max_length)
    parts.append(f"also left out of training: {too_long:,} too long (over {max_length:,} pieces with the end mark)")
    parts += [_vocabulary(record), *_too_large(record), *_hard_to_spell(record["sides"]), *_altered(record)]
    return "\n".join(parts)


def _rows(name: str, side: dict[str, Any], settings: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the row of a side, and the rows of its directions and of its corpora if there are several."""
    corpora = side["corpora"]
    directions = list(dict.fromkeys(corpus["direction"] for corpus in corpora))
    rows = [_row(name, side, directions, settings)]
    if len(directions) > 1:
        for direction in directions:
            members = [corpus for corpus in corpora if corpus["direction"] == direction]
            counts: dict[str, Any] = {"segments": sum(corpus["segments"] for corpus in members)}
            for what in ("words", "pieces"):
                counts[what] = {end: sum(corpus[what][end] for corpus in members) for end in ("source", "target")}
            rows.append(_row(f"  {direction}", counts, [direction], settings))
    if len(corpora) > 1:
        described = settings[name] if name in ("train", "valid") else settings["test"][name]
        for number, (counts, corpus) in enumerate(zip(corpora, described, strict=True), start=1):
            weight = f", weight {corpus['weight']:g}" if name == "train" and corpus["weight"] != 1 else ""
            rows.append(_row(f"  corpus {number}{weight}", counts, [counts["direction"]], settings))
    return rows


def _row(name: str, counts: dict[str, Any], directions: Sequence[str], settings: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of counts in these directions; no words if one of a side's languages has no spaces between them."""
    words, pieces, ratios = [], [], []
    for place, side in enumerate(("source", "target")):
        spaced = all(has_spaces(_languages(direction, settings)[place]) for direction in directions)
        words.append(f"{counts['words'][side]:,}" if spaced else "-")
        pieces.append(f"{counts['pieces'][side]:,}")
        ratios.append(f"{counts['pieces'][side] / max(counts['words'][side], 1):.2f}" if spaced else "-")
    return (name, f"{counts['segments']:,}", *words, *pieces, *ratios)


def _languages(direction: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Return source and target of a direction; the languages of the settings may contain hyphens."""
    languages = (settings["source_language"], settings["target_language"])
    return languages if direction == "-".join(languages) else languages_of(direction)


def _cleaning(sides: dict[str, Any]) -> list[str]:
    """Return the unusual pairs of each side by reason, and how many of them training leaves out."""
    rows = [
        (
            what,
            *(f"{side['found'].get(reason, 0):,}" for side in sides.values()),
            f"{sides['train']['left_out'].get(reason, 0):,}",
        )
        for reason, what in REASONS.items()
        if any(side["found"].get(reason) for side in sides.values())
    ]
    if rows:
        head = ("cleaning: pairs", *(f"in {name}" for name in sides), "left out of train")
        lines = aligned([head, *rows], width=stdout_width()).split("\n")
    else:
        lines = [
            "cleaning: no pair is empty, a duplicate, in a held-out side, the same on both sides or out of proportion"
        ]
    for name, side in sides.items():
        for number, corpus in enumerate(side["corpora"], start=1):
            if line := corpus["suspicious_line"]:
                which = f"corpus {number} of {name}" if len(side["corpora"]) > 1 else name
                lines.append(f"warning: the sides of {which} seem not to match from about line {line:,}; look there")
    return [*lines, ""]


def _oddities(record: dict[str, Any]) -> list[str]:
    """Return a line per sign of damaged or processed text: the lines that have it in each text, and advice.

    It is a warning if one line in a thousand of a text has the sign. Lines in quotes are a sign if most lines have it.
    """
    keeps = record["settings"]["tokenizer"]["normalization"] == "identity"
    source = "are kept (--normalization identity)" if keeps else "are dropped or become spaces"
    kinds = {
        "entities": "HTML entities, as &amp;: unescape them",
        "wrongly_decoded": "characters of a wrong decoding, as Ã¤ or U+FFFD: decode the original text as UTF-8",
        "invisible": f"control or invisible characters: in sources they {source}, in targets a model learns them",
        "doubled_quotes": "quotes around and doubled within them, as CSV has them: export without quotes",
        "quoted": "quotes around them, as CSV has them: export without quotes",
        "subword_marks": "@@ between pieces of words: give plain text (sed 's/@@ //g'), which prepare cuts itself",
    }
    lines = []
    for kind, advice in kinds.items():
        counts = [
            (count, side, name, first, count >= NOTABLE * text["lines"])
            for name, text in record["inputs"].items()
            for side, (count, first) in text.get("oddities", {}).get(kind, {}).items()
            if kind != "quoted" or count > text["lines"] / 2
        ]
        places = [
            f"{count:,} {side} lines of {name} (from line {first:,} on)" for count, side, name, first, _ in counts
        ]
        if places:
            level = "warning" if any(notable for *_, notable in counts) else "note"
            more = f" and of {len(places) - _PLACES} more texts" if len(places) > _PLACES else ""
            lines.append(f"{level}: {', '.join(places[:_PLACES])}{more} have {advice}")
    return lines


def _too_small(record: dict[str, Any]) -> list[str]:
    """Return a warning about validation and test sides of few lines, unless mtkit wrote them."""
    sides = record["sides"].items() if record["settings"]["train"] else ()
    counts = {name: side["segments"] for name, side in sides if name != "train" and side["segments"] < FEW}
    few = ", ".join(f"{name} has {count} line{'s' * (count != 1)}" for name, count in counts.items())
    return [f"warning: {few}; scores of fewer than {FEW} lines vary much, so give more"] if few else []


def _too_large(record: dict[str, Any]) -> list[str]:
    """Return a warning about each vocabulary most of whose pieces are rare and dispensable, if a smaller one exists.

    Single characters are not dispensable: without their pieces they would be bytes.
    """
    settings = record["settings"]
    if settings.get("tokenizer_from") or settings["tokenizer"]["kind"] == "words":  # fewer words would be more bytes
        return []
    lines = []
    for name, use in record["sides"]["train"].get("use", {}).items():
        enough, size = -(-use["enough"] // 8) * 8, record["vocabulary"]["target" if name == "target" else "source"]
        if use["rare"] > use["used"] / 2 and enough < size:
            lines.append(
                f"warning: the {name} vocabulary is large for this text: of the {use['used']:,} pieces in the text, "
                f"{use['rare']:,} have several characters and occur fewer than {RARE} times; try --vocabulary {enough} "
                "(data.tokenizer.vocabulary)"
            )
    return lines


def _repairs(inputs: dict[str, Any]) -> list[str]:
    """Return the repairs of the text, and the characters that look like line ends but are kept, in one line."""
    names = {
        "carriage_returns": "carriage returns at line ends dropped",
        "byte_order_marks": "byte order marks dropped",
        "inner_newlines": "newlines within a field made spaces",
        "low_scores": "pairs with a score below least_score left out",
        "inner_carriage_returns": "carriage returns within lines",
        "line_separators": "U+2028 and U+2029 within lines",
    }
    counts = {name: sum(text.get(name, 0) for text in inputs.values()) for name in names}
    repairs = [f"{number:,} {names[name]}" for name, number in counts.items() if number]
    return [f"text: {', '.join(repairs)}"] if repairs else []


def _vocabulary(record: dict[str, Any]) -> str:
    settings, sizes = record["settings"]["tokenizer"], record["vocabulary"]
    size = f"{sizes['source']:,} pieces, joint" if settings["joint"] else f"{sizes['source']:,} and {sizes['target']:,}"
    origin = f" of {record['settings']['tokenizer_from']}" if record["settings"].get("tokenizer_from") else ""
    sides = record["sides"].values()
    total = sum(sum(counts["pieces"].values()) for counts in sides) or 1
    shares = {what: sum(sum(counts[what].values()) for counts in sides) / total for what in ("bytes", "unknown")}
    return (
        f"vocabulary{origin}: {size}, {settings['kind']}, normalisation {settings['normalization']} of the source; "
        f"bytes {shares['bytes']:.2%} of the pieces, unknown {shares['unknown']:.2%}"
    )


def _hard_to_spell(sides: dict[str, Any]) -> list[str]:
    """Return a line per side and direction with many byte or unknown pieces, which the total would hide."""
    lines = []
    for name, side in sides.items():
        totals: dict[str, dict[str, int]] = {}
        for corpus in side["corpora"]:
            for end in ("source", "target"):
                counts = totals.setdefault(f"{end} of {corpus['direction']}", {"pieces": 0, "bytes": 0, "unknown": 0})
                for what in counts:
                    counts[what] += corpus[what][end]
        for which, counts in totals.items():
            shares = {what: counts[what] / (counts["pieces"] or 1) for what in ("bytes", "unknown")}
            if max(shares.values()) >= NOTABLE:
                listed = ", ".join(f"{what} {share:.2%}" for what, share in shares.items())
                lines.append(f"  {name}, {which}: {listed}")
    return lines


def _altered(record: dict[str, Any]) -> list[str]:
    """Return how many targets a model cannot write unchanged, with an example."""
    sides = record["sides"].items()
    corpora = ((name, corpus) for name, side in sides for corpus in side["corpora"])
    examples = [(name, line) for name, corpus in corpora if (line := corpus["altered_line"])]
    if not examples:
        return ["targets: all can be decoded from their pieces, except runs of spaces and spaces at the ends"]
    counts = [f"{side['altered']:,} in {name}" for name, side in sides if side["altered"]]
    name, example = examples[0]
    text, decoded = example["text"], example["back"]
    pairs = enumerate(zip(text, decoded, strict=False))
    differs = next((place for place, (one, other) in pairs if one != other), min(len(text), len(decoded)))
    begin = max(0, differs - _SHOWN // 2)
    shown = [repr("..." * (begin > 0) + line[begin : begin + _SHOWN]) for line in (text, decoded)]
    return [
        f"targets that decoding their pieces alters: {', '.join(counts)}; as line {example['line']:,} of {name}, "
        f"{shown[0]}, which becomes {shown[1]}"
    ]
