"""Speed on a GPU: training, decoding and attention, beside other programs on the same work."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from mtkit.attention import build
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.errors import MtkitError
from mtkit.recipe import Recipe, make_recipe
from mtkit.training.data_loader import DataLoader
from mtkit.training.precision import Precision, fast_and_repeatable
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.gpu.check import Result, Setup, guarded
from tests.gpu.machine import median_seconds, wait
from tests.gpu.training import model_of

LENGTHS = (1024, 4096, 16384, 65536)
NAMES = ("full", "band", "longformer", "bigbird", "linear", "performer", "reformer")
RUN = "gpu-check"
"""Name of the run that the decoding sections train and translate with."""
TRAINING_MINUTES = 0.1


def _data(setup: Setup) -> Path:
    return setup.data / ("builtin" if setup.tiny else "news")


def news(setup: Setup) -> Prepared:
    """The prepared data of the speed sections."""
    return open_prepared(_data(setup))


def _preset(setup: Setup) -> str:
    return "tiny" if setup.tiny else "base"


def _command(check: str, *words: str) -> Iterator[Result]:
    """Runs mtkit; one result per line of its output."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "mtkit", *words], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.strip():
            yield {"check": check, "line": line.rstrip()}
    seconds = round(time.monotonic() - begin, 1)
    yield {"check": check, "ok": done.returncode == 0, "stderr": done.stderr[-600:], "seconds": seconds}


def _recipe(setup: Setup, preset: str, tokens: int) -> Recipe:
    return make_recipe({"preset": preset, "training": {"batch_tokens": 500 if setup.tiny else tokens}})


PROFILES = {
    "base": ("base", False, False),
    "base with Triton": ("base", True, False),
    "base with CUDA graphs": ("base", False, True),
    "base with Triton and CUDA graphs": ("base", True, True),
    "big with Triton": ("big", True, False),
    "big with Triton and CUDA graphs": ("big", True, True),
}
"""Preset, whether with Triton's kernels, whether with CUDA graphs; in bfloat16."""


def update_profile(setup: Setup) -> Iterator[Result]:
    """Kernels of an update, the time that the host needs to start them, and the time of shapes that are new."""
    for name, (preset, kernels, graphs) in PROFILES.items():
        if graphs and setup.device == "cpu":
            continue
        size = "tiny" if setup.tiny else preset
        yield guarded(f"profile {name}", lambda s=size, k=kernels, g=graphs: _profile(setup, s, k, g))


def _profile(setup: Setup, preset: str, kernels: bool, graphs: bool) -> Result:
    prepared, recipe = news(setup), _recipe(setup, preset, 25_000)
    with World(setup.device) as world, fast_and_repeatable(world.device):
        chosen = Precision("bfloat16", world.device, kernels=kernels, graphs=graphs)
        said = list[str]()
        updater = Updater(model_of(recipe, prepared, setup.device), recipe, world, chosen, said.append)
        loader = DataLoader(recipe, prepared, 256, world).updates(0, 0)
        work = [next(loader) for _ in range(3 if setup.tiny else 20)]
        loader.close()
        times, host = [], 0.0
        for turn in range(3):  # the first batch warms up; the others are of new shapes in the first turn
            wait(setup.device)
            begin = time.perf_counter()
            for update in work[1:] if turn else work[:1]:
                updater.run(update, turn + 1, rate=1e-4, total_updates=100)
            if turn == 1:
                wait(setup.device)
                times.append(time.perf_counter() - begin)
            elif turn == 2:
                host = time.perf_counter() - begin
                wait(setup.device)
                times.append(time.perf_counter() - begin)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.device == "cuda" else [])]
        with profile(activities=activities) as profiled:
            for update in work[:5]:
                updater.run(update, 60, rate=1e-4, total_updates=100)
            wait(setup.device)
    events = profiled.key_averages()
    of_device = [each for each in events if each.self_device_time_total and not each.self_cpu_time_total]
    of_device.sort(key=lambda each: -each.self_device_time_total)
    busy = sum(each.self_device_time_total for each in of_device)
    by_host = sorted(events, key=lambda each: -each.self_cpu_time_total)[:12]
    count, updates = sum(each.tokens for each in work[1:]), len(work) - 1
    return {
        "tokens_per_s": round(count / times[1]),
        "ms_per_update": round(1000 * times[1] / updates, 2),
        "ms_per_update_of_new_shape": round(1000 * times[0] / updates, 2),
        "host_ms_per_update": round(1000 * host / updates, 2),
        "device_ms_per_update": round(busy / 5000, 2),
        "recorded_shapes": updater.recorded_shapes,
        "memory_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2) if setup.device == "cuda" else None,
        "said": said,
        "kernels_per_update": sum(each.count for each in of_device) / 5,
        "kernels": [
            [each.key[:70], each.count / 5, round(each.self_device_time_total / 5000, 2)] for each in of_device[:16]
        ],
        "host": [[each.key[:50], each.count / 5, round(each.self_cpu_time_total / 5000, 2)] for each in by_host],
    }


def training_speed(setup: Setup) -> Iterator[Result]:
    """`mtkit benchmark train` of base and big, Hugging Face beside it."""
    preset, tokens = (("base", "25000"), ("big", "25000"))[setup.shard[0]]
    sizes = ["--batch-tokens", "400", "--updates", "2", "--warmup", "3"] if setup.tiny else ["--batch-tokens", tokens]
    sizes += [] if setup.tiny else ["--updates", "100", "--warmup", "200"]
    with TemporaryDirectory() as folder:
        yield from _command(
            f"training {preset}", "benchmark", "train", "--preset", "tiny" if setup.tiny else preset,
            "--data", str(_data(setup)), "--device", setup.device, "--precision", "bfloat16", "--beside", "huggingface",
            "--output", folder, *sizes,
        )  # fmt: skip


def decoding_speed(setup: Setup) -> Iterator[Result]:
    """`mtkit benchmark decode` of a model trained for some seconds, Hugging Face beside it."""
    recipe = setup.data / "speed.yaml"
    limit = "max_updates: 2" if setup.tiny else f"max_minutes: {TRAINING_MINUTES}"
    recipe.write_text(
        f"preset: {_preset(setup)}\ntraining: {{batch_tokens: {500 if setup.tiny else 25_000}, warmup_updates: 300, "
        f"peak_rate: 5.0e-4, validate_segments: 20, validate_every: 100000, {limit}}}\n"
        # so short a training gives endless repetitions
        "decoding: {max_pieces: 60}\n"
    )
    yield from _command(
        "decoding: training", "train", "--recipe", str(recipe), "--data", str(_data(setup)), "--device", setup.device,
        "--name", RUN,
    )  # fmt: skip
    beams = "1" if setup.tiny else "1,4"
    yield from _command(
        "decoding", "benchmark", "decode", "--name", RUN, "--data", str(_data(setup)), "--device", setup.device,
        "--beam", beams, "--dtype", "bfloat16" if setup.device == "cuda" else "float32",
        "--beside", "huggingface", "--repeats", "1", "--segments", "20" if setup.tiny else "400",
        "--batch-tokens", "2000" if setup.tiny else "64000", "--output", str(setup.data / "speed-decoding"),
    )  # fmt: skip


def attention_speed(setup: Setup) -> Iterator[Result]:
    """Forward and backward of the encoder role in bfloat16, one segment of each length, width 512, 8 heads."""
    for name in NAMES[:2] if setup.tiny else NAMES:
        yield guarded(f"attention {name}", lambda name=name: _attention(setup, name))


def _attention(setup: Setup, name: str) -> Result:
    result: Result = {}
    for length in LENGTHS[:1] if setup.tiny else LENGTHS:
        attention = build(name, role="encoder", d_model=512, heads=8, max_length=length).to(setup.device).train()
        x = torch.randn(1, length, 512, device=setup.device, requires_grad=True)

        def passes(attention: torch.nn.Module = attention, x: torch.Tensor = x) -> None:
            with torch.autocast(setup.device, torch.bfloat16):
                output = attention(x).output
            output.float().sum().backward()

        try:
            result[str(length)] = round(1000 * median_seconds(passes, setup.device, repeats=5, warmup=2), 3)
        except (MtkitError, torch.OutOfMemoryError) as error:
            result[str(length)] = str(error)[:60]
    return result


def ctranslate2(setup: Setup) -> Iterator[Result]:
    """`mtkit benchmark decode` beside CTranslate2, after `decoding_speed`."""
    yield from _command(
        "ctranslate2", "benchmark", "decode", "--name", RUN, "--data", str(_data(setup)), "--device", setup.device,
        "--beam", "1" if setup.tiny else "1,4", "--dtype", "bfloat16" if setup.device == "cuda" else "float32",
        "--beside", "ctranslate2", "--repeats", "1", "--segments", "20" if setup.tiny else "400",
        "--batch-tokens", "2000" if setup.tiny else "64000", "--output", str(setup.data / "speed-ctranslate2"),
    )  # fmt: skip
