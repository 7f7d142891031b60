"""The page docs/choose.md: which mechanism suits which use, from the committed results."""

from collections.abc import Iterable, Sequence

from mtkit.attention.registry import mechanisms
from mtkit.experiments.pages.findings import LENGTH, LEVEL, LONG, MARGIN, Measured, long_costs, speeds
from mtkit.experiments.pages.questions import FAST, SAVING, Question, counts, letters, score, states
from mtkit.memory import in_words
from mtkit.terminal import markdown

MOST = 5
"""Maximum names in a list."""
NO_TEST = ("", "", "")
"""Cells of a row that is not a test: score of `full`, seeds, significant differences."""
LEARNED = 90.0
"""Score from which a mechanism counts as able to do the task."""
MADE = "Made by `python -m mtkit.experiments.pages.write` from [the results of the studies](../studies/README.md)."
MARKS = (
    f"- Marks: + is significantly better than `full`, - significantly worse, = with 95% confidence at most {MARGIN:g} "
    "points lower. ≡ computes the same as `full` at these lengths. Without a mark, the results do not decide."
)
LETTERS = (
    "- Letters: each mechanism was in the roles of its paper, encoder (E), decoder (D), attention to the source (C). "
    "The model had `full` in the other roles."
)


def choose_page(answers: Sequence[Question], closer: Sequence[Question], roles: Sequence[Question] = ()) -> str:
    """Return docs/choose.md, from answers to QUESTIONS, CLOSER_QUESTIONS and ROLE_QUESTIONS.

    At least the first question must be complete; `roles` may be empty.
    """
    shown = [question for question in answers if question.complete]
    parts = [
        "# Which attention?",
        "This page names the attention mechanisms that were best at each use in small studies, which compare "
        f"{len(shown[0].measured) - 1} mechanisms with `full`, the attention of the Transformer. {MADE}",
        _legend(shown),
        markdown(_answers(shown), left=(0, 1, 2)),
        "\n".join(_advice(shown, closer, roles)),
        "![Token match against the cost of a long layer, a dot per mechanism, coloured by family](choose.png)",
        "## How sure is this?",
        "\n".join(_doubts(answers, shown)),
        "## Every mechanism",
        _columns(),
        markdown(_table(shown), left=(0, 1, 2, 3)),
    ]
    return "\n\n".join(parts) + "\n"


def _legend(shown: Sequence[Question]) -> str:
    """Return the meanings of scores, marks, letters and the last columns."""
    translated = [f"`{question.head}`" for question in shown if question.column == "chrF"]
    chrf = f" (chrF in {' and '.join(translated)})" * bool(translated)
    scores = (
        f"- Scores: the percentage of words at the right position{chrf}; means over seeds. The last column has the "
        f"number of mechanisms that differ significantly from `full` ({LEVEL:.0%}, after Holm's correction)."
    )
    return "\n".join([scores, MARKS, LETTERS])


def _answers(shown: Sequence[Question]) -> list[tuple[str, ...]]:
    """Return a row per use: the best mechanisms, and the best whose cost grows less than T²."""
    rows: list[tuple[str, ...]] = [
        ("you need", "best", "best at a cost below O(T²)", "`full` (95% interval)", "seeds", "differ")
    ]
    for question in shown:
        rows.append((question.use, *_best(question.measured.values()), *_significance(question)))
    first, state = shown[0], states(shown[0])
    small = [first.measured[name] for name, size in state.items() if size <= SAVING * state["full"]]
    rows.append(
        (
            f"little memory: at most {SAVING:.0%} of the decoding state of `full` (`{first.head}`)",
            *_best(small),
            *NO_TEST,
        )
    )
    times = {name: of[LONG] for name, of in speeds().items() if LONG in of}
    sound = sorted((name for name in times if not _worse(name, shown)), key=lambda name: -times[name])[:MOST]
    fastest = ", ".join(f"`{name}` {letters(name)} {_speed(times[name])}" for name in sound) or "none"
    rows.append(
        (
            f"a layer that is fast at {LONG:,} tokens, and no - in any test; times as fast as `full`",
            "",
            fastest,
            *NO_TEST,
        )
    )
    return rows


def _significance(question: Question) -> tuple[str, str, str]:
    """Return the score of `full`, the number of seeds, and the number of significant differences."""
    full = question.measured["full"].score
    tested = [entry.score.p for entry in question.measured.values() if entry.score.p is not None]
    if full.low is None or full.high is None:  # with one seed, or the same score from all seeds
        return f"{full.mean:.1f}", _range(question), "no test"
    differing = f"{sum(p < LEVEL for p in tested)} of {len(tested)}"
    return f"{full.mean:.1f} ({full.low:.1f} to {full.high:.1f})", _range(question), differing


def _best(measured: Iterable[Measured]) -> tuple[str, str]:
    """Return the names of the best mechanisms, and of the best whose cost grows less than T²."""
    best = by_score(measured)
    cheap = [entry for entry in best if mechanisms()[entry.name].growth < 2]
    return _names(best), "the same" if cheap[:MOST] == best[:MOST] else _names(cheap)


def by_score(measured: Iterable[Measured]) -> list[Measured]:
    """Return the mechanisms, the best first."""
    return sorted(measured, key=lambda entry: -entry.score.mean)


def _names(measured: Sequence[Measured]) -> str:
    return ", ".join(f"`{entry.name}` {letters(entry.name)} {score(entry)}" for entry in measured[:MOST]) or "none"


def _worse(name: str, shown: Sequence[Question]) -> bool:
    return any(question.measured[name].mark == "-" for question in shown if name in question.measured)


def _advice(shown: Sequence[Question], closer: Sequence[Question], roles: Sequence[Question]) -> list[str]:
    """Return advice: which mechanisms to take, in which role, which leads last, and which mechanisms to avoid."""
    slow, captions, parts = closer
    first = shown[0]
    worse = {name: entry for name, entry in first.measured.items() if entry.mark == "-"}
    better = [entry for entry in first.measured.values() if entry.mark == "+"]
    lines = [
        "- **In doubt, take `full`.** Rotary positions and a convolution in the encoder improve `full` and "
        f"other mechanisms ([nearby.md](nearby.md)). On `{first.head}`, {len(better)} of the {len(first.measured) - 1} "
        "others are significantly better. In two tests or more better, and in none worse: "
        f"{_often_better(shown)}.",
        *_roles(roles),
        *_lasting(captions, parts, shown),
    ]
    lowest = [f"`{entry.name}` {entry.score.mean:.1f}" for entry in reversed(by_score(worse.values()))]
    names = ", ".join(lowest[: 2 * MOST]) + f" and {len(lowest) - 2 * MOST} more" * (len(lowest) > 2 * MOST)
    lines.append(
        f"- **Avoid for a short training**: worse than `full` on `{first.head}` are {names or 'none'} "
        "([why](slow-learners.md))."
    )
    if slow.complete:
        tried = [entry for entry in by_score(slow.measured.values()) if entry.name in worse]
        able = [entry for entry in tried if entry.score.mean >= LEARNED]
        unable = [entry for entry in tried if entry not in able]
        rest = ", ".join(f"`{entry.name}` {entry.score.mean:.1f}" for entry in unable)
        lines[-1] += (
            f" Of the {len(tried)} lowest, {len(able)} reach {LEARNED:g} after {updates(slow)} updates instead of "
            f"{updates(first)}, so they are only slow to learn; {rest or 'none'} do not."
        )
    return lines


def _roles(roles: Sequence[Question]) -> list[str]:
    """Return lines on changes of one role; none without results."""
    if not roles:
        return []
    numbers = {question.role: counts(question) for question in roles if question.column == "token"}
    worse = {role: f"{of[-1]} of {of[0]}" for role, of in numbers.items()}
    twice = [question for question in roles if question.column != "token"]
    best = max(twice, key=lambda question: by_score(question.measured.values())[0].score.mean)
    names = ", ".join(f"`{entry.name}` {score(entry)}" for entry in by_score(best.measured.values())[:MOST])
    return [
        "- **Change the attention to the source last.** On `select`, with `full` in the other roles, "
        f"{worse['decoder']} mechanisms are worse than `full` in the decoder, {worse['encoder']} in the encoder, and "
        f"{worse['cross']} in the attention to the source ([roles.md](roles.md)). `--encoder-attention` and "
        "`--decoder-attention` change one role.",
        f"- **If sources are longer than in training**: the best on `select 2x`, in the {best.role} only, are {names}; "
        f"`full` has {best.measured['full'].score.mean:.1f}. The papers of some do not have this role "
        "([roles.md](roles.md)).",
    ]


def _lasting(captions: Question, parts: Question, shown: Sequence[Question]) -> list[str]:
    """Return a line on the captions' best after longer training, and on a part of one; none without results."""
    original = _original(captions, shown)
    if original is None:
        return []
    names = [entry.name for entry in by_score(captions.measured.values()) if entry.name != "full"]
    leads = ", ".join(f"`{name}` {_lead(captions, name):+.1f} ({_lead(original, name):+.1f})" for name in names)
    return [
        f"- **Does the lead on `{captions.head}` last?** After {updates(captions)} updates instead of "
        f"{updates(original)}, `full` has {captions.measured['full'].score.mean:.1f} chrF. The leads are, in brackets "
        f"after {updates(original)}: {leads} ({seeds(captions)}).{_part(parts, shown)}"
    ]


def _part(parts: Question, shown: Sequence[Question]) -> str:
    """Return sentences on `nystrom` without its convolution; "" without results."""
    original = _original(parts, shown)
    if original is None:
        return ""
    without, whole, full = parts.measured["nystrom"], original.measured["nystrom"], parts.measured["full"]
    return (
        f" Without the convolution of its values (`{without.entry}`), `nystrom` computes what `full` does in segments "
        f"of up to 64 tokens. After {updates(original)} updates it then has {without.score.mean:.1f} chrF, with the "
        f"convolution {whole.score.mean:.1f}; `full` has {full.score.mean:.1f} ({seeds(parts)}). "
        "[nearby.md](nearby.md) has the same for `documents`, and adds this convolution to other mechanisms."
    )


def _original(closer: Question, shown: Sequence[Question]) -> Question | None:
    """Return the question of the page that a complete closer one is about; None if one of them has no results."""
    return next((question for question in shown if closer.complete and question.head == closer.head), None)


def _lead(question: Question, name: str) -> float:
    """Return how many points a mechanism is above `full`."""
    return question.measured[name].score.mean - question.measured["full"].score.mean


def _often_better(shown: Sequence[Question]) -> str:
    """Return the mechanisms that are better than `full` in two questions or more and worse in none."""
    names = []
    for name in shown[0].measured:
        heads = [f"`{each.head}`" for each in shown if name in each.measured and each.measured[name].mark == "+"]
        if len(heads) > 1 and not _worse(name, shown):
            names.append(f"`{name}` {letters(name)} ({', '.join(heads)})")
    return "; ".join(names) or "none"


def updates(question: Question) -> str:
    """Return the number of updates in a question's trainings."""
    return f"{next(iter(question.measured.values())).rows[0]['training']['updates']:,}"


def seeds(question: Question) -> str:
    """Return the number of seeds: "2 seeds", "1 to 3 seeds"."""
    return f"{_range(question)} seed" + "s" * (max(question.seeds) > 1)


def _range(question: Question) -> str:
    """Return the fewest and the most seeds of a mechanism: "2", "1 to 3"."""
    return " to ".join(map(str, sorted({min(question.seeds), max(question.seeds)})))


def _doubts(answers: Sequence[Question], shown: Sequence[Question]) -> list[str]:
    first = shown[0]
    lines = [
        f"- {_heads([question for question in shown if question.study == first.study])}: {_trained(first)}, one "
        f"learning rate ([{first.study}.yaml](../studies/{first.study}.yaml)). Sources are about 30 times shorter than "
        "documents, and windows, blocks, strides and ranks are smaller too. These models show what an attention "
        "learns, and how soon, not the quality of translations. A mechanism that needs another rate or size is better "
        "than it looks here."
    ]
    lines += [
        f"- {_heads([question])}: {_trained(question)}; {_options(question)} "
        f"([{question.study}.yaml](../studies/{question.study}.yaml)).{_unequal(question)}"
        for question in shown
        if question.study != first.study
    ]
    untested = [question for question in shown if max(question.seeds) == 1]
    lines += [f"- {_heads(untested)}: no test with one seed; differences of a few points may be chance."] * bool(
        untested
    )
    missing = [
        f"{question.use}, {sum(len(entry.rows) for entry in question.measured.values())} trainings of {question.total} "
        f"entries (`mtkit compare --study {question.study}`{_minutes(question, shown)})"
        for question in answers
        if not question.complete
    ]
    lines += [f"- Not measured yet: {'; '.join(missing)}."] * bool(missing)
    return [
        *lines,
        "- Tests and intervals compare seeds, with one variance for all mechanisms "
        "([how](compare-statistics.md#many-entries-with-few-seeds)). [claims.md](claims.md) compares the claim of each "
        "paper with these results; [cost.md](cost.md) has speed and memory "
        "with equal work at 4,096 and 16,384 tokens, in the decoder too.",
    ]


def _options(question: Question) -> str:
    """Return which options a question's mechanisms have."""
    other = [f"`{entry.entry}`" for entry in question.measured.values() if entry.entry != entry.name]
    return "the mechanisms have their default options" + f", except {' and '.join(other)}" * bool(other)


def _unequal(question: Question) -> str:
    """Return how many mechanisms have how many seeds; "" if all have the same number."""
    if len(question.seeds) == 1:
        return ""
    numbers = (f"{seeds} seed" + "s" * (seeds > 1) + f": {count} mechanisms" for seeds, count in question.seeds.items())
    return f" {', '.join(numbers)}."


def _heads(questions: Sequence[Question]) -> str:
    return ", ".join(f"`{question.head}`" for question in questions)


def _trained(question: Question) -> str:
    """Return the size of a question's models and of their training."""
    row = next(iter(question.measured.values())).rows[0]
    model, training = row["recipe"]["model"], row["recipe"]["training"]
    return (
        f"{len(question.measured)} mechanisms in models of width {model['d_model']} with {model['encoder_layers']} + "
        f"{model['decoder_layers']} layers, {updates(question)} updates of {training['optimizer'].title()} with "
        f"{training['batch_tokens']:,} tokens per batch"
    )


def _minutes(question: Question, shown: Sequence[Question]) -> str:
    """Return the time of one seed, if the first question is of the same study: the shortest times of its trainings."""
    if question.study != shown[0].study:
        return ""
    minutes = sum(min(row["minutes"] for row in entry.rows) for entry in shown[0].measured.values())
    return f"; a seed of all takes about {minutes:.0f} minutes of a free core"


def _columns() -> str:
    return (
        f"- Cost: growth with the length T. FLOPs: one layer at {LENGTH:,} tokens with default "
        "options, counted, relative to `full`.\n"
        "- Speed: forward and backward pass of a layer relative to `full`, so 2 is twice as fast; processor time of "
        "one thread of an AMD EPYC in float32, in the encoder, or in the decoder for mechanisms without that role. -: "
        "needs more than 9 GiB. On other machines `full` may be twice as fast.\n"
        "- State: memory that decoding keeps per hypothesis after 100 tokens, in the models of `select`. "
        "`mtkit attentions` lists mechanisms without a - as good at long texts if their speed at "
        f"{LONG:,} tokens is at least {FAST:g}, and at small state if it is at most {SAVING:.0%} of `full`'s."
    )


def _table(shown: Sequence[Question]) -> list[tuple[str, ...]]:
    first, long, state, times = shown[0].measured, long_costs(), states(shown[0]), speeds()
    lengths = sorted({length for of in times.values() for length in of})
    heads = (*(question.head for question in shown), f"FLOPs at {LENGTH:,}", *(f"speed at {n:,}" for n in lengths))
    rows = [("attention", "family", "roles", "cost", *heads, "state")]
    for entry in by_score(first.values()):
        mechanism = mechanisms()[entry.name]
        scores = [score(question.measured.get(entry.name)) for question in shown]
        cost = f"{long[entry.name]:.2f}" if entry.name in long else "-"
        fast = [_speed(times.get(entry.name, {}).get(length)) for length in lengths]
        memory = in_words(round(state[entry.name])) if entry.name in state else "-"
        names = (f"`{entry.name}`", mechanism.family, letters(entry.name), mechanism.complexity)
        rows.append((*names, *scores, cost, *fast, memory))
    return rows


def _speed(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
