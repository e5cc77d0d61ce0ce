"""Writes the golden results of chat templates: `uv run tools/make_chat_golden.py [--tokenizer]`.

tests/golden/chat contains a template in the style of each model family, conversations, and one small tokenizer with the
special tokens of all families. This tool writes expected.json beside them: for each family and conversation the token
ids, the trained ranges, and the trained text for reviewers. `--tokenizer` retrains the tokenizer.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from workspace import ROOT
from xorl.data import DataError
from xorl.data.formats import ChatFormat, TextTokenizer, load_tokenizer
from xorl.data.readers import LoadedChunk

FOLDER = ROOT / "tests" / "golden" / "chat"
VOCAB_SIZE = 512
LIMIT = 4096


@dataclass(frozen=True)
class Family:
    """The special tokens in a family's template."""

    eos: str
    bos: str | None = None


def _tokens() -> tuple[dict[str, Family], list[str], list[str]]:
    """Returns the families, all special tokens, and the added tokens that are not special."""
    tokens = json.loads((FOLDER / "tokens.json").read_text(encoding="utf-8"))
    families = {name: Family(own["eos"], own.get("bos")) for name, own in tokens["families"].items()}
    return families, tokens["special"].split(), tokens["added"].split()


FAMILIES, SPECIAL, ADDED = _tokens()


class Expected(TypedDict, total=False):
    """The result for a conversation: ids and trained ranges [from, to), or the reason why it is rejected."""

    ids: list[int]
    trained: list[list[int]]
    trained_text: list[str]
    refused: str


def conversations() -> dict[str, dict[str, list[dict[str, object]]]]:
    """The conversations by name, as rows of a dataset."""
    return json.loads((FOLDER / "conversations.json").read_text(encoding="utf-8"))


def write_tokenizer(family: str, folder: Path) -> TextTokenizer:
    """Writes the tokenizer with a family's special tokens and template to a folder, and loads it from there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    own = FAMILIES[family]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": own.eos, "clean_up_tokenization_spaces": False}
    if own.bos:
        config["bos_token"] = own.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_bytes((FOLDER / f"{family}.jinja").read_bytes())
    return load_tokenizer(folder)


def encode(row: Mapping[str, object], tokenizer: TextTokenizer) -> Expected:
    """Encodes one row with the chat format."""
    form = ChatFormat(LIMIT, "error", "limit", tokenizer)
    try:
        documents = form.encode(LoadedChunk("conversation", "row", 0, 0, [dict(row)]))
    except DataError as error:
        return {"refused": str(error).partition(": ")[2].replace(str(tokenizer.folder), "FOLDER")}
    ids = documents.input_ids
    assert documents.labels is not None
    marks = np.flatnonzero(np.diff(np.concatenate([[0], documents.labels != -100, [0]])))
    ranges = [[int(first), int(last)] for first, last in marks.reshape(-1, 2)]
    return {
        "ids": ids.tolist(),
        "trained": ranges,
        "trained_text": [tokenizer.core.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in ranges],
    }


def train_tokenizer() -> Tokenizer:
    """Trains a byte-level BPE with a few hundred merges on the conversations, with every family's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    num_added = len(SPECIAL) + len(ADDED)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - num_added,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [str(message["content"]) for row in conversations().values() for message in row["messages"]]
    tokenizer.train_from_iterator([*texts, *texts], trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="store_true", help="retrain the tokenizer")
    if parser.parse_args().tokenizer:
        train_tokenizer().save(str(FOLDER / "tokenizer.json"), pretty=False)
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for family in FAMILIES:
            tokenizer = write_tokenizer(family, Path(folder) / family)
            for name, row in conversations().items():
                line = json.dumps(encode(row, tokenizer), ensure_ascii=False)
                lines.append(f"{json.dumps(f'{family}/{name}')}: {line}")
    (FOLDER / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
