"""An export is the weights that were exported, under the names and in the files that readers look for."""

import json
import logging

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from xorl.ckpt import CheckpointError, SafetensorsSource, export_hf

CONFIG = {"architectures": ["X"], "hidden_size": 4, "torch_dtype": "float16"}


def test_one_file_holds_what_was_loaded_bit_for_bit(params, recipes, hf_tensors, tmp_path):
    # Catches merged or transposed parameters that come apart wrongly, and a dtype that config.json does not know of.
    folder = export_hf(params, recipes, tmp_path / "new" / "hf", hf_config=CONFIG)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    torch.testing.assert_close(load_file(folder / "model.safetensors"), hf_tensors, rtol=0, atol=0)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((folder / "config.json").read_text())
    assert config == {"architectures": ["X"], "hidden_size": 4, "dtype": "bfloat16"}


def test_several_files_have_the_index_that_readers_expect(params, recipes, hf_tensors, tmp_path):
    # Catches file names, totals or a map that do not agree with the files.
    folder = export_hf(params, recipes, tmp_path / "hf", hf_config=CONFIG, max_shard_bytes=90)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in hf_tensors.values())
    held = {name: file for file in files for name in load_file(folder / file)}
    assert held == index["weight_map"]
    with SafetensorsSource(folder) as source:
        for name, tensor in hf_tensors.items():
            assert torch.equal(source.read(name), tensor)


def test_dtype_is_cast_when_asked(params, recipes, hf_tensors, tmp_path):
    # Catches weights and config.json in different dtypes: from_pretrained casts to the latter.
    folder = export_hf(params, recipes, tmp_path / "hf", hf_config=CONFIG, dtype=torch.float32)
    written = load_file(folder / "model.safetensors")
    torch.testing.assert_close(written, {name: tensor.float() for name, tensor in hf_tensors.items()}, rtol=0, atol=0)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_files_of_the_tokenizer_come_along_and_no_others(params, recipes, tmp_path):
    # Catches a folder that from_pretrained cannot tokenise with, and a copy of someone's private files.
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "secret.env"):
        (tokenizer / name).write_text(f'"{name}"')
    folder = export_hf(
        params,
        recipes,
        tmp_path / "hf",
        hf_config=CONFIG,
        generation_config={"eos_token_id": [1, 2]},
        tokenizer_folder=tokenizer,
        model_card="# A model\n",
    )
    copied = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "README.md"}
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 4
    assert (folder / "tokenizer.json").read_text() == '"tokenizer.json"'
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize("trained_with", [None, "own"])
def test_chat_templates_come_along_or_give_way_to_the_one_trained_with(trained_with, params, recipes, tmp_path):
    # Catches a template for tools that is lost, and one that comes before the template that a model was trained with.
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "additional_chat_templates").mkdir(parents=True)
    (tokenizer / "chat_template.jinja").write_text("default")
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    # Processors prefer these to the template of the tokenizer.
    (tokenizer / "chat_template.json").write_text('{"chat_template": "default"}')
    (tokenizer / "processor_config.json").write_text('{"chat_template": "default", "image_seq_length": 4}')
    folder = export_hf(
        params, recipes, tmp_path / "hf", hf_config=CONFIG, tokenizer_folder=tokenizer, chat_template=trained_with
    )
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.jinja")}
    further = {"additional_chat_templates/tool_use.jinja": "tools"} if trained_with is None else {}
    assert found == {"chat_template.jinja": trained_with or "default", **further}
    assert (folder / "chat_template.json").exists() == (trained_with is None)
    processor = json.loads((folder / "processor_config.json").read_text())
    assert processor == {"image_seq_length": 4} | ({"chat_template": "default"} if trained_with is None else {})


def test_existing_folder_is_not_written_into(params, recipes, tmp_path):
    # Catches an export that mixes with an older one of more files.
    export_hf(params, recipes, tmp_path / "hf", hf_config=CONFIG)
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with pytest.raises(CheckpointError, match="hf already exists"):
        export_hf(params, recipes, tmp_path / "hf", hf_config=CONFIG)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    (tmp_path / "empty").mkdir()
    export_hf(params, recipes, tmp_path / "empty", hf_config=CONFIG)


def test_failed_export_leaves_nothing(params, recipes, tmp_path, caplog):
    # Catches a half written folder under the final name, and a temporary one that fills the disk.
    caplog.set_level(logging.INFO)
    with pytest.raises(RuntimeError, match=r"could not export to .*hf: TypeError"):
        export_hf(params, recipes, tmp_path / "out" / "hf", hf_config={"x": object()})
    assert list((tmp_path / "out").iterdir()) == []
    assert "event=exported" not in caplog.text
    with pytest.raises(CheckpointError, match="no recipe for extra"):
        export_hf({"extra": torch.zeros(1)}, recipes, tmp_path / "hf2", hf_config=CONFIG)
