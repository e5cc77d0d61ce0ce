"""The end tokens of trained text join those at which generation stops."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from local_options import local_config
from xorl.train.architecture import Architecture, read_config
from xorl.train.data import prepare_data
from xorl.train.end_tokens import with_end_tokens

EOS, END = 256, 257
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture
def architecture(tmp_path: Path) -> Architecture:
    """A base model that stops at <eos>, with a tokenizer whose template ends turns with <end>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", additional_special_tokens=["<end>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258, **SIZES}
    config |= {"eos_token_id": EOS, "bos_token_id": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return read_config("model.model_path", tmp_path / "model" / "config.json", tmp_path / "model")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_data_tells_how_trained_turns_end(architecture: Architecture, tmp_path: Path, streaming: bool) -> None:
    """Catches a chat model on a base model's files, which talks on after the end of its turn."""
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(row) + "\n") * 8)
    prepared = {"dataset_prepared_path": str(tmp_path / "prepared"), "dataset_num_proc": 1, "streaming": streaming}
    chat = {"datasets": [{"path": str(tmp_path / "chat.jsonl"), "type": "chat"}], **prepared}
    config = local_config({"model_path": str(tmp_path / "model")}, chat, max_steps=1)
    data = prepare_data(config, 258, architecture.tokenizer_folder)
    assert data.end_tokens == {"<end>": 8}
    assert with_end_tokens(architecture, data.end_tokens).generation["eos_token_id"] == [EOS, END]


CASES = {
    "no file": ({}, {"<end>": 8}, {"bos_token_id": 1, "eos_token_id": [EOS, END]}),
    "one of several": ({"eos_token_id": [EOS, END]}, {"<end>": 8}, None),
    "file": ({"eos_token_id": EOS, "top_k": 5}, {"<end>": 8}, {"eos_token_id": [EOS, END], "top_k": 5}),
    "file without one": ({"top_k": 5}, {"<end>": 8}, {"eos_token_id": [EOS, END], "top_k": 5}),
    "made by transformers": (
        {"_from_model_config": True, "eos_token_id": EOS},
        {"<end>": 8},
        {"eos_token_id": [EOS, END]},
    ),
    "known": ({}, {"<eos>": 8}, None),
    "rare": ({}, {"<eos>": 1000, "<end>": 3}, None),
    "nothing": ({}, {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_generation_stops_at_the_tokens_that_end_trained_text(
    architecture: Architecture, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """Catches an end token that is lost, added twice or without a line, and other settings that are lost."""
    generation, end_tokens, expected = CASES[case]
    before = replace(architecture, generation=generation)
    with caplog.at_level("INFO"):
        after = with_end_tokens(before, end_tokens)
    assert after.generation == (generation if expected is None else expected)
    assert ("generation_config.json" in after.files_beside_adapter()) == (expected is not None)
    lines = [message for message in caplog.messages if "generation_config.json" in message]
    assert len(lines) == (expected is not None)
    assert all("stops at <eos> (256), but its trained text ends with <end> (257)" in line for line in lines)
    assert with_end_tokens(after, end_tokens).generation == after.generation
