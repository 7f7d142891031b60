"""A run folder as training leaves it, with prepared data beside it; its small model is initialised, not trained."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe
from mtkit.runs import FORMAT, Run

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


def make_run(folder: Path, *, test_side: bool = True, seed: int = 1) -> Trained:
    """The run `folder`/mtkit-runs/one and its data `folder`/mtkit-data."""
    folder.mkdir(exist_ok=True)
    text: dict[str, dict[str, str]] = {}
    for number, side in enumerate(("train", "valid", "test") if test_side else ("train", "valid")):
        text[side] = {}
        for language in ("source", "target"):
            path = folder / f"{side}.{language}"
            path.write_text("".join(f"{line}\n" for line in sentences(200 if side == "train" else 7, 2 * number)))
            text[side][language] = str(path)
    recipe = make_recipe(
        {
            "seed": seed,
            "data": {"folder": str(folder / "mtkit-data"), **text, "tokenizer": {"vocabulary": 400}},
            "model": {"d_model": 32, "heads": 2, "feed_forward": 32, "max_length": LONGEST, "dropout": 0.0},
            "decoding": {"beam": 3},
        }
    )
    prepare(recipe.data)
    prepared = open_prepared(recipe.data.folder)
    sizes = {side: getattr(prepared.tokenizers, side).size for side in ("source", "target")}
    model = build_model(recipe, source_vocabulary=sizes["source"], target_vocabulary=sizes["target"])
    with torch.no_grad():  # sharper than initialised, so that hypotheses differ by more than rounding
        for name, value in model.named_parameters():
            value.mul_(3.0 if "tokens" in name else 1.5)
    run = folder / "mtkit-runs" / "one"
    checkpoint = run / "checkpoints" / "update-00000010"
    checkpoint.mkdir(parents=True)
    (run / "tokenizer").mkdir()
    for each in (recipe.data.folder / "tokenizer").glob("*.model"):
        (run / "tokenizer" / each.name).write_bytes(each.read_bytes())
    (run / "recipe.yaml").write_text(recipe.model_dump_json())
    about = {"format": FORMAT, "vocabularies": sizes, "data": prepared.fingerprint}
    (run / "run.json").write_text(json.dumps(about))
    save_file({name: value.clone() for name, value in model.state_dict().items()}, checkpoint / "model.safetensors")
    return Trained(Run(run), prepared)
