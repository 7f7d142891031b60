"""What an imported model's search and tokenizer are told by its files, and models that the hub has as pickles."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.interchange.imports import find_folder, import_marian
from mtkit.interchange.marian_vocabulary import NEVER
from mtkit.text.tokenizer import EOS, PAD

transformers = pytest.importorskip("transformers")

from tests.interchange.text import SOURCES  # noqa: E402
from tests.interchange.theirs import LIMIT, change, save_theirs, their_tokens  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_theirs(tmp_path_factory.mktemp("theirs") / "marian")


def test_padding_takes_no_probability_where_their_search_normalises_again(folder: Path, tmp_path: Path) -> None:
    """OPUS-MT's padding has the logit 0, as its bias and embedding are 0: often a probable piece."""
    given = {"renormalize_logits": True, "no_repeat_ngram_size": 0}
    other = change(folder, tmp_path / "other", "generation_config.json", **given)
    weights = load_file(other / "model.safetensors")
    bias = weights["final_logits_bias"]
    bias[0, -1] = bias.max() + 1.0
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    run = import_marian(other, tmp_path / "run").run
    piece = run.tokenizers.target.piece
    found = [best for best, *_ in Translator([run], engine="mtkit", device="cpu").translate(SOURCES)]
    own = [[piece(each) for each in best.pieces if each != EOS] for best in found]
    theirs = their_tokens(other, SOURCES, 4)
    ended = [place for place, tokens in enumerate(theirs) if len(tokens) < LIMIT - 2]
    assert len(ended) > len(SOURCES) / 4
    assert [own[place] for place in ended] == [theirs[place] for place in ended]
    otherwise = their_tokens(other, SOURCES, 4, renormalize_logits=False)
    assert otherwise != theirs  # it matters here


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"repetition_penalty": 1.2}, ["repetition_penalty = 1.2"]),
        ({"min_new_tokens": 2, "forced_bos_token_id": 7}, ["min_new_tokens = 2", "forced_bos_token_id = 7"]),
        (
            {"suppress_tokens": [5, 1], "begin_suppress_tokens": [6]},
            ["begin_suppress_tokens = [6]", "suppress_tokens = [5]"],
        ),
        ({"suppress_tokens": [5], "renormalize_logits": True, "no_repeat_ngram_size": 0}, []),
        ({"sequence_bias": [[[5], 1.0]]}, ["sequence_bias = [[[5], 1.0]]"]),
        ({"exponential_decay_length_penalty": [9, 1.1]}, ["exponential_decay_length_penalty = [9, 1.1]"]),
        ({"suppress_tokens": [], "sequence_bias": None, "min_new_tokens": 0}, []),
        ({"early_stopping": None}, ["early_stopping = False"]),
        ({"early_stopping": False, "num_beams": 1}, []),
        ({"bad_words_ids": [[7], [2, 3]]}, ["bad_words_ids = [[7], [2, 3]]"]),
        (
            {"bad_words_ids": [[7], [2, 3], []], "renormalize_logits": True},
            ["bad_words_ids = [[2, 3], []]", "renormalize_logits = True with no_repeat_ngram_size"],
        ),
    ],
)
def test_settings_of_a_search_that_mtkit_lacks_are_noted(
    values: dict[str, object], said: list[str], folder: Path, tmp_path: Path
) -> None:
    other = change(folder, tmp_path / "one", "generation_config.json", **values)
    assert import_marian(other, tmp_path / "run").notes == [
        f"{other} searches with {each}, which mtkit's search does not follow" for each in said
    ]


def test_the_command_quotes_the_name_of_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["import", str(folder), "--name", "my opus"], catch_exceptions=False)
    assert "Next: mtkit translate --name 'my opus' " in done.stdout


def test_tokens_that_a_child_added_are_noted(folder: Path, tmp_path: Path) -> None:
    added = {"0": {"content": "</s>"}, "900": {"content": "<ent>"}, "901": {"content": ">>deu<<"}, "902": {}, "903": 7}
    other = change(folder, tmp_path / "one", "tokenizer_config.json", added_tokens_decoder=added)
    (note,) = import_marian(other, tmp_path / "run").notes
    assert note == f"{other} adds <ent> to its tokenizer, which mtkit cuts like other text"


def test_the_error_for_a_search_setting_does_not_name_another_file(folder: Path, tmp_path: Path) -> None:
    other = change(folder, tmp_path / "one", "generation_config.json", length_penalty=-1.0)
    with pytest.raises(MtkitError, match=r"one: decoding\.length_penalty = -1\.0"):
        import_marian(other, tmp_path / "run")


def test_a_damaged_list_of_added_tokens_leaves_no_run(folder: Path, tmp_path: Path) -> None:
    other = change(folder, tmp_path / "one", "config.json")
    (other / "added_tokens.json").write_text("[1]")
    with pytest.raises(MtkitError, match=r"added_tokens\.json .*mend it or remove it"):
        import_marian(other, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_setting_that_no_marian_model_reads_is_not_in_the_way(folder: Path, tmp_path: Path) -> None:
    other = change(folder, tmp_path / "one", "config.json", extra_pos_embeddings=53_685)
    assert import_marian(other, tmp_path / "run").notes == []


def test_a_file_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "opus").touch()
    with pytest.raises(MtkitError, match="no folder models/opus; give one"):
        find_folder("models/opus")


def test_a_hub_model_without_safetensors_is_refused_with_the_lines_that_convert_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(place: str, allow_patterns: list[str]) -> str:
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(MtkitError) as caught:
        find_folder("Some/opus-mt-en-ja")
    message = str(caught.value)
    assert "M.from_pretrained('Some/opus-mt-en-ja').save_pretrained('opus-mt-en-ja'); T.from_pretrained" in message
    assert message.endswith("then import opus-mt-en-ja")


@pytest.mark.parametrize("again", [False, True])
def test_a_piece_that_their_search_takes_out_first_has_no_probability(
    folder: Path, tmp_path: Path, again: bool
) -> None:
    given = {"renormalize_logits": again, "no_repeat_ngram_size": 0}
    run = import_marian(change(folder, tmp_path / "one", "generation_config.json", **given), tmp_path / "run").run
    bias = run.load_model().output_bias
    assert bias is not None
    assert (bias[PAD].item() == NEVER) == again
