"""Tiny runs of `xorl train` on images: a model's folder with its tokenizer and image processor, and rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from image_models import END, IMAGE, MEAN, MERGE, PATCH, START, STD, image_config, make_composed_model, make_image_model
from tiny_runs import run_values
from xorl.ckpt import CheckpointError
from xorl.config import ConfigError, config_from_mapping
from xorl.train import build_run, train

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|start|><|image|><|stop|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz .?ABCDEFGH"


def write_tokenizer(folder: Path, image: str = "<|image|>") -> None:
    """A tokenizer of letters, whose special tokens have the ids of the tiny models; `image` stands for images."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_of = {
        letter: pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(letter)[0][0] for letter in LETTERS
    }
    newline = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    vocab = {letter: number for number, letter in enumerate([*byte_of.values(), newline])}
    rest = sorted(set(alphabet) - set(vocab))
    vocab |= {letter: len(vocab) + number for number, letter in enumerate(rest[: 85 - len(vocab)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"<|end|>": 85, "<|user|>": 86, "<|assistant|>": 87, "<|system|>": 88, "<|pad|>": 89}
    special |= {image: IMAGE, "<|video|>": 91, "<|start|>": START, "<|stop|>": END}
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    assert {text: tokenizer.token_to_id(text) for text in special} == special
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    config["chat_template"] = TEMPLATE.replace("<|image|>", image)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|pad|>"}))


def write_image_folder(folder: Path, *, weights: bool = True) -> Path:
    """A model's folder, with or without weights."""
    folder.mkdir(parents=True)
    if weights:
        make_image_model().save_pretrained(folder)
    else:
        image_config().save_pretrained(folder)
    write_tokenizer(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 512},
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def write_composed_folders(folder: Path, tower: str, *, image: str = "<image>") -> Path:
    """A language model in `folder`/model and an image encoder in `folder`/encoder; clip is one with a text model."""
    composed = make_composed_model(tower)
    text = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**composed.config.text_config.to_dict()))
    text.model.load_state_dict(composed.model.language_model.state_dict())
    text.lm_head.load_state_dict(composed.lm_head.state_dict())
    text.save_pretrained(folder / "model")
    write_tokenizer(folder / "model", image)
    vision = composed.model.vision_tower
    if tower == "clip":
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.CLIPConfig(vision_config=vision.config.to_dict(), text_config=sizes, projection_dim=24)
        whole = transformers.CLIPModel(config)
        whole.vision_model.load_state_dict(vision.state_dict())
        whole.save_pretrained(folder / "encoder")
    else:
        vision.save_pretrained(folder / "encoder")
    side = 3 * PATCH
    sizes = {"crop_size": {"height": side, "width": side}, "size": {"shortest_edge": side}, "do_center_crop": True}
    processor = {"image_processor_type": "CLIPImageProcessor", **sizes}
    if tower != "clip":
        processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": side, "width": side}}
    values = json.dumps({**processor, "image_mean": MEAN, "image_std": STD, "resample": 3})
    (folder / "encoder" / "preprocessor_config.json").write_text(values)
    return folder


def write_image_rows(folder: Path, num_rows: int, *, with_images: bool = True) -> Path:
    """Conversations about none to two images in `folder`, of different sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    rows = []
    for index in range(num_rows):
        parts = []
        for number in range(index % 3 if with_images else 0):
            height, width = (int(side) for side in generator.integers(8, 30, 2))
            name = f"image_{index}_{number}.png"
            Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8)).save(folder / name)
            parts.append({"type": "image", "path": name})
        question = "what is it" + " and this" * (index % 4)
        answer = "it is " + "abcdefgh"[index % 8] * (1 + index % 5)
        content = [*parts, {"type": "text", "text": question}] if parts else question
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def image_run(folder: Path, output: Path, **train: object) -> dict[str, dict[str, object]]:
    """The options of a run of `folder`/model on the rows in `folder`/data."""
    data = {
        "datasets": [{"path": str(folder / "data" / "rows.jsonl"), "type": "chat"}],
        "sample_packing_sequence_len": 96,
    }
    options = {"enable_gradient_checkpointing": False, "save_hf_weights": True, **train}
    return run_values(folder, output, model={"model_path": str(folder / "model")}, data=data, **options)


def export_of(values: Mapping[str, object]) -> Path:
    """The export of a run with these options, which ends; as one rank computes it."""
    config = config_from_mapping(dict(values)).config
    train(build_run(config))
    return Path(config.train.output_dir) / "checkpoints" / f"global_step_{config.train.max_steps}-export"


def refusal_of(values: Mapping[str, object]) -> str:
    """Why a run with these options does not start."""
    with pytest.raises((ValueError, ConfigError, CheckpointError)) as error:
        build_run(config_from_mapping(dict(values)).config)
    return str(error.value)


def opened(folder: Path) -> transformers.PreTrainedModel:
    """As transformers opens it; nothing may be missing or left over."""
    model, loaded = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loaded[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    model.set_attn_implementation("eager")
    return model.eval()
