import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.attention import build, mechanisms
from mtkit.benchmark import attention, attention_work
from mtkit.benchmark.attention import METRICS, Benchmark, Setting, default_names, fit_exponent, measure_attention
from mtkit.benchmark.attention_report import as_object, draw_benchmark, readable, table
from mtkit.benchmark.attention_work import without_projections
from mtkit.device import seconds_of
from mtkit.errors import MtkitError

WIDTH, HEADS, LENGTHS = 32, 4, (16, 64)


def setting(**changes: Any) -> Setting:
    return Setting(**{"width": WIDTH, "heads": HEADS, "repeats": 1, **changes})


@pytest.fixture(scope="module", autouse=True)
def _few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "STEPS", 4)
        yield


@pytest.fixture(scope="module")
def decoder() -> Benchmark:
    return measure_attention(
        ["band", "linear"], LENGTHS, setting(role="decoder", options={"window_radius": 4, "chunk": 4})
    )


@pytest.fixture(scope="module")
def cross() -> Benchmark:
    return measure_attention(["full"], LENGTHS, setting(role="cross", batch=2))


def test_the_flops_of_full_are_those_counted_by_hand(decoder: Benchmark, cross: Benchmark) -> None:
    for measured, batch in ((decoder, 1), (cross, 2)):
        for length in LENGTHS:
            pairs, projection = 2 * length * length * WIDTH, 2 * length * WIDTH * WIDTH
            rows = {
                (row.work, row.form): row.flops
                for row in measured.measurements
                if row.attention == "full" and row.length == length
            }
            # two products forward, five backward; a projection is one product forward and two backward
            assert rows["forward-backward", "attention"] == batch * 7 * pairs
            assert rows["forward-backward", "sub-layer"] == batch * (7 * pairs + 4 * 3 * projection)


def test_the_flops_of_a_step_are_those_counted_by_hand(decoder: Benchmark, cross: Benchmark) -> None:
    for measured, batch, projections in ((decoder, 1, 4), (cross, 2, 2)):
        whole, bare = (measured.rows("full", "step", form) for form in ("sub-layer", "attention"))
        for one, other in zip(whole, bare, strict=True):
            assert one.flops - other.flops == batch * projections * 2 * WIDTH * WIDTH
    # the 4 steps counted follow one that warms up and 4 timed ones; each sees all before it and itself
    seen = [length + 5 + 3 / 2 + 1 for length in LENGTHS]
    assert [row.flops for row in decoder.rows("full", "step", "attention")] == [2 * 2 * each * WIDTH for each in seen]
    assert [row.flops for row in cross.rows("full", "step", "attention")] == [
        2 * 2 * 2 * length * WIDTH for length in LENGTHS
    ]


@pytest.mark.parametrize("name", ["moba", "native-sparse", "full"])
def test_predicted_memory_is_near_what_a_layer_needs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a single length: in a few hundred tokens, `moba` and `native-sparse` attend to nearly everything."""
    predicted: list[float] = []
    predict = attention.predict_bytes

    def kept(held: dict[int, int], length: int, growth: float) -> float:
        predicted.append(predict(held, length, growth))
        return predicted[-1]

    monkeypatch.setattr(attention, "predict_bytes", kept)
    (measured,) = measure_attention([name], [4096], setting()).rows(name, "forward-backward", "attention")
    assert 0.5 < predicted[-1] / measured.peak_bytes < 2


def test_a_step_of_bounded_state_costs_the_same_everywhere(decoder: Benchmark) -> None:
    for name in ("band", "linear"):
        for metric in ("peak_bytes", "flops"):
            assert decoder.exponent(name, "step", "attention", metric) == pytest.approx(0)
    memory = decoder.ratio(decoder.rows("linear", "step", "attention")[-1], "peak_bytes")
    assert memory is not None
    assert memory > 1


def test_everything_is_measured_beside_full(decoder: Benchmark) -> None:
    combinations = {(row.attention, row.work, row.form, row.length) for row in decoder.measurements}
    assert len(combinations) == len(decoder.measurements) == 3 * 2 * 2 * 2
    assert decoder.skipped == []
    for row in decoder.measurements:
        assert min(row.seconds, row.peak_bytes, row.flops) > 0
        ratios = [decoder.ratio(row, metric) for metric in METRICS]
        assert None not in ratios
        assert row.attention != "full" or ratios == [1, 1, 1]


def test_the_exponent_of_known_costs() -> None:
    lengths = [512, 1024, 2048, 4096]
    assert fit_exponent(lengths, [3 * length**1.5 for length in lengths]) == pytest.approx(1.5)
    assert fit_exponent(lengths, [7.0] * 4) == pytest.approx(0)
    assert fit_exponent([1, 2, 4], [1, 4, 4]) == pytest.approx(1)  # least squares, by hand
    assert fit_exponent([512], [1.0]) is None
    assert fit_exponent([512, 1024], [0, 0]) is None


def test_the_exponents_of_full_and_linear(decoder: Benchmark) -> None:
    assert decoder.exponent("full", "forward-backward", "attention", "flops") == pytest.approx(2)
    assert decoder.exponent("linear", "forward-backward", "attention", "flops") == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("threads", "counts_waiting"), [(1, False), (2, True)])
def test_one_thread_is_timed_by_the_processor(threads: int, counts_waiting: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        clock = attention_work.clock_of(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    waited = seconds_of(lambda: time.sleep(0.05), torch.device("cpu"), clock)
    assert (waited >= 0.05) == counts_waiting


def test_progress_reaches_the_end() -> None:
    told: list[tuple[int, int]] = []
    measure_attention([], [8, 16], setting(role="cross"), on_progress=lambda *parts: told.append(parts))
    assert told[-1] == (8, 8)
    assert told == sorted(told)


def test_what_does_not_fit_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "free_bytes", lambda device: 2**20)
    told: list[tuple[int, int]] = []
    measured = measure_attention(
        ["linear"], [16, 64, 8192], setting(role="decoder"), on_progress=lambda *each: told.append(each)
    )
    assert {row.length for row in measured.measurements} == {16, 64}
    assert len(measured.skipped) == 4
    assert measured.skipped[0].endswith("and 1 MiB are free")
    assert measured.skipped[0].startswith("full, sub-layer, at 8,192: skipped, it needs about ")
    assert told[-1][0] == told[-1][1]


def test_a_mechanism_that_raises_costs_no_other_its_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    def band_fails_at_16(*args: Any) -> Any:
        if args[0] == "band" and args[2] == 16:
            raise RuntimeError("no kernel\nfor this")
        return built(*args)

    built = attention._build
    monkeypatch.setattr(attention, "_build", band_fails_at_16)
    told: list[tuple[int, int]] = []
    measured = measure_attention(
        ["band"], [8, 16, 32], setting(role="decoder"), on_progress=lambda *each: told.append(each)
    )
    assert measured.failed == [
        f"band, {form}, at 16: failed, RuntimeError: no kernel for this" for form in ("sub-layer", "attention")
    ]
    for name, lengths in (("full", [8, 16, 32]), ("band", [8, 32])):
        for work in ("forward-backward", "step"):
            for form in ("sub-layer", "attention"):
                assert [row.length for row in measured.rows(name, work, form)] == lengths
    assert table(measured).endswith("\n".join(measured.failed))
    assert told[-1][0] == told[-1][1]


def test_without_its_projections_full_is_the_attention_of_its_input() -> None:
    attention = without_projections(build("full", role="decoder", d_model=WIDTH, heads=HEADS))
    x = torch.randn(2, 9, WIDTH)
    heads = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    torch.testing.assert_close(attention(x).output, expected.transpose(1, 2).flatten(2))


def test_the_second_projections_of_global_tokens_are_left_out_too() -> None:
    how: dict[str, Any] = {"role": "encoder", "d_model": WIDTH, "heads": HEADS}
    attention, full = (without_projections(build(name, **how)) for name in ("longformer", "full"))
    x = torch.randn(2, 9, WIDTH)
    torch.testing.assert_close(attention(x).output[:, 0], full(x).output[:, 0])


def test_narrower_projections_let_the_first_features_through() -> None:
    attention = without_projections(build("multi-query", role="encoder", d_model=WIDTH, heads=HEADS))
    x = torch.randn(2, 9, WIDTH)
    torch.testing.assert_close(attention.get_submodule("k_proj")(x), x[..., : WIDTH // HEADS])
    assert attention(x).output.shape == x.shape


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_all_mechanisms_can_be_measured(role: str) -> None:
    names = [name for name, each in mechanisms().items() if role in each.roles]
    assert set(default_names(role)) < set(names)
    assert default_names(role)[0] == "full"
    measured = measure_attention(names, [8], setting(role=role))
    assert {row.attention for row in measured.measurements} == set(names)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: measure_attention(["lienar"], [8], setting()), "did you mean 'linear'"),
        (lambda: measure_attention(["linformer"], [8], setting(role="decoder")), "cannot play the role 'decoder'"),
        (lambda: measure_attention(["band"], [8], setting(role="decodr")), "did you mean 'decoder'"),
        (lambda: default_names("decodr"), "did you mean 'decoder'"),
        (
            lambda: measure_attention(["band"], [8], setting(options={"window_radus": 4})),
            "did you mean 'window_radius'",
        ),
        (lambda: measure_attention(["band"], [0, 8], setting()), "lengths are whole numbers from 1"),
        (lambda: measure_attention(["band"], [], setting()), "lengths are whole numbers from 1"),
        (lambda: measure_attention(["band"], [8], setting(repeats=0)), "from 1"),
        (lambda: measure_attention(["band"], [8], setting(heads=5)), "5 heads do not divide"),
        (
            lambda: measure_attention(["band"], [10**12], setting()),
            "nothing could be measured; full, sub-layer, at 1,000,000",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        attempt()
    assert "\n" not in str(raised.value)


def test_the_tables_show_every_mechanism_length_and_exponent(decoder: Benchmark) -> None:
    shown = table(decoder)
    assert shown.count("T^\n") == 2 * 2 * 3  # works, forms, metrics
    assert all(len(line) <= 120 for line in shown.split("\n"))
    section = shown.partition("FLOPs of forward and backward, attention without its projections\n")[2].split("\n")
    assert section[0].split() == ["16", "64", "T^"]
    full = decoder.rows("full", "forward-backward", "attention")
    cells = [[*readable(row.flops, "flops").split(), "×1"] for row in full]
    assert section[1].split() == ["full", *cells[0], *cells[1], "2.00"]


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.0123, "seconds", "12.3 ms"),
        (2.5e-7, "seconds", "0.25 µs"),
        (123.4, "seconds", "123 s"),
        (1536, "peak_bytes", "1.5 KiB"),
        (1023 * 2**20, "peak_bytes", "1023 MiB"),
        (4.2e15, "flops", "4200 T"),
        (0, "flops", "0"),
    ],
)
def test_numbers_are_readable(value: float, metric: str, text: str) -> None:
    assert readable(value, metric) == text


def test_the_object_is_json_with_ratios_and_exponents(decoder: Benchmark) -> None:
    read = json.loads(json.dumps(as_object(decoder)))
    assert read["setting"]["role"] == "decoder"
    assert len(read["measurements"]) == len(decoder.measurements)
    assert read["measurements"][0]["full_by_this"] == {"seconds": 1, "peak_bytes": 1, "flops": 1}
    assert len(read["exponents"]) == 3 * 2 * 2


def test_a_picture_is_drawn(decoder: Benchmark, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = Benchmark(setting(), LENGTHS, decoder.measurements[:1], [], [])
    for name, measured in (("all", decoder), ("one", nothing)):
        draw_benchmark(measured, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
