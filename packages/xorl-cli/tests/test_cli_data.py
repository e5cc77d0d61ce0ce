"""`xorl data`: what training would read, shown without training."""

import json
import sys
from pathlib import Path

import pytest

from xorl.cli.app import main
from xorl.cli.exit_codes import BAD_INPUT
from xorl.data import push as push_module

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Returns a function that runs `xorl data COMMAND configs/local/chat.yaml ...`, and returns its two outputs."""
    monkeypatch.chdir(ROOT)
    folders = ["--train.output_dir", str(tmp_path / "out"), "--data.dataset_prepared_path", str(tmp_path / "prepared")]

    def run(command: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["xorl", "data", command, "configs/local/chat.yaml", *folders, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert int(ended.value.code or 0) == code, err
        return out, err

    return run


def test_prepare_fills_the_cache_and_says_what_became_of_every_sample(data, tmp_path: Path) -> None:
    # Would catch a preparation that trains, needs a GPU, or is not found by what comes after it.
    out, _ = data("prepare")
    assert "train dataset=configs/quickstart/chat.jsonl samples=600 kept=600" in out
    held_out = next(line for line in out.splitlines() if line.startswith("held_out bins="))
    assert " documents=45 tokens=" in held_out  # of 900, of which the lines of the datasets tell
    assert len(list((tmp_path / "prepared").glob("*/manifest.json"))) == 2
    assert "cached=true" in data("prepare")[0]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_inspect_shows_what_is_trained_with_and_without_colour(data) -> None:
    # Would catch colours on a pipe, and masks that are shown other than they are.
    plain, _ = data("inspect", "--num", "40")
    assert "\033" not in plain
    row = json.loads((ROOT / "configs/quickstart/chat.jsonl").read_text().splitlines()[0])
    assert "[[ " in plain
    assert "<|endoftext|>]]" in plain
    assert "user: " in plain
    assert "[[user" not in plain
    assert row["messages"][0]["role"] == "user"
    colored, _ = data("inspect", "--num", "40", "--color", "always")
    for code_of_color in ("\033[32m", "\033[90m", "\033[1m", "\033[36m"):
        colored = colored.replace(code_of_color, "")
    assert colored.replace("\033[0m", "") == plain.replace("[[", "").replace("]]", "")


def test_stats_writes_a_page_beside_what_it_prints(data, tmp_path: Path) -> None:
    # Would catch statistics of one dataset shown for another, and a page that is promised and not there.
    out, _ = data("stats", "--held-out")
    assert "dataset  configs/quickstart/heldout.jsonl" in out
    assert "300 in, 300 kept" in out
    assert (tmp_path / "out" / "data_stats.html").read_text().startswith("<!doctype html>")


def test_what_stops_a_run_can_be_looked_at(data, tmp_path: Path) -> None:
    # Would catch an error that says to look at the data with a command that ends with the same error.
    short = ("--data.sample_packing_sequence_len", "16")
    assert "would be cut" in data("prepare", *short, code=BAD_INPUT)[1]
    for command in ("inspect", "stats"):
        out, err = data(command, *short)
        assert "this would stop a run: data.datasets[0]: 600 of the 600 samples" in err
        assert "16 of 16 tokens" in out or "dataset  configs/quickstart/chat.jsonl" in out
    data("prepare", *short, code=BAD_INPUT)


def test_only_preparing_uploads_and_looking_does_not(data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches documents uploaded by a command that only shows them."""
    uploaded: list[str] = []

    class Hub:
        def __init__(self, token: object) -> None:
            pass

        def create_repo(self, repo_id: str, **_: object) -> None:
            pass

        def upload_folder(self, *, repo_id: str, **_: object) -> None:
            uploaded.append(repo_id)

    monkeypatch.setattr(push_module, "HfApi", Hub)
    push = ("--data.push_dataset_to_hub", "org/name", "--data.hf_use_auth_token", "true")
    for command, expected in (("inspect", []), ("stats", []), ("prepare", ["org/name"])):
        data(command, *push)
        assert uploaded == expected, command


def test_control_characters_of_text_are_shown_and_not_sent(data, tmp_path: Path) -> None:
    # Would catch text that clears the screen, or paints itself as trained.
    text = tmp_path / "rows.txt"
    text.write_text("red \033[31m and more words to train on\n")
    options = ("--data.val_set_size", "null", "--data.datasets", f"[{{path: {text}, type: text}}]")
    out, _ = data("inspect", *options)
    assert "\\x1b[31m" in out
    assert "\033" not in out


STREAMED = ("--data.streaming", "true", "--data.val_set_size", "null", "--train.save_epochs", "1")


def test_a_stream_is_looked_at_without_preparing(data, tmp_path: Path) -> None:
    # Would catch a stream that is read whole, or shown in another order than it is trained on.
    out, _ = data("inspect", *STREAMED, "--bin", "1", "--num", "2")
    assert out.startswith("bin 1 of the stream: ")
    assert "---- document 1: " in out
    assert "[[" in out
    out, _ = data("stats", *STREAMED, "--documents", "20")
    assert "documents, of more (--documents)" in out
    assert "dataset  configs/quickstart/heldout.jsonl" in out
    assert "the first" in (tmp_path / "out" / "data_stats.html").read_text()
    assert "documents, all of them" in data("stats", *STREAMED)[0]
    assert not list((tmp_path / "prepared").glob("*/manifest.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", *STREAMED], "data.streaming: a stream is read during training"),
        (["stats", "--documents", "5"], "--documents: only for streams"),
        (["inspect", "--bin", "999"], "--bin 999: there are"),
        (["inspect", "--data.val_set_size", "null", "--held-out"], "--held-out: there is no held-out data"),
        (["prepare", "--data.datasets.0.type", "text"], "line 1: column 'text' does not exist"),
        (["prepare", "--model.tokenizer_path", "configs/models"], "model.tokenizer_path: "),
        (["prepare", "--data.sample_packing_sequence_len", "8"], "configs/local/chat.yaml:14: data.datasets[0]: "),
        (["inspect", "--data.datasets.0.path", "a/*.jsonl"], "data.datasets[0].data_files to the pattern, and ds_type"),
        (["stats", "--html", "configs"], "--html: cannot write configs"),
    ],
)
def test_bad_input_ends_with_its_code_and_a_line(data, arguments: list[str], message: str) -> None:
    # Would catch a traceback where a line says what to change.
    _, err = data(*arguments, code=BAD_INPUT)
    assert message in err
    assert "Traceback" not in err
