"""Mechanisms of other packages: found by their entry points, and recorded in runs; the skeleton in the docs is one."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mtkit.attention import build, mechanisms
from mtkit.attention.catalogue import describe, table
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, RunError
from mtkit.model.build import attention_packages, build_model
from mtkit.model.trial import try_packages
from mtkit.recipe import make_recipe
from mtkit.training.train import train
from tests.contract import test_arithmetic, test_causality, test_padding, test_saving, test_steps
from tests.contract.cases import Case, cases_of
from tests.decoding.trained import make_run

PAGE = Path(__file__).parents[2] / "docs" / "add-a-mechanism.md"
SKELETON = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]  # type: ignore[index]

INNER = 'inner: Annotated[Positive | None, Null("D")] = None'

Install = Callable[..., None]

CHECKS = (
    test_padding.test_padding_changes_nothing_and_a_segment_gives_in_a_batch_what_it_gives_alone,
    test_causality.test_later_tokens_change_nothing_earlier,
    test_steps.test_steps_give_what_forward_gives,
    test_steps.test_hypotheses_of_ragged_segments_step_each_for_itself_and_go_on_after_reorder,
    test_arithmetic.test_gradients_match_a_finite_difference,
    test_arithmetic.test_bfloat16_stays_within_2_percent_of_float32,
    test_saving.test_random_numbers_serve_dropout_in_training_alone,
)


def changed(old: str, new: str) -> str:
    """The skeleton with a mistake."""
    assert old in SKELETON
    return SKELETON.replace(old, new, 1)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package with one mechanism in a file of its own."""
    (tmp_path / "packages").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "packages")

    def installed(name: str = "prefix-mean", code: str = SKELETON, module: str = "its_prefix_mean") -> None:
        (tmp_path / "packages" / "its_prefix_mean.py").write_text(code)
        facts = tmp_path / "packages" / "its-1.2.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: its\nVersion: 1.2\n")
        (facts / "entry_points.txt").write_text(f"[mtkit.attention]\n{name} = {module}\n")
        mechanisms.cache_clear()

    yield installed
    monkeypatch.undo()
    mechanisms.cache_clear()


@pytest.fixture(autouse=True)
def forget_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "its_prefix_mean", raising=False)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_skeleton_keeps_the_contract(check: Callable[[Case], None], install: Install) -> None:
    install()
    torch.manual_seed(1)
    cases = list(cases_of(mechanisms()["prefix-mean"], set()))
    assert {case.role for case in cases} == {"decoder"}
    for case in cases:
        check(case)


def test_a_package_is_named_where_mechanisms_are_described(install: Install) -> None:
    install()
    assert "prefix-mean" in table()
    assert "its 1.2" in describe("prefix-mean")
    assert build("prefix-mean", role="decoder", d_model=32, heads=4, inner=7).v_proj.out_features == 7
    recipe = make_recipe({"attention": {"name": "prefix-mean"}})
    assert attention_packages(recipe) == {"prefix-mean": "its 1.2"}
    assert attention_packages(make_recipe({"attention": {"options": {"merge": "em-routing"}}})) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"code": "import nothing_like_it"}, "of its 1.2 cannot be loaded .ModuleNotFoundError: No module named"),
        ({"code": "x = 1"}, "must define exactly one public Attention"),
        ({"module": "its_prefix_mean:PrefixMean"}, "is not a module"),
        ({"name": "Prefix_Mean"}, "small letters, digits and hyphens"),
        ({"code": "import sys; sys.exit(3)"}, "of its 1.2 cannot be loaded .SystemExit: 3"),
        (
            {"code": changed('roles = frozenset({"decoder"})', 'roles = "decoder"')},
            "roles = 'decoder' .* must be a set of",
        ),
        (
            {"code": changed('roles = frozenset({"decoder"})', 'roles = frozenset({"dec"})')},
            "must be a set of encoder, de",
        ),
        ({"code": changed('published = frozenset({"decoder"', 'published = frozenset({"cross"')}, "a set of its roles"),
        ({"code": changed("growth = 1", "growth = '1'")}, "growth = '1' of PrefixMean must be a number"),
        ({"code": changed(INNER, "inner=None")}, "the option inner of PrefixMean needs an annotation and a default"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named_and_spoils_nothing(
    given: dict[str, str], message: str, install: Install
) -> None:
    install(**given)
    assert "prefix-mean" not in mechanisms()
    assert build("full", role="encoder", d_model=32, heads=4)
    with pytest.raises(MtkitError, match=message):
        build(given.get("name", "prefix-mean"), role="decoder", d_model=32, heads=4)


def test_a_mechanism_that_cannot_be_built_is_named(install: Install) -> None:
    install(code=changed("super().__init__(site)", "raise KeyError('inner')"))
    with pytest.raises(MtkitError, match=r"'prefix-mean' of its 1\.2 cannot be built \(KeyError: 'inner'\); repair"):
        build("prefix-mean", role="decoder", d_model=32, heads=4)


STEP = 'return Attended(output), {"sums": sums, "count": count}'


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (SKELETON[: SKELETON.index("    def advance")], "failed in a trial .*PrefixMean has no advance, which"),
        (
            changed("weight = self.v_proj.weight", "raise ValueError('x')"),
            r"ValueError: x; .*its_prefix_mean.py, line 4\d",
        ),
        (changed(STEP, "return Attended(output)"), "TypeError: cannot unpack non-iterable Attended object"),
        (changed("(sums / count)", "(sums / count.bit_length())"), "step by step decoding does not compute what whole"),
        (changed("(sums / counts)", "(sums / counts / 0 * 0)"), "logits differ by nan"),
    ],
)
def test_mistakes_in_a_package_show_before_training(code: str, message: str, install: Install) -> None:
    install(code=code)
    recipe = make_recipe({"attention": {"name": "prefix-mean"}, "model": {"d_model": 32, "heads": 4}})
    model = build_model(recipe, source_vocabulary=40, target_vocabulary=40)
    with pytest.raises(MtkitError, match=rf"^attention 'prefix-mean' of its 1\.2.*{message}.*repair that package$"):
        try_packages(model, attention_packages(recipe))
    assert model.training


def test_the_trial_draws_no_random_numbers(install: Install) -> None:
    install()
    recipe = make_recipe({"attention": {"name": "prefix-mean"}, "model": {"d_model": 32, "heads": 4}})
    model = build_model(recipe, source_vocabulary=40, target_vocabulary=40)
    before = torch.get_rng_state()
    try_packages(model, attention_packages(recipe))
    assert torch.equal(torch.get_rng_state(), before)


def test_training_begins_with_the_trial(install: Install, tmp_path: Path) -> None:
    install(code=SKELETON[: SKELETON.index("    def advance")])
    prepared = make_run(tmp_path).prepared
    recipe = make_recipe({"attention": {"name": "prefix-mean"}, "model": {"d_model": 32, "heads": 4}})
    with pytest.raises(MtkitError, match="failed in a trial before training"):
        train(recipe, prepared, tmp_path / "new", command=[])
    assert not (tmp_path / "new").exists()


def test_a_name_that_is_taken_is_refused(install: Install) -> None:
    install(name="full")
    with pytest.raises(MtkitError, match=r"its 1\.2 has an attention mechanism 'full', and there is another one"):
        mechanisms()


def test_a_run_without_its_package_names_it(tmp_path: Path) -> None:
    run = make_run(tmp_path).run
    assert run.about.get("packages", {}) == {}
    path = run.folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "packages": {"prefix-mean": "its 1.2"}}))
    vars(run).pop("about")
    for use in (lambda: Translator([run]), run.load_model):
        with pytest.raises(RunError, match=r"attention .prefix-mean. of the package its 1\.2, which is not installed"):
            use()
