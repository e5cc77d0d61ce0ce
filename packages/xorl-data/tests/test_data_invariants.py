"""What stops a run before its first step, and what an entry may ask for in its place."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from data_files import write_tokenizer
from xorl.data import DataError
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


def refused(message):
    """A context in which data is refused, unless the message is None."""
    return nullcontext() if message is None else pytest.raises(DataError, match=message)


@pytest.mark.parametrize(("entry", "message"), OVERFLOWS.values(), ids=OVERFLOWS)
def test_losses_to_length_stop_a_run_that_did_not_ask_for_them(prepare_rows, options, entry, message):
    """Catches data that is lost with one line of log because a length is too short for it."""
    with refused(message):
        assert prepare_rows(ROWS, replace(options, bin_len=16), **entry).receipt.total.samples == 100


def test_splitting_few_samples_of_many_tokens_stops_a_run_too(prepare_rows, options):
    """Catches a limit that counts samples alone, while most of the text stands in a few that are torn apart."""
    book = {"input_ids": [*range(1, 901)], "labels": [-100, *range(2, 901)]}
    with pytest.raises(DataError, match=r"1 of the 200 samples .* be split, and 900 of 1497 tokens separated"):
        prepare_rows([*[SHORT] * 199, book], replace(options, bin_len=16), overflow="split")


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


@pytest.mark.parametrize(("labels", "message"), LABELS.values(), ids=LABELS)
def test_labels_that_are_not_aligned_stop_a_run(prepare_rows, labels, message):
    """Catches labels that were shifted before, after which a model learns to skip every other token."""
    with refused(message):
        assert len(prepare_rows([{"input_ids": IDS, "labels": labels}] * 2)) == 2


def test_prompts_that_are_trained_unasked_stop_a_run(prepare_rows, text_options):
    """Catches a prompt column that is empty, or the wrong one, so that the model learns to answer nothing."""
    rows, kind = [{"prompt": "", "completion": "abc"}] * 5, "prompt_completion"
    with pytest.raises(DataError, match=r"in 5 of the 5 samples of .* every token is trained, the prompt included"):
        prepare_rows(rows, text_options, type=kind)
    # A prompt of one token is a prompt, unless that is what every text begins with.
    for prompt, message in (("a", None), ("<|begin|>", "every token is trained")):
        with refused(message):
            prepare_rows([{"prompt": prompt, "completion": "abc"}] * 5, text_options, type=kind)
    assert prepare_rows(rows, text_options, type=kind, train_on="all").receipt.total.samples == 5


def test_a_document_ends_once_and_says_where_it_cannot(prepare_rows, tmp_path, text_options, caplog):
    """Catches a second EOS after one that the data holds already, and documents without any that nobody hears of."""
    rows, answers = [{"text": "ab"}, {"text": "ab<|end|>"}], [{"prompt": "abc", "completion": "d<|end|>"}]
    assert prepare_rows(rows, text_options, type="text").lengths.tolist() == [3, 3]
    assert prepare_rows(answers, text_options, type="prompt_completion").lengths.tolist() == [5]
    endless = replace(text_options, tokenizer_folder=write_tokenizer(tmp_path / "endless", eos=None))
    prepare_rows(rows, endless, type="text")
    assert "the tokenizer has no eos_token, so documents have no end token" in caplog.text


def test_ids_of_text_are_checked_against_the_model(prepare_rows, text_options):
    """Catches a tokenizer that is larger than the model's embedding, whose new tokens nobody names."""
    refusal = (
        r"row 0 .* writes '<\|end\|>' as id 257, but the model's vocab_size is 257.* has 263 tokens and the model 257 "
        r"rows .* none of them for <\|end\|> \(257\), .*, 1 more\. If .*resize_token_embeddings"
    )
    rows, smaller = [{"text": "abc"}], replace(text_options, vocab_size=257)
    with pytest.raises(DataError, match=refusal):
        prepare_rows(rows, smaller, type="text")
    assert len(prepare_rows(rows, text_options, type="text")) == 1
    for cached in (smaller, replace(smaller, skip_prepare=True)):
        with pytest.raises(DataError, match=refusal):
            prepare_rows(rows, cached, type="text")


def test_tokens_that_the_model_lacks_are_named_if_the_data_does_not_use_them(prepare_rows, text_options, caplog):
    """Catches a tokenizer that is exported beside a model that fails on its tokens."""
    prepare_rows([{"text": "abc"}], replace(text_options, vocab_size=262), type="text")
    assert "263 tokens and the model 262 rows in its embeddings and its head, none of them for <|pad|> (262)" in (
        caplog.text
    )
    caplog.clear()
    prepare_rows([{"text": "abc"}], replace(text_options, vocab_size=263), type="text")
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


@pytest.mark.parametrize(("hf_config", "message"), SPECIAL.values(), ids=SPECIAL)
def test_tokenizer_and_model_agree_about_special_tokens(prepare_rows, text_options, hf_config, message):
    """Catches a model that is taught one end token and is served with another, and never stops."""
    options = replace(text_options, model_special_ids=special_ids(hf_config))
    with refused(message):
        assert len(prepare_rows([{"text": "abc"}], options, type="text")) == 1
