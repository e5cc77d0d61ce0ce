"""A run on conversations and prompts, from text to a model: the example configuration, cut short."""

import json
import os
from datetime import datetime
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tiny_runs import metrics_of
from workspace import ROOT
from xorl.train.export.saved import export_saved
from xorl.train.report.page import report_page
from xorl.train.report.read import read_runs


def test_the_chat_example_trains_and_leaves_a_receipt(tmp_path: Path, run_command) -> None:
    # Catches formats that work alone and not under the command, a run that does not say what became of its data,
    # and a model that is served with another template than it was trained with.
    folders = ["--train.output_dir", str(tmp_path / "out"), "--data.dataset_prepared_path", str(tmp_path / "prepared")]
    steps = ["--train.max_steps", "6", "--train.data_parallel_mode", "none", "--train.log_format", "structured"]
    result = run_command("configs/local/chat.yaml", *folders, *steps, prepare=lambda: os.chdir(ROOT))
    assert result.returncode == 0, result.stderr
    losses = [record["loss"] for record in metrics_of(tmp_path / "out") if "loss" in record]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    receipt = json.loads((tmp_path / "out" / "data_receipt.json").read_text())
    chat, completion = receipt["train"]["datasets"]
    assert (chat["counts"]["samples"], completion["counts"]["samples"]) == (600, 300)
    # Two answers a conversation: their letters or digits, the space before where there is one, and the end.
    assert 600 * 2 * 3 < chat["counts"]["trained_tokens"] < chat["counts"]["tokens"] // 2
    assert receipt["train"]["plan_hash"]
    assert 0 < receipt["held_out"]["fill"] <= 1
    # The counts of samples are of the whole data, before a part of it is held out.
    train, held_out = (receipt[part]["packed"]["documents"] for part in ("train", "held_out"))
    assert (train, held_out) == (855, 45)
    assert "Data: 900 samples; 855 documents left to train on, " in result.stderr
    assert "; held out: 45 documents in " in result.stderr
    (run,) = read_runs([tmp_path / "out"])
    assert (len(run.steps), run.about["num_steps"], run.about["world_size"]) == (6, 6, 1)
    assert run.about["options"]["train"]["data_parallel_mode"] == "none"
    page = report_page([run], datetime.now().astimezone())
    assert all(text in page for text in ("Held-out loss", "configs/quickstart/chat.jsonl", "train.lr_decay_style"))
    # The tokenizer has no template of its own: the one of the data is in every export.
    exported = export_saved(str(tmp_path / "out"), str(tmp_path / "exported"))
    template = (ROOT / "configs" / "local" / "chat.jinja").read_text()
    for folder in (tmp_path / "out" / "checkpoints" / "global_step_6-export", exported):
        assert AutoTokenizer.from_pretrained(folder).chat_template == template


def test_an_adapter_is_exported_with_the_template_that_it_was_trained_with(tmp_path: Path, run_command) -> None:
    # Catches an adapter that is served, alone or merged, with the template or the tokenizer of its base, or with none,
    # and a merged model without the stop tokens of its base.
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "configs" / "quickstart")).save_pretrained(base)
    stops = {"eos_token_id": [1, 2], "top_k": 7}
    (base / "generation_config.json").write_text(json.dumps(stops))
    folders = ["--train.output_dir", str(tmp_path / "out"), "--data.dataset_prepared_path", str(tmp_path / "prepared")]
    lora = ["--lora.enable_lora", "true", "--lora.save_lora_only", "true", "--model.model_path", str(base)]
    steps = ["--train.max_steps", "1", "--train.data_parallel_mode", "none"]
    result = run_command("configs/local/chat.yaml", *folders, *lora, *steps, prepare=lambda: os.chdir(ROOT))
    assert result.returncode == 0, result.stderr
    adapter = export_saved(str(tmp_path / "out"), str(tmp_path / "adapter"))
    merged = export_saved(str(tmp_path / "out"), str(tmp_path / "merged"), merge=True)
    again = export_saved(str(adapter), str(tmp_path / "again"), merge=True)
    template = (ROOT / "configs" / "local" / "chat.jinja").read_text()
    checkpoint = tmp_path / "out" / "checkpoints" / "global_step_1"
    tokenizer = (ROOT / "configs" / "quickstart" / "tokenizer.json").read_bytes()
    for folder in (checkpoint, checkpoint.with_name(f"{checkpoint.name}-export"), adapter, merged, again):
        assert (folder / "chat_template.jinja").read_text() == template
        # The base has no tokenizer.
        assert (folder / "tokenizer.json").read_bytes() == tokenizer
    # The template ends turns with a token at which the base does not stop.
    for folder in (adapter, merged, again):
        assert json.loads((folder / "generation_config.json").read_text()) == {**stops, "eos_token_id": [1, 2, 0]}
