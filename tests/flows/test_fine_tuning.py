"""Fine-tuning is worth it: a run trained on sentences, trained on with documents, against a start from nothing."""

from pathlib import Path
from typing import Any

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.recipe import make_recipe
from mtkit.recipe.data import DataSettings
from mtkit.training.metrics import read_metrics
from mtkit.training.train import train

MODEL = {"d_model": 32, "heads": 4, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}


def learned(
    place: Path, name: str, prepared: Prepared, updates: int, attention: str = "full", **training: Any
) -> list[float]:
    """The validation losses of a run of that name."""
    settings = {
        "batch_tokens": 1_000,
        "max_updates": updates,
        "validate_every": 20,
        "validate_segments": 1,
        "warmup_updates": 20,
        "peak_rate": 5e-3,
        "precision": "float32",
        **training,
    }
    recipe = make_recipe(
        {
            "model": MODEL,
            "attention": {"name": attention},
            "training": settings,
            "decoding": {"method": "greedy", "max_pieces": 4},
        }
    )
    train(recipe, prepared, place / name, command=["mtkit"], device="cpu")
    return [row["nll"] for row in read_metrics(place / name / "metrics.jsonl") if row["kind"] == "validation"]


def data(place: Path, name: str, **more: Any) -> Prepared:
    prepare(DataSettings.model_validate({"folder": place / name, **more}))
    return open_prepared(place / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run that was trained on sentences, and documents in its pieces."""
    place, grammar = tmp_path_factory.mktemp("tuning"), {"train": 1_500, "valid": 20, "test": 5}
    learned(place, "base", data(place, "sentences", builtin=grammar, tokenizer={"vocabulary": 400}), 120)
    data(place, "documents", tokenizer_from=place / "base", builtin={**grammar, "sentences": 2, "seed": 5})
    return place


@pytest.fixture(scope="module")
def random(place: Path) -> list[float]:
    return learned(place, "random", open_prepared(place / "documents"), 60, "longformer")


ADAPTERS = {"rank": 8, "targets": ["query", "key", "value", "output", "feed_forward"]}


@pytest.mark.parametrize(("name", "how"), [("whole", {}), ("adapters", {"lora": ADAPTERS, "peak_rate": 2e-2})])
def test_the_loss_falls_from_the_first_validation_and_lies_below_that_of_a_random_start(
    name: str, how: dict[str, Any], place: Path, random: list[float]
) -> None:
    documents = open_prepared(place / "documents")
    tuned = learned(place, name, documents, 60, "longformer", init_from=str(place / "base"), **how)
    assert tuned[0] > tuned[1] > tuned[2]
    assert all(one < other - 0.1 for one, other in zip(tuned, random, strict=True)), (tuned, random)
