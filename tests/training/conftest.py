from pathlib import Path
from typing import Any

from mtkit.data.prepared import Prepared
from mtkit.recipe import Recipe, make_recipe, merged
from mtkit.training.progress import Outcome
from mtkit.training.train import train

TINY: dict[str, Any] = {
    "model": {"d_model": 16, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.2},
    "training": {
        "batch_tokens": 200,
        "max_updates": 24,
        "validate_every": 8,
        "validate_segments": 4,
        "log_every": 4,
        "warmup_updates": 5,
        "peak_rate": 0.01,
        "ema": 0.9,
        "precision": "float32",  # auto would be what is faster just now
    },
    "decoding": {"method": "greedy", "max_pieces": 10},
}


def tiny(**groups: dict[str, Any]) -> Recipe:
    """A recipe that trains in a second, dropout and moving average on, with these groups laid over it."""
    return make_recipe(merged(TINY, groups))


def run(recipe: Recipe, prepared: Prepared, folder: Path, **options: Any) -> Outcome:
    """Trains on the CPU."""
    return train(recipe, prepared, folder, command=["mtkit", "train", "it's"], device="cpu", **options)
