"""Writes sources of Python's standard library as a tokenized dataset, to continue training after `pydoc_topics.yaml`.

Run `uv run tools/source_corpus.py` after `uv run tools/pydoc_corpus.py`, whose tokenizer it uses. Sources differ
between versions of Python. Nothing is masked.
"""

import argparse
import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer

from pydoc_corpus import END, OUT, ROW_TOKENS, rows

# Files of moderate length by many authors, in the order of their names.
PATTERN = "[a-d]*.py"


def main() -> None:
    """Parses the command line and writes source.jsonl and source_heldout.jsonl beside the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=OUT, help="folder that contains the tokenizer, and to write to")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    assert tokenizer.token_to_id(END) is not None
    files = sorted(Path(sysconfig.get_path("stdlib")).glob(PATTERN))
    for name, part in (("source", files[::2]), ("source_heldout", files[1::8])):
        pieces = [piece for file in part for piece in rows(file.read_text(), tokenizer, ROW_TOKENS)]
        lines = [json.dumps({"input_ids": piece}) for piece in pieces]
        (options.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(part)} files, {len(pieces)} rows, {sum(map(len, pieces))} tokens")


if __name__ == "__main__":
    main()
