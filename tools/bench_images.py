"""Benchmarks of models that read images: makes real JPEGs and rows of which half of the tokens are parts of images.

    uv run tools/bench_images.py [--parts frozen trained text] [--divisor 3] [--output FOLDER] [OPTIONS OF xorl bench]

The shape is that of Qwen3-VL-8B, with a third of the layers of its decoder and of its encoder by default, so that each
part takes less than two minutes on a GPU; --divisor 1 has all of them, and --tiny is for a CPU. Rows have 8,192 tokens;
each conversation has a JPEG of 512 to 1,280 pixels on a side, and as many tokens of text. Run beside transformers with
Liger and FlashAttention 4, which must be installed:

    uv run --with liger-kernel tools/bench_images.py --record docs/records/images.md

Parts: with the encoder frozen (train.freeze_encoders, the default of a run), with the encoder trained, and rows of text
alone, beside the same decoder without an encoder: `xorl` in its table is with the encoder, and the other row without.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from workspace import ROOT

TOKENIZER = ROOT / "configs" / "quickstart_vision"
PARTS = ("frozen", "trained", "text")
SEED = 0
# Tokens of rows, which a step has one of.
ROW = {False: 8192, True: 512}
PIXELS = {False: (512, 1280), True: (48, 112)}
# The square of pixels that becomes one token.
FACTOR = 32
TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
VISION = {
    "model_type": "qwen3_vl_vision",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
}
TINY_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY_VISION = {"hidden_size": 48, "intermediate_size": 64, "num_heads": 4, "num_position_embeddings": 64}
THETA = 5_000_000.0


def main() -> int:
    """Makes what the parts need and runs `xorl bench` for each; returns its first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--divisor", type=int, default=3, help="the layers of both stacks are divided by it")
    parser.add_argument("--tiny", action="store_true", help="a shape and images for a CPU")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", default="transformers-liger-fa4")
    parser.add_argument("--record", help="a Markdown file to append to")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_images"))
    options, further = parser.parse_known_args()
    folder = options.output.absolute()
    write_models(folder, options.divisor, tiny=options.tiny)
    write_rows(folder, (options.steps + options.warmup + 2) * ROW[options.tiny], tiny=options.tiny)
    for part in options.parts:
        config = folder / f"images_{part}.yaml"
        # JSON is YAML.
        config.write_text(json.dumps(config_of(folder, part, tiny=options.tiny), indent=2))
        against = ["--against", f"model.config_path={folder / 'text'}"] if part == "text" else []
        peers = ["--peers", options.peers] if options.peers and part != "text" else []
        record = ["--record", options.record] if options.record else []
        counts = [f"--{name}={getattr(options, name)}" for name in ("steps", "warmup", "rounds")]
        command = ["bench", str(config), "--output", str(folder / part), *counts, *peers, *against, *record]
        program = [sys.executable, "-c", "from xorl.cli.app import main; main()", *command]
        code = subprocess.run([*program, *[each for each in further if each != "--"]], cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


def write_models(folder: Path, divisor: int, *, tiny: bool) -> None:
    """Writes the folders of the model and of its decoder alone, without weights."""
    placeholder = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).token_to_id("<|image_pad|>")
    known = json.loads((TOKENIZER / "config.json").read_text())
    assert placeholder in (None, known["image_token_id"]), "the tokenizer's own config.json says the same"
    text = {**TEXT, **(TINY_TEXT if tiny else {}), "num_hidden_layers": max(4, TEXT["num_hidden_layers"] // divisor)}
    if tiny:
        text |= {"vocab_size": 512, "head_dim": 16, "num_hidden_layers": 4}
    third = text["head_dim"] // 2 // 3
    sections = [text["head_dim"] // 2 - 2 * third, third, third]
    if not tiny:
        sections = [24, 20, 20]
    vision = {**VISION, **(TINY_VISION if tiny else {}), "depth": 3 if tiny else max(3, VISION["depth"] // divisor)}
    vision |= {"out_hidden_size": text["hidden_size"]}
    third = vision["depth"] // 3
    vision["deepstack_visual_indexes"] = [third - 1, 2 * third - 1, vision["depth"] - 1][: text["num_hidden_layers"]]
    rope = {"rope_type": "default", "rope_theta": THETA}
    axes = {**rope, "mrope_section": sections, "mrope_interleaved": True}
    whole = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": known["image_token_id"],
        "video_token_id": known["video_token_id"],
        "vision_start_token_id": known["vision_start_token_id"],
        "vision_end_token_id": known["vision_end_token_id"],
        "text_config": {"model_type": "qwen3_vl_text", **text, "rope_parameters": axes},
        "vision_config": vision,
        "tie_word_embeddings": False,
    }
    alone = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **text, "rope_parameters": rope}
    for name, values in (("model", whole), ("text", {**alone, "tie_word_embeddings": False})):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(values, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).write_bytes((TOKENIZER / name).read_bytes())
    processor = json.loads((TOKENIZER / "preprocessor_config.json").read_text())
    low, high = PIXELS[tiny]
    processor |= {"patch_size": 16, "size": {"shortest_edge": low**2 // 4, "longest_edge": 4 * high**2}}
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def write_rows(folder: Path, num_tokens: int, *, tiny: bool) -> None:
    """Writes conversations of `num_tokens` tokens in all, half of them of images, and their JPEGs."""
    generator = np.random.default_rng(SEED)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    words = ["red", "blue", "circle", "square", "and", "a", "two", "is", "green", "left", "right"]
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    total = 0
    while total < num_tokens:
        width, height = (int(side) for side in generator.integers(*PIXELS[tiny], 2))
        of_image = round(width / FACTOR) * round(height / FACTOR)
        text = ""
        while len(tokenizer.encode(text, add_special_tokens=False).ids) < of_image:
            text += " ".join(generator.choice(words, max(1, of_image // 8))) + " "
        name = f"images/{len(rows)}.jpg"
        (folder / name).write_bytes(jpeg(width, height, generator))
        question = [{"type": "image", "path": name}, {"type": "text", "text": "what is in the picture?"}]
        answer = {"role": "assistant", "content": text.strip()}
        rows.append({"messages": [{"role": "user", "content": question}, answer]})
        total += 2 * of_image
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def jpeg(width: int, height: int, generator: np.random.Generator) -> bytes:
    """A picture of smooth colors with noise, about as large as a photo."""
    rows, columns = np.meshgrid(np.linspace(0, 9, height), np.linspace(0, 7, width), indexing="ij")
    phases = generator.uniform(1, 4, 3)
    values = np.stack([np.sin(rows * phase) + np.cos(columns * phase) for phase in phases], -1)
    values = values * 60 + 128 + generator.normal(0, 12, values.shape)
    file = io.BytesIO()
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def config_of(folder: Path, part: str, *, tiny: bool) -> dict[str, object]:
    """The configuration of a part."""
    dataset = {"path": "dummy"} if part == "text" else {"path": str(folder / "rows.jsonl"), "type": "chat"}
    return {
        "model": {"config_path": str(folder / "model"), "tokenizer_path": str(folder / "model")},
        "data": {
            "datasets": [dataset],
            "sample_packing_sequence_len": ROW[tiny],
            "dataset_prepared_path": str(folder / "prepared"),
            "dataset_num_proc": 1,
            "dataloader_num_workers": 0 if tiny else 8,
        },
        "train": {
            "output_dir": str(folder / "run"),
            "data_parallel_mode": "none",
            "optimizer": "adamw",
            "lr": 1e-5,
            "max_grad_norm": 1.0,
            "enable_mixed_precision": True,
            "param_dtype": "bf16",
            "enable_gradient_checkpointing": False,
            "enable_compile": not tiny,
            "log_format": "structured",
            **({"freeze_encoders": False} if part == "trained" else {}),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
