"""What stops a run before its first step, and what an entry may ask for in its place."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.invariants import special_ids

SHORT = {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
LONG = {"input_ids": list(range(1, 21)), "labels": [-100, *range(2, 21)]}
# Of 100 rows two are too long for a bin of 16.
ROWS = [*[SHORT] * 98, LONG, LONG]
OVERFLOWS = {
    "truncate": ({}, r"2 of the 100 samples of .* longer than bin_len = 16 and would be cut"),
    "truncate on purpose": ({"max_seq_len": 16}, None),
    "drop": ({"overflow": "drop"}, r"would be dropped, and 40 of 334 tokens lost: more than 1.00%"),
    "drop at a length": ({"overflow": "drop", "max_seq_len": 16}, r"would be dropped"),
    "drop accepted": ({"overflow": "drop", "overflow_limit": 0.2}, None),
    "drop beyond what is accepted": ({"overflow": "drop", "overflow_limit": 0.05}, r"more than 5.00%"),
    "split": ({"overflow": "split"}, r"would be split, and 40 of 334 tokens separated"),
    "split of plain text": ({"overflow": "split", "columns": ("input_ids",)}, None),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_losses_to_length_stop_a_run_that_did_not_ask_for_them(tmp_path, options, write_jsonl, name):
    """Catches data that is lost with one line of log because a length is too short for it."""
    entry, message = OVERFLOWS[name]
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    prepared = DatasetEntry(str(path), **entry)
    if message is None:
        assert prepare([prepared], replace(options, bin_len=16)).receipt.total.samples == 100
    else:
        with pytest.raises(DataError, match=message):
            prepare([prepared], replace(options, bin_len=16))


def test_splitting_few_samples_of_many_tokens_stops_a_run_too(tmp_path, options, write_jsonl):
    """Catches a limit that counts samples alone, while most of the text stands in a few that are torn apart."""
    book = {"input_ids": [*range(1, 901)], "labels": [-100, *range(2, 901)]}
    path = str(write_jsonl(tmp_path / "rows.jsonl", [*[SHORT] * 199, book]))
    with pytest.raises(DataError, match=r"1 of the 200 samples .* be split, and 900 of 1497 tokens separated"):
        prepare([DatasetEntry(path, overflow="split")], replace(options, bin_len=16))


IDS = list(range(1, 11))
LABELS = {
    "aligned": ([-100, -100, *IDS[2:]], None),
    "one replaced": ([-100, *IDS[1:9], 99], None),
    "shifted": ([*IDS[1:], 99], r"in 2 of the 2 samples .* labels equal the next token: they are already shifted"),
    "shifted and masked": ([-100] * 4 + [*IDS[5:], -100], r"labels equal the next token"),
    "of others": (
        [-100, *IDS[:0:-1]],
        r"most labels differ from the token at the same position. Provide labels that are aligned",
    ),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_are_not_aligned_stop_a_run(tmp_path, options, write_jsonl, name):
    """Catches labels that were shifted before, after which a model learns to skip every other token."""
    labels, message = LABELS[name]
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": IDS, "labels": labels}] * 2))
    if message is None:
        assert len(prepare([DatasetEntry(path)], options)) == 2
    else:
        with pytest.raises(DataError, match=message):
            prepare([DatasetEntry(path)], options)


def test_prompts_that_are_trained_unasked_stop_a_run(tmp_path, text_options, write_jsonl):
    """Catches a prompt column that is empty, or the wrong one, so that the model learns to answer nothing."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "", "completion": "abc"}] * 5))
    with pytest.raises(DataError, match=r"in 5 of the 5 samples of .* every token is trained, the prompt included"):
        prepare([DatasetEntry(path, type="prompt_completion")], text_options)
    # A prompt of one token is a prompt, unless that is what every text begins with.
    for prompt, stops in (("a", False), ("<|begin|>", True)):
        short = str(write_jsonl(tmp_path / f"{stops}.jsonl", [{"prompt": prompt, "completion": "abc"}] * 5))
        with pytest.raises(DataError, match="every token is trained") if stops else nullcontext():
            prepare([DatasetEntry(short, type="prompt_completion")], text_options)
    assert (
        prepare([DatasetEntry(path, type="prompt_completion", train_on="all")], text_options).receipt.total.samples == 5
    )


def test_a_document_ends_once_and_says_where_it_cannot(tmp_path, text_options, write_jsonl, write_tokenizer, caplog):
    """Catches a second EOS after one that the data holds already, and documents without any that nobody hears of."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab"}, {"text": "ab<|end|>"}]))
    assert prepare([DatasetEntry(path, type="text")], text_options).lengths.tolist() == [3, 3]
    answers = str(write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "abc", "completion": "d<|end|>"}]))
    assert prepare([DatasetEntry(answers, type="prompt_completion")], text_options).lengths.tolist() == [5]
    endless = replace(text_options, tokenizer_folder=write_tokenizer(tmp_path / "endless", eos=None))
    prepare([DatasetEntry(path, type="text")], endless)
    assert "the tokenizer has no eos_token, so documents have no end token" in caplog.text


def test_ids_of_text_are_checked_against_the_model(tmp_path, text_options, write_jsonl):
    """Catches a tokenizer that is larger than the model's embedding, whose new tokens nobody names."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": "abc"}]))
    refusal = (
        r"row 0 .* writes '<\|end\|>' as id 257, but the model's vocab_size is 257.* has 263 tokens and the model 257 "
        r"rows .* none of them for <\|end\|> \(257\), .*, 1 more\. If .*resize_token_embeddings"
    )
    entries, smaller = [DatasetEntry(path, type="text")], replace(text_options, vocab_size=257)
    with pytest.raises(DataError, match=refusal):
        prepare(entries, smaller)
    assert len(prepare(entries, text_options)) == 1
    for cached in (smaller, replace(smaller, skip_prepare=True)):
        with pytest.raises(DataError, match=refusal):
            prepare(entries, cached)


def test_tokens_that_the_model_lacks_are_named_if_the_data_does_not_use_them(
    tmp_path, text_options, write_jsonl, caplog
):
    """Catches a tokenizer that is exported beside a model that fails on its tokens."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": "abc"}]))
    prepare([DatasetEntry(path, type="text")], replace(text_options, vocab_size=262))
    assert "263 tokens and the model 262 rows in its embeddings and its head, none of them for <|pad|> (262)" in (
        caplog.text
    )
    caplog.clear()
    prepare([DatasetEntry(path, type="text")], replace(text_options, vocab_size=263))
    assert "rows" not in caplog.text


SPECIAL = {
    "agrees": ({"bos_token_id": 256, "eos_token_id": 257}, None),
    "one of several": ({"eos_token_id": [3, 257]}, None),
    "silent": ({"eos_token_id": None, "vocab_size": 300}, None),
    "other end": (
        {"eos_token_id": 256},
        r"the eos_token of the tokenizer in .* is '<\|end\|>', id 257, but .* 256 \('<\|begin",
    ),
    "other ends": ({"eos_token_id": [3, 4]}, r"eos_token_id \[3, 4\]"),
    "other beginning": ({"bos_token_id": 5}, r"the bos_token of the tokenizer"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_tokenizer_and_model_agree_about_special_tokens(tmp_path, text_options, write_jsonl, name):
    """Catches a model that is taught one end token and is served with another, and never stops."""
    hf_config, message = SPECIAL[name]
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": "abc"}]))
    options = replace(text_options, model_special_ids=special_ids(hf_config))
    if message is None:
        assert len(prepare([DatasetEntry(path, type="text")], options)) == 1
    else:
        with pytest.raises(DataError, match=message):
            prepare([DatasetEntry(path, type="text")], options)
