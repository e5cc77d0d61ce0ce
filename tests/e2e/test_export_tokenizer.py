"""The tokenizer of an exported model: that beside its adapter if it is complete, else that of the base."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from saved_models import save_peft_adapter
from xorl.train.export.saved import export_saved

FILES = {
    "complete": ({"tokenizer.json", "tokenizer_config.json"}, None),
    "only a vocabulary": ({"tokenizer.json"}, "lacks tokenizer_config.json"),
    "only a configuration": ({"tokenizer_config.json"}, "lacks a vocabulary, such as tokenizer.json"),
    "half a vocabulary": ({"tokenizer_config.json", "vocab.json"}, "lacks a vocabulary"),
    "none": (set(), None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a model with a tokenizer, `adapter` on it, and `other`, the files of another tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, **sizes))
    model.save_pretrained(root / "base")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for name, eos in (("base", "<eos>"), ("other", "<end>")):
        core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos).save_pretrained(root / name)
    (root / "other" / "vocab.json").write_text("{}")
    save_peft_adapter(LlamaForCausalLM.from_pretrained(root / "base"), root / "adapter", target_modules=["q_proj"])
    return root


@pytest.mark.parametrize("case", FILES)
def test_a_part_of_a_tokenizer_does_not_replace_that_of_the_base(
    case: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a model that is exported with half of a tokenizer, which transformers completes with a guess."""
    names, problem = FILES[case]
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "adapter", adapter)
    for name in names:
        shutil.copy(folder / "other" / name, adapter / name)
    exported = export_saved(str(adapter), str(tmp_path / "merged"), merge=True)
    eos = json.loads((exported / "tokenizer_config.json").read_text())["eos_token"]
    assert eos == ("<end>" if case == "complete" else "<eos>")
    assert (exported / "tokenizer.json").is_file()
    if problem is None:
        assert "tokenizer=the base's" not in caplog.text
    else:
        assert problem in caplog.text


def test_end_tokens_beside_an_adapter_follow_it(folder: Path, tmp_path: Path) -> None:
    """Catches end tokens that an adapter was trained with, and that its copies and merged models forget."""
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "adapter", adapter)
    (adapter / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    copied = export_saved(str(adapter), str(tmp_path / "copied"), merge=False)
    assert "eos_token_id` of the one in this folder" in (copied / "README.md").read_text()
    for exported in (copied, export_saved(str(copied), str(tmp_path / "merged"), merge=True)):
        assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [256, 257]
