"""Texts that are tokenized in windows: the same tokens and masks as for the whole text, in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from xorl.data.formats import load_tokenizer
from xorl.data.formats import spans as spans_module
from xorl.data.formats.spans import Rendered
from xorl.data.formats.windows import encode_in_windows


def trained_bpe(pre_tokenizer) -> Tokenizer:
    """A tokenizer that merges, trained on this file."""
    core = Tokenizer(models.BPE(unk_token=None))
    core.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([Path(__file__).read_text()], trainer)
    return core


LONG_TEXTS = {
    "prose": Path(__file__).read_text() * 2,
    "special tokens": "A word.<|end|>Another, and more\n" * 700,
    "other scripts": "Żółć 你好世界 🙂🙂 naïve\t" * 900,
    "one endless word": "abcab" * 5000,
    "one letter": "a" * 20_000,
    "spaces": " " * 9000 + "x" + "\n" * 9000,
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
@pytest.mark.parametrize("pieces", ["bytes", "words"])
def test_a_long_text_has_the_tokens_that_it_has_as_a_whole(text: str, pieces: str) -> None:
    """Catches a text that is cut inside a word, or tokens that are lost or doubled where two windows meet."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core = trained_bpe(by_bytes if pieces == "bytes" else pre_tokenizers.Metaspace())
    whole = core.encode(text, add_special_tokens=False)
    for window_chars in (900, 4000):
        found = encode_in_windows(text, core, with_offsets=True, window_chars=window_chars, overlap_chars=600)
        assert found.ids.tolist() == whole.ids
        assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == whole.offsets
    assert encode_in_windows(text, core, with_offsets=False).ids.tolist() == whole.ids


@pytest.mark.parametrize("spans", [None, ((3, 1000), (5000, 5001), (9000, 60_000))])
def test_a_long_row_is_masked_like_a_short_one(text_options, spans) -> None:
    """Catches a mask that shifts in rows that are tokenized in windows."""
    tokenizer = load_tokenizer(text_options.tokenizer_folder)
    row = Rendered("Żółty <|end|> word, " * 4000, spans)
    whole = spans_module._encode([row], tokenizer)
    long = spans_module._encode_long(row, tokenizer)
    assert np.array_equal(long.ids, whole.ids)
    assert np.array_equal(long.trained, whole.trained)
    assert (long.lengths, long.num_straddling) == (whole.lengths, whole.num_straddling)


def test_the_memory_of_a_long_row_stays_within_ten_times_its_text(text_options, tmp_path: Path) -> None:
    """Catches a row whose tokens are held as objects, hundreds of bytes each."""
    path, num_bytes = tmp_path / "rows.jsonl", 4 << 20
    path.write_text(json.dumps({"text": ("A sentence of several words. " * num_bytes)[:num_bytes]}) + "\n")
    program = (
        "import sys; from pathlib import Path; from xorl.data import DatasetEntry, PrepareOptions, prepare;"
        "from xorl.data.formats import load_tokenizer;"
        "peak = lambda: next(int(s.split()[1]) for s in open('/proc/self/status') if s.startswith('VmHWM')) << 10;"
        "load_tokenizer(Path(sys.argv[2])); before = peak();"
        "options = PrepareOptions(64, tokenizer_folder=Path(sys.argv[2]), prepared_path=Path(sys.argv[3]));"
        "prepare([DatasetEntry(sys.argv[1], type='text', overflow='split')], options); print(peak() - before)"
    )
    arguments = [str(path), str(text_options.tokenizer_folder), str(tmp_path / "prepared")]
    # By default, glibc raises this threshold during the run, and large freed buffers stay in a fragmented heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Windows, and the imports of the first document, have a size of their own, which such a small text does not hide.
    assert int(done.stdout) < 10 * num_bytes + (32 << 20)
