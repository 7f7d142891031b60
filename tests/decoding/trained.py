"""A run folder as training leaves it, with prepared data beside it; its small model is initialised, not trained."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding.lines.source import source_budget
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe
from mtkit.runs import FORMAT, Run
from mtkit.training.checkpoint import write_checkpoint

LONGEST = 24
"""Pieces that the model takes."""

NOUNS = ["house", "tree", "dog", "cat", "bird", "friend", "river"]
WORDS = [*NOUNS, "the", "a", "small", "old", "green", "red", "sees", "finds", "likes", "and", "under", "near", "one"]


@dataclass
class Trained:
    run: Run
    prepared: Prepared


def sentences(count: int, seed: int) -> list[str]:
    """Random sentences of 2 to 6 words, long enough for a tokenizer to learn from."""
    generator = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    return [" ".join(WORDS[draw(len(WORDS))] for _ in range(2 + draw(5))).capitalize() + "." for _ in range(count)]


def make_run(
    folder: Path,
    *,
    name: str = "one",
    test_side: bool = True,
    seed: int = 1,
    directions: tuple[str, ...] = (),
    documents: int | None = None,
    sides: tuple[str, ...] = ("test",),
    attention: str = "full",
    architecture: str = "transformer",
    feed_forward: int = 32,
    vocabulary: int = 400,
    text: int = 0,
) -> Trained:
    """The run `folder`/mtkit-runs/`name` and its data `folder`/mtkit-data, made unless it is there.

    Each of `directions` has training, validation and test text of its own. `documents` is the piece budget of rows of
    lines that blank lines part. `sides` are the test sides. Another `text` draws other lines.
    `attention` is the encoder's, and in an rnn that to the source.
    """
    folder.mkdir(exist_ok=True)
    how = (directions, documents is not None, text)
    corpora = {side: _corpora(folder, side, *how) for side in ("train", "valid")}
    tests = {side: _corpora(folder, side, *how) for side in sides} if test_side else {}
    recipe = make_recipe(
        {
            "seed": seed,
            "data": {
                "folder": str(folder / "mtkit-data"),
                **corpora,
                "test": tests,
                "tokenizer": {"vocabulary": vocabulary},
                "documents": documents and {"pieces": documents},
            },
            "model": {
                "architecture": architecture,
                "d_model": 32,
                "heads": 2,
                "feed_forward": feed_forward,
                "max_length": LONGEST,
                "dropout": 0.0,
            },
            "attention": {"encoder" if architecture == "transformer" else "cross": attention},
            "decoding": {"beam": 3},
        }
    )
    prepare(recipe.data)
    prepared = open_prepared(recipe.data.folder)
    sizes = {side: getattr(prepared.tokenizers, side).size for side in ("source", "target")}
    model = build_model(
        recipe,
        source_vocabulary=sizes["source"],
        target_vocabulary=sizes["target"],
        tasks=len(prepared.directions),
    )
    with torch.no_grad():  # sharper than initialised, so that hypotheses differ by more than rounding
        for parameter, value in model.named_parameters():
            value.mul_(3.0 if "tokens" in parameter else 1.5)
    run = folder / "mtkit-runs" / name
    checkpoint = run / "checkpoints" / "update-00000010"
    (run / "tokenizer").mkdir(parents=True)
    for each in (recipe.data.folder / "tokenizer").glob("*.model"):
        (run / "tokenizer" / each.name).write_bytes(each.read_bytes())
    (run / "recipe.yaml").write_text(recipe.model_dump_json())
    about = {
        "format": FORMAT,
        "vocabularies": sizes,
        "data": prepared.fingerprint,
        "directions": prepared.directions,
        "document_pieces": source_budget(prepared),
    }
    (run / "run.json").write_text(json.dumps(about))
    write_checkpoint(checkpoint, {"model": model.state_dict()}, {"update": 10})
    return Trained(Run(run), prepared)


def _corpora(folder: Path, side: str, directions: tuple[str, ...], documents: bool, text: int) -> list[dict[str, str]]:
    """The text of a side, in each direction, as a recipe names it."""
    corpora = []
    for number, direction in enumerate(directions or (None,)):
        corpus = {"source": f"{side}.source", "target": f"{side}.target"}
        if direction is not None:
            corpus = {key: f"{value}.{direction}" for key, value in corpus.items()} | {"direction": direction}
        lines = sentences(200 if side == "train" else 7, {"train": 0, "valid": 2}.get(side, 4) + 10 * number + text)
        if documents:
            lines[3::4] = [""] * len(lines[3::4])
            corpus["documents"] = "empty-lines"
        for key in ("source", "target"):
            path = folder / corpus[key]
            path.write_text("".join(f"{line}\n" for line in lines))
            corpus[key] = str(path)
        corpora.append(corpus)
    return corpora


@contextmanager
def three_threads() -> Iterator[None]:
    """Inside, PyTorch has as many, so that several batches are worked on at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(before)
