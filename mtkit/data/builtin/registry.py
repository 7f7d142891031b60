"""The built-in tasks by name, and their sides, drawn from a seed."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtkit.data.builtin import counting, discourse, nested, recall, sequences
from mtkit.data.builtin.corpus import corpus
from mtkit.data.builtin.discourse import Document, DocumentTask, side_distances
from mtkit.data.builtin.task import BuiltinTask, Value
from mtkit.errors import DataError, RecipeError, did_you_mean, shown
from mtkit.recipe.data import DataSettings
from mtkit.recipe.task import TaskSettings
from mtkit.terminal import aligned, stdout_width

TASKS: dict[str, BuiltinTask] = {
    task.name: task for module in (sequences, recall, counting, nested, discourse) for task in module.TASKS
}
"""All tasks, in the order of the list."""

_ATTEMPTS = 1_000
"""Draws in a row without a new source after which a side gives up."""


class TextPair(NamedTuple):
    """One segment."""

    source: str
    target: str
    document: str | None = None
    """Id of its document; None if segments are independent."""


@dataclass(frozen=True)
class BuiltinSide:
    """One side of a built-in corpus."""

    size: int | None
    """Segments; None if the number is unknown before they are drawn."""
    draw: Callable[[], Iterator[TextPair]]
    """Iterates over the segments from the start."""
    contrastive: Callable[[], Iterator[dict[str, Any]]] = lambda: iter(())
    """Iterates over the contrastive pairs of a test side, which only document tasks have."""


def find_task(name: str) -> BuiltinTask:
    """Return the task of that name. Raises: RecipeError with a similar name and the list."""
    if name not in TASKS:
        hint = did_you_mean(name, list(TASKS))
        raise RecipeError(f"no task {shown(name)}{hint}; `mtkit tasks` lists: {', '.join(TASKS)}")
    return TASKS[name]


def builtin_sides(settings: DataSettings) -> dict[str, BuiltinSide]:
    """Return the sides of the built-in corpus or task, train, valid and the test sides.

    Raises: RecipeError for an unknown task, and for a wrong option or length. The functions of the sides raise
    DataError if the task has too few different sources.
    """
    if settings.task is not None:
        return _task_sides(settings.task, distinct=settings.cleaning.overlap)

    def texts(side: str) -> Callable[[], Iterator[TextPair]]:
        return lambda: (TextPair(segment.source, segment.target) for segment in drawn[side]())

    drawn = corpus(settings.builtin)
    return {side: BuiltinSide(getattr(settings.builtin, side), texts(side)) for side in drawn}


def side_lengths(settings: TaskSettings) -> dict[str, Sequence[int]]:
    """Return the lengths of each side. Raises: RecipeError as `builtin_sides`."""
    task = find_task(settings.name)
    options = task.resolve(settings.options)
    longest = settings.longest or max(task.lengths[1], settings.shortest or 0)
    shortest = settings.shortest or min(task.lengths[0], longest)
    if shortest > longest:
        raise RecipeError(f"data.task.shortest = {shortest:,} exceeds data.task.longest = {longest:,}")
    if shortest < task.minimum:
        raise RecipeError(
            f"data.task.shortest = {shortest}: the task {task.name} needs {task.minimum} {task.unit} or more"
        )
    if isinstance(task, DocumentTask):
        lengths = side_distances(shortest, longest, settings.longer)
    else:
        usual = range(shortest, longest + 1)
        lengths = {"train": usual, "valid": usual, "test": usual}
        for before, multiple in zip((1, *settings.longer), settings.longer, strict=False):
            lengths[f"test-{multiple}x"] = range(before * longest + 1, multiple * longest + 1)
    if fault := task.check(options, max(side[-1] for side in lengths.values())):
        raise RecipeError(f"the task {task.name}: {fault}")
    return lengths


def _task_sides(settings: TaskSettings, *, distinct: bool) -> dict[str, BuiltinSide]:
    """Return the sides of a task; with `distinct`, held-out sources are different, and none is in training."""
    task, lengths = find_task(settings.name), side_lengths(settings)
    options, taken = task.resolve(settings.options), set[str]()
    documents = isinstance(task, DocumentTask)
    distinct = distinct or documents

    def new(side: str, size: int) -> Iterator[TextPair | Document]:
        """Yield `size` pairs or documents whose sources are not held out; repeat sources in training only."""
        random_, failed = random.Random(f"{settings.seed} {task.name} {side}"), 0
        while size:
            drawn = _draw(task, random_, options, lengths[side])
            if not distinct or drawn.source not in taken:
                size, failed = size - 1, 0
                yield drawn
            elif (failed := failed + 1) == _ATTEMPTS:
                raise DataError(
                    f"the task {task.name} has too few different sources of {lengths[side][0]:,} to "
                    f"{lengths[side][-1]:,} {task.unit}: lower data.task.test and data.task.valid, raise "
                    "data.task.longest, or allow repeats (--keep-overlap, data.cleaning.overlap: false)"
                )

    def held_out(side: str, size: int) -> BuiltinSide:
        items = []
        for drawn in new(side, size):
            taken.add(drawn.source)
            items.append(drawn)
        return BuiltinSide(
            None if documents else size,
            lambda: _segments(items),
            lambda: (drawn.contrastive() for drawn in items if isinstance(drawn, Document) and side != "valid"),
        )

    sizes = {side: settings.valid if side == "valid" else settings.test for side in lengths if side != "train"}
    sides = {side: held_out(side, size) for side, size in sizes.items()}
    train = BuiltinSide(None if documents else settings.train, lambda: _segments(new("train", settings.train)))
    return {"train": train, **sides}


def _segments(drawn: Iterable[TextPair | Document]) -> Iterator[TextPair]:
    """Yield pairs, and each sentence of documents."""
    for number, item in enumerate(drawn, start=1):
        if isinstance(item, TextPair):
            yield item
        else:
            document = f"{item.dependency.kind}-{item.distance}-{number}"
            yield from (TextPair(source, target, document) for source, target in item.sentences)


def _draw(
    task: BuiltinTask, random_: random.Random, options: Mapping[str, Value], lengths: Sequence[int]
) -> TextPair | Document:
    if isinstance(task, DocumentTask):
        return task.draw(random_, options, lengths)
    source, target = task.generate(random_, options, random_.randint(lengths[0], lengths[-1]))
    return TextPair(" ".join(source), " ".join(target))


def table() -> str:
    """Return the list of tasks for the terminal."""
    rows = [("task", "what it asks", "lengths", "probes")]
    for task in TASKS.values():
        rows.append((task.name, task.summary, f"{task.lengths[0]}-{task.lengths[1]} {task.unit}", task.probes))
    return aligned(rows, left=range(4), width=stdout_width())


def describe(name: str) -> str:
    """Return one task with its options and an example. Raises: RecipeError for an unknown name."""
    task = find_task(name)
    options = task.resolve({})
    example = TextPair(*map(" ".join, task.generate(random.Random(1), options, task.lengths[0])))
    rows = [(f"  {key}", str(option.default), option.values, option.about) for key, option in task.options.items()] or [
        ("  none", "", "", "")
    ]
    lines = [
        f"{task.name}: {task.summary}",
        f"probes: {task.probes}",
        f"lengths: {task.lengths[0]} to {task.lengths[1]} {task.unit} in training",
        *([f"paper: {task.paper}"] if task.paper else []),
        f"example: {example.source} -> {example.target}",
        "options (--task-option KEY=VALUE, data.task.options):",
        aligned(rows, left=range(4), width=stdout_width()),
    ]
    return "\n".join(lines)
