"""The choice of the engine, by its name or by what CTranslate2 supports."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.decoding.engines import selection
from mtkit.decoding.engines.selection import unsupported_part, uses_ctranslate2
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from tests.decoding.engines.plain import recipe_of
from tests.decoding.trained import make_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run")).run


def taken(
    name: str, runs: list[Run], dtype: torch.dtype | None = None, device: torch.device = CPU, **settings: Any
) -> bool:
    return uses_ctranslate2(name, runs, DecodingSettings.model_validate(settings), dtype, device)


def test_where_it_is_not_installed_auto_is_mtkit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert not taken("auto", [run])
    with pytest.raises(MtkitError, match=r"not possible: the package is not installed .*mtkit\[ctranslate2\]"):
        taken("ctranslate2", [run])


def test_an_unknown_engine_is_refused(run: Run) -> None:
    with pytest.raises(
        MtkitError, match=r"no engine 'ctranslate' \(did you mean 'ctranslate2'\?\); choose one of auto"
    ):
        taken("ctranslate", [run])


def test_mtkit_is_asked_for_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "reasons_against", None)
    assert not taken("mtkit", [run])
    assert not taken("auto", [run], device=torch.device("cuda"))


@pytest.mark.peer
class TestInstalled:
    """The first reason against it is named; auto takes mtkit's own then."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("ctranslate2")

    def test_it_is_taken_where_it_can_do_the_same(self, run: Run) -> None:
        for settings in ({}, {"method": "greedy"}, {"n_best": 3, "length_penalty": 0.0}, {"max_pieces": 9}):
            assert taken("auto", [run], **settings)
            assert taken("ctranslate2", [run], **settings)
        assert taken("auto", [run], torch.int8)

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"method": "sample"}, r"decoding\.method = sample"),
            ({"coverage_penalty": 0.2}, r"decoding\.coverage_penalty = 0\.2"),
            ({"no_repeat_ngram": 3}, r"decoding\.no_repeat_ngram = 3"),
        ],
    )
    def test_settings_that_it_does_not_have(self, run: Run, settings: dict[str, Any], reason: str) -> None:
        self.refused([run], reason, **settings)

    def test_models_that_it_does_not_have(self, run: Run, tmp_path: Path) -> None:
        self.refused([run, run], "ensemble")
        self.refused([make_run(tmp_path, attention="longformer").run], "no encoder attention longformer")

    def test_arithmetic_that_it_does_not_have(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        import ctranslate2

        self.refused([run], "it finds no CUDA device", device=torch.device("cuda")) if not (
            ctranslate2.get_cuda_device_count()
        ) else None
        self.refused([run], "it has no device mps", device=torch.device("mps"))
        monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda device: {"float32"})
        self.refused([run], "it has no bfloat16 on this CPU", torch.bfloat16)

    def refused(
        self,
        runs: list[Run],
        reason: str,
        dtype: torch.dtype | None = None,
        device: torch.device = CPU,
        **settings: Any,
    ) -> None:
        assert not taken("auto", runs, dtype, device, **settings)
        with pytest.raises(MtkitError, match=f"--engine ctranslate2 is not possible: .*{reason}"):
            taken("ctranslate2", runs, dtype, device, **settings)


@pytest.mark.parametrize(
    ("options", "changes", "part"),
    [
        ({}, {}, None),
        ({"projection": "multi-query"}, {}, None),
        ({"positions": "rotary"}, {"positions": "none"}, None),
        ({"decoder.positions": {"name": "rotary", "half": True}}, {"positions": "none"}, None),
        ({"positions": "alibi"}, {"positions": "none"}, "encoder attention with positions alibi"),
        ({"positions": "rotary"}, {}, "model.positions sinusoidal with the rotary positions of encoder attention"),
        (
            {"decoder.positions": {"name": "rotary"}},
            {"positions": "learned"},
            "model.positions learned with the rotary positions of decoder attention",
        ),
    ],
    ids=str,
)
def test_the_first_part_that_it_does_not_hold_is_named(
    options: dict[str, Any], changes: dict[str, Any], part: str | None
) -> None:
    assert unsupported_part(recipe_of("full", options, **changes)) == part
