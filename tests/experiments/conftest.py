from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtkit.experiments.folder import Folder
from mtkit.experiments.setup import set_up
from mtkit.experiments.study import Study, make_study
from mtkit.experiments.trials import Plan
from mtkit.recipe import merged

Made = Callable[..., Study]
Opened = Callable[..., tuple[Folder, Plan, dict[str | None, str]]]


@pytest.fixture
def tiny(prepared_folder: Path) -> Made:
    """A study of entries whose trainings take a moment; `settings` are laid over the recipe."""
    base: dict[str, Any] = {
        "data": {"folder": str(prepared_folder)},
        "model": {"d_model": 32, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1},
        "training": {
            "batch_tokens": 200, "max_updates": 2, "validate_segments": 2, "log_every": 1, "precision": "float32",
        },
        "decoding": {"method": "greedy", "max_pieces": 5},
    }  # fmt: skip

    def build(*entries: Any, settings: dict[str, Any] | None = None, **study: Any) -> Study:
        return make_study({"settings": merged(base, settings or {}), "entries": list(entries), **study})

    return build


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """The folder, the plan and the data of a study, as the command opens them."""

    def build(study: Study, name: str = "out") -> tuple[Folder, Plan, dict[str | None, str]]:
        folder = Folder(tmp_path / name)
        plan, data = set_up(study, folder)
        folder.open(study)
        return folder, plan, data

    return build
