"""Runs of mtkit with random weights over English, Chinese and Japanese, whose hypotheses end."""

import json
from pathlib import Path
from typing import Any

import torch

from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe
from mtkit.runs import FORMAT, Run
from mtkit.text.tokenizer import EOS
from mtkit.training.checkpoint import write_checkpoint
from tests.interchange.text import ENGLISH, OTHERS, sentences


def make_run(
    folder: Path, *, joint: bool = True, directions: tuple[str, ...] = (), end: float = 0.0, **parts: Any
) -> Run:
    """The run `folder`/run; `parts` are sections of its recipe, `end` is added to the logit of EOS."""
    folder.mkdir(parents=True)
    text: dict[str, list[dict[str, str]]] = {}
    for side, count in (("train", 150), ("valid", 6)):
        text[side] = []
        for number, way in enumerate(directions or (None,)):
            files = {"source": sentences(ENGLISH, count, number), "target": sentences(OTHERS, count, number + 7)}
            paths = {key: folder / f"{side}.{number}.{key}" for key in files}
            for key, lines in files.items():
                paths[key].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            text[side].append({key: str(path) for key, path in paths.items()} | ({"direction": way} if way else {}))
    model = {"d_model": 16, "heads": 4, "feed_forward": 24, "max_length": 64, "dropout": 0.0}
    model |= {"encoder_layers": 2, "decoder_layers": 1} | parts.pop("model", {})
    recipe = make_recipe(
        {
            "data": {
                "folder": str(folder / "data"),
                "source_language": "en",
                "target_language": "ja",
                **text,
                "tokenizer": {"vocabulary": 420, "joint": joint},
            },
            "model": model,
            "decoding": {"beam": 4, "max_pieces": 30},
            **parts,
        }
    )
    prepare(recipe.data)
    prepared = open_prepared(recipe.data.folder)
    sizes = {side: getattr(prepared.tokenizers, side).size for side in ("source", "target")}
    torch.manual_seed(3)
    network = build_model(recipe, source_vocabulary=sizes["source"], target_vocabulary=sizes["target"])
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight), alpha=0.2)
            else:
                weight.mul_(2.0 if weight.dim() > 1 else 1.0)
        if network.output_bias is not None:
            network.output_bias[EOS] += end
    run = folder / "run"
    checkpoint = run / "checkpoints" / "update-00000010"
    (run / "tokenizer").mkdir(parents=True)
    for each in (recipe.data.folder / "tokenizer").glob("*.model"):
        (run / "tokenizer" / each.name).write_bytes(each.read_bytes())
    (run / "recipe.yaml").write_text(recipe.model_dump_json(), encoding="utf-8")
    about = {"format": FORMAT, "vocabularies": sizes, "data": prepared.fingerprint, "directions": prepared.directions}
    (run / "run.json").write_text(json.dumps(about), encoding="utf-8")
    write_checkpoint(checkpoint, {"model": network.state_dict()}, {"update": 10})
    return Run(run)
