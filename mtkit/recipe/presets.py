"""Presets: named model sizes with matching training settings; `mtkit.recipe` documents the settings."""

from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {"d_model": 128, "heads": 4, "feed_forward": 512, "encoder_layers": 2, "decoder_layers": 2},
        "training": {"max_updates": 1_000},
    },
    "small": {
        "model": {"d_model": 256, "heads": 4, "feed_forward": 1024, "encoder_layers": 3, "decoder_layers": 3},
        "training": {
            "batch_tokens": 1_000,
            "cooldown": 0.25,
            "max_updates": 30_000,
            "validate_every": 2_000,
        },
    },
    "base": {
        "model": {
            "d_model": 512,
            "heads": 8,
            "feed_forward": 2048,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "norm": "post",
        },
        "training": {
            "batch_tokens": 25_000,
            "schedule": "noam",
            "peak_rate": 1.0,
            "warmup_updates": 4_000,
            "clip_norm": 0.0,
            "max_updates": 100_000,
            "validate_every": 2_000,
        },
    },
    "big": {
        "model": {
            "d_model": 1024,
            "heads": 16,
            "feed_forward": 4096,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "norm": "post",
            "dropout": 0.3,
        },
        "training": {
            "batch_tokens": 25_000,
            "schedule": "noam",
            "peak_rate": 1.0,
            "warmup_updates": 4_000,
            "clip_norm": 0.0,
            "max_updates": 300_000,
            "validate_every": 2_000,
        },
    },
}
"""Base and big are the models of "Attention Is All You Need" (Vaswani et al., 2017), table 3."""
