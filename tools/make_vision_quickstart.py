"""Writes the data of the quickstart with images: `uv run tools/make_vision_quickstart.py [--out FOLDER]`.

Draws pictures of two shapes and asks what is in them, as conversations with the pictures inside, and trains a tokenizer
on the texts. The model's config.json and its image processor's settings beside them are written by hand.
"""

import argparse
import base64
import io
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workspace import ROOT

OUT = ROOT / "configs" / "quickstart_vision"
SEED = 0
NUM_TRAIN, NUM_HELDOUT = 2000, 100
SIDE = 32  # pixels of the square for each shape
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTION = "what is in the picture"
END, PAD, IMAGE, START, STOP = "<|end|>", "<|pad|>", "<|image|>", "<|image_start|>", "<|image_end|>"
SPECIAL = [END, PAD, "<|user|>", "<|assistant|>", IMAGE, START, STOP]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    f"{START}{IMAGE}{STOP}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def draw(
    canvas: ImageDraw.ImageDraw, shape: str, color: tuple[int, int, int], left: int, uniform: random.Random
) -> None:
    """Draws a shape of random size and place into the square whose left edge is `left`."""
    size = 16 + int(uniform.random() * 10)
    x = left + 2 + int(uniform.random() * (SIDE - 4 - size))
    y = 2 + int(uniform.random() * (SIDE - 4 - size))
    box = (x, y, x + size, y + size)
    if shape == "circle":
        canvas.ellipse(box, fill=color)
    elif shape == "square":
        canvas.rectangle(box, fill=color)
    elif shape == "triangle":
        canvas.polygon([(x + size / 2, y), (x + size, y + size), (x, y + size)], fill=color)
    else:
        third = size // 3
        canvas.rectangle((x + third, y, x + 2 * third, y + size), fill=color)
        canvas.rectangle((x, y + third, x + size, y + 2 * third), fill=color)


def make_row(uniform: random.Random) -> dict[str, object]:
    """A conversation about a picture."""
    image = Image.new("RGB", (2 * SIDE, SIDE), (255, 255, 255))
    canvas, names = ImageDraw.Draw(image), []
    for left in (0, SIDE):
        color = list(COLORS)[int(uniform.random() * len(COLORS))]
        shape = SHAPES[int(uniform.random() * len(SHAPES))]
        draw(canvas, shape, COLORS[color], left, uniform)
        names.append(f"a {color} {shape}")
    file = io.BytesIO()
    image.quantize(16).save(file, "PNG", optimize=True)
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    question = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    answer = " and ".join(names)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE in which every word of the texts is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Writes all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    uniform = random.Random(SEED)
    for name, num_rows in (("heldout", NUM_HELDOUT), ("train", NUM_TRAIN)):
        rows = [json.dumps(make_row(uniform)) + "\n" for _ in range(num_rows)]
        (out / f"{name}.jsonl").write_text("".join(rows))
    words = [f"a {color} {shape} and a" for color in COLORS for shape in SHAPES]
    train_tokenizer([QUESTION, *words] * 4).save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
