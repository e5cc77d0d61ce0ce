"""Pairs of answers: which tokens they become, which are trained, which are refused, and how a batch holds them."""

import numpy as np
import pytest

from xorl.data import DataError, DataPlan, StepLoader, pack
from xorl.data.batch import IGNORE, PREFERENCE, Column, Document, collate
from xorl.data.formats import load_tokenizer
from xorl.data.pairs import CROSSED, REFERENCE, ScoredPairs, crossed, document_sums
from xorl.data.plan import fingerprint_of

USER = {"role": "user", "content": "Hi"}
GOOD, BAD = {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "No"}
GOOD_TEXT = "<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n"
BAD_TEXT = "<|user|>Hi<|end|>\n<|assistant|>No<|end|>\n"
MESSAGES = (GOOD_TEXT + BAD_TEXT, ["Hello<|end|>", "No<|end|>"])
TURN = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, USER]
SUM = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
SUM_TEXT = ("2+2=4<|end|>2+2=5<|end|>", ["4<|end|>", "5<|end|>"])
SAMPLES = {
    "text": (SUM, {}, SUM_TEXT),
    "recognised": ({**SUM, "score": 1}, {"type": "auto"}, SUM_TEXT),
    "other columns": (
        {"question": "2+2=", "good": "4", "bad": "5"},
        {"column_names": {"prompt": "question", "chosen": "good", "rejected": "bad"}},
        SUM_TEXT,
    ),
    "messages": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}, MESSAGES),
    "the prompt within the answers": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, MESSAGES),
    "also as text": ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, MESSAGES),
    "a prompt as text": ({"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]}, {}, MESSAGES),
    "several turns": (
        {"chosen": [*TURN, GOOD], "rejected": [*TURN, BAD]},
        {},
        (
            f"<|user|>A<|end|>\n<|assistant|>B<|end|>\n{GOOD_TEXT}<|user|>A<|end|>\n<|assistant|>B<|end|>\n{BAD_TEXT}",
            ["Hello<|end|>", "No<|end|>"],
        ),
    ),
    "a system message": (
        {"system": "Be kind.", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {},
        (f"<|system|>Be kind.<|end|>\n{GOOD_TEXT}<|system|>Be kind.<|end|>\n{BAD_TEXT}", ["Hello<|end|>", "No<|end|>"]),
    ),
}


@pytest.mark.parametrize(("row", "entry", "expected"), SAMPLES.values(), ids=SAMPLES)
def test_a_pair_is_both_answers_with_their_prompt(texts, prepare_rows, text_options, row, entry, expected):
    """Catches prompts that are trained, answers in the wrong order, and prompts lost from conversations."""
    entry = {"type": "preference", **entry}
    assert texts([row], **entry) == [expected]
    documents, tokenizer = prepare_rows([row], text_options, **entry), load_tokenizer(text_options.tokenizer_folder)
    side = documents.extras(0)[PREFERENCE]
    ids = documents.document(0)[0]
    chosen, rejected = (tokenizer.core.decode(ids[one].tolist(), False) for one in (side > 0, side < 0))
    text, trained = expected
    assert chosen + rejected == text
    assert trained[0] in chosen
    assert trained[1] in rejected


REFUSED = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, {}, "column 'rejected' does not exist"),
    "no prompt": ({"chosen": [GOOD], "rejected": [BAD]}, {}, "there is no prompt"),
    "an empty answer": ({**SUM, "rejected": ""}, {}, "line 1: column 'rejected' is empty"),
    "an empty column": ({**SUM, "good": ""}, {"column_names": {"chosen": "good"}}, "line 1: column 'good' is empty"),
    "no prompt of texts": (
        {"chosen": "a", "rejected": "b"},
        {},
        "column 'prompt' does not exist, want a string; the columns are: chosen, rejected",
    ),
    "equal texts": ({**SUM, "rejected": "4"}, {}, "line 1: the chosen .* are the same; remove"),
    "equal messages": ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, {}, "are the same"),
    "no message": ({"chosen": [USER, GOOD], "rejected": []}, {}, "column 'rejected' is an empty list"),
    "too long": (
        {**SUM, "chosen": "b" * 99},
        {"overflow": "error", "max_seq_len": 30},
        "or choose another overflow, such as drop$",
    ),
    "truncation": (SUM, {"overflow": "truncate"}, "would separate the answers of a pair; set it to drop or error"),
    "prompts that are trained": (SUM, {"train_on": "all"}, "train_on: all is not valid for type preference"),
    "untrained answers": (
        {"chosen": [USER, {**GOOD, "train": False}], "rejected": [USER, BAD]},
        {},
        "line 1: the chosen answer has no trained token",
    ),
}


@pytest.mark.parametrize(("row", "entry", "message"), REFUSED.values(), ids=REFUSED)
def test_pairs_are_refused(prepare_rows, row, entry, message, text_options):
    """Catches half a pair that is trained on, and options that would cut one."""
    with pytest.raises(DataError, match=message):
        prepare_rows([row], text_options, type="preference", **entry)


@pytest.mark.parametrize(
    ("row", "entry", "counted"),
    [
        ({**SUM, "chosen": "4" * 30}, {"max_seq_len": 30, "overflow_limit": 1.0}, "dropped"),
        ({"prompt": "a", "chosen": "b"}, {"skip_bad_rows": 0.5}, "skipped"),
    ],
)
def test_pairs_are_left_out_whole_and_counted(prepare_rows, text_options, row, entry, counted):
    """Catches pairs that lose a part, and pairs that vanish without being counted."""
    documents = prepare_rows([*[SUM] * 3, row], text_options, type="preference", **entry)
    assert (len(documents), getattr(documents.receipt.total, counted)) == (3, 1)


def test_answers_are_documents_of_a_batch(prepare_rows, text_options):
    """Catches answers that attend to each other, pairs in several bins, and labels across answers."""
    rows = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "no" * (1 + i % 4)} for i in range(30)]
    documents = prepare_rows(rows, text_options, type="preference")
    bins = pack(documents.lengths, bin_len=text_options.bin_len, method="multipack")
    plan = DataPlan.one_pass(documents, bins, bins_per_step=1)
    num_pairs = 0
    for _, [batch] in StepLoader(documents, bins, plan, micro_batch_size=1, pad_to_multiple_of=16).steps():
        side, starts = batch.targets[PREFERENCE], batch.cu_seqlens[: 2 * batch.num_pairs].long()
        assert len(batch.document_lengths) == 2 * batch.num_pairs
        assert side[starts].tolist() == [1.0, -1.0] * batch.num_pairs
        assert (batch.positions[starts] == 0).all()
        assert (batch.labels[batch.cu_seqlens[1:].long() - 1] == IGNORE).all()
        assert (side[batch.num_tokens :] == 0).all()
        num_pairs += batch.num_pairs
    assert num_pairs == 30


def test_other_batches_have_no_pairs():
    """Catches a count of pairs where rows are single documents."""
    document = Document(np.arange(4), np.arange(4))
    assert collate([document, document]).num_pairs == 0


def pairs_of(num):
    """Stored pairs of distinct ids: prompts from 100, chosen answers from 200, rejected ones from 300, per pair."""
    documents = []
    for index in range(num):
        prompt = np.arange(100, 102 + index) + 1000 * index
        sides = [np.append(prompt, np.arange(base, base + 3 + index) + 1000 * index) for base in (200, 300)]
        labels = [np.where(np.arange(len(side)) < len(prompt), IGNORE, side) for side in sides]
        side = np.repeat(np.array([1, -1], np.float32), [len(each) for each in sides])
        documents.append(Document(np.concatenate(sides), np.concatenate(labels), {PREFERENCE: side}))
    return documents


def test_crossed_rows_have_the_answer_of_the_next_pair():
    """Catches answers to their own prompts, labels off by one, and rows that outgrow their batch."""
    batch = collate(pairs_of(3), columns={PREFERENCE: Column()}, pad_to_multiple_of=8)
    row = crossed(batch, 8)
    bounds = row.cu_seqlens.tolist()
    for index in range(3):
        ids, labels = (each[bounds[index] : bounds[index + 1]].tolist() for each in (row.input_ids, row.labels))
        other = (index + 1) % 3
        prompt, answer = 2 + index, [200 + 1000 * other + offset for offset in range(3 + other)]
        assert ids == [*(100 + 1000 * index + offset for offset in range(prompt)), *answer]
        assert labels == [*[IGNORE] * (prompt - 1), *answer, IGNORE]
    assert row.num_tokens == int((batch.targets[PREFERENCE] > 0).sum())
    assert len(row.input_ids) % 8 == 0


def test_a_single_pair_has_no_crossed_row():
    """Catches an answer to its own prompt in place of one to another."""
    row = crossed(collate(pairs_of(1), columns={PREFERENCE: Column()}), 8)
    assert (row.num_tokens, len(row.input_ids)) == (0, 8)


class Stored:
    """Stored pairs in place of prepared documents."""

    extra_names = (PREFERENCE,)
    fingerprint = "pairs"

    def __init__(self, documents):
        self.documents = documents
        self.lengths = np.array([len(document.input_ids) for document in documents])

    def document(self, index):
        return self.documents[index].input_ids, self.documents[index].labels

    def extras(self, index):
        return self.documents[index].columns

    def images(self, index):
        return []


def test_scores_reach_the_batch_as_precisely_as_fp64():
    """Catches scores of other pairs, and sums that are rounded to fp32."""
    scores = -np.random.default_rng(0).random((3, 3)) * 1000
    documents = ScoredPairs(Stored(pairs_of(3)), scores)
    bins = pack(documents.lengths, bin_len=64)
    plan = DataPlan(num_bins=len(bins), bins_per_step=len(bins), fingerprint=fingerprint_of(documents, bins))
    for _, [batch] in StepLoader(documents, bins, plan, micro_batch_size=len(bins)).steps():
        found = document_sums(batch.targets[REFERENCE], batch)[:6].view(3, 2).numpy()
        order = [int(batch.input_ids[start]) // 1000 for start in batch.cu_seqlens[:6:2].tolist()]
        np.testing.assert_allclose(found, scores[order, :2], rtol=1e-13)
        crossed_sum = float(batch.targets[CROSSED].double().sum())
        np.testing.assert_allclose(crossed_sum, scores[:, 2].sum(), rtol=1e-13)
