"""Streaming: the same bins on any number of ranks and workers and from any step, every document once an epoch."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from data_files import make_rows, write_as, write_jsonl
from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.stream import (
    StreamLoader,
    StreamOptions,
    StreamPlan,
    StreamTally,
    check_first_samples,
    files,
    lane,
    open_stream,
    order,
    read_sample,
)
from xorl.data.stream.lane import StreamLane

NUM_ROWS = 400


@pytest.fixture
def small(monkeypatch):
    """Blocks of a few rows, runs of a few bins, and lanes although there is little data."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 1500)
    for module in (order, lane):
        monkeypatch.setattr(module, "RUN_BINS", 6)
    monkeypatch.setattr(order, "_RUNS_PER_LANE", 1)
    monkeypatch.setattr(order, "_BYTES_PER_TOKEN", 8)


def numbered(rows, first=0):
    """Rows that can be told apart: the first two ids are a number."""
    for index, row in enumerate(rows, first):
        row["input_ids"][:2] = row["labels"][:2] = divmod(index, 1000)
    return rows


@pytest.fixture
def corpus(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", numbered(make_rows(NUM_ROWS)))
    return DatasetEntry(path)


def stream_of(tmp_path, *entries, **options):
    options = {"bin_len": 64, "vocab_size": 1000, "seed": 3, **options}
    return open_stream(entries, StreamOptions(**options), index_path=tmp_path / "index")


def loaders(stream, *, world=1, bins_per_step=24, num_steps=12, positions=None, num_workers=0):
    plan = StreamPlan.over(stream, bins_per_step=bins_per_step, max_steps=num_steps)
    arguments = {"micro_batch_size": 1, "dp_size": world, "positions": positions, "num_workers": num_workers}
    return [StreamLoader(stream, plan, dp_rank=rank, **arguments) for rank in range(world)]


def documents_in(batch):
    spans = pairwise(batch.cu_seqlens.tolist())
    return [tuple(batch.input_ids[a:b].tolist()) for a, b in spans if b <= batch.num_tokens]


def bins_of(step_batches):
    """The bins of one step over all ranks, in global order: rank r has the r-th, the (r + n)-th, ..."""
    return [documents_in(batch) for together in zip(*step_batches, strict=True) for batch in together]


def read(ranks, start=0, stop=None):
    """[[bin, ...] of each step], and the positions after the last."""
    iterators = [rank.steps(start) for rank in ranks]
    steps = []
    for _ in range(start, ranks[0].num_steps if stop is None else stop):
        steps.append(bins_of([next(iterator)[1] for iterator in iterators]))
    for iterator in iterators:
        iterator.close()
    return steps, np.maximum.reduce([rank.positions() for rank in ranks])


@pytest.mark.parametrize(("world", "num_workers"), [(2, 0), (3, 0), (4, 0), (8, 0), (1, 2), (2, 3)])
def test_ranks_and_workers_change_nothing(tmp_path, corpus, small, world, num_workers):
    """Catches bins that depend on who packs them: a step would train on other documents on another machine."""
    stream = stream_of(tmp_path, corpus)
    assert StreamPlan.over(stream, bins_per_step=24, max_steps=1).num_lanes == 16
    expected, _ = read(loaders(stream))
    assert read(loaders(stream, world=world, num_workers=num_workers))[0] == expected


@pytest.mark.parametrize("worlds", [(1, 1, 1), (4, 2, 8), (3, 1, 4), (8, 6, 2), "within a block"])
def test_every_resume_goes_on_with_the_next_document(tmp_path, corpus, small, worlds):
    """Catches documents repeated or lost by a resume, five times within an epoch and once across its end."""
    if worlds == "within a block":  # of many chunks
        corpus, worlds = DatasetEntry(str(write_as("arrow", tmp_path, numbered(make_rows(NUM_ROWS))))), (3, 1, 4)
    stream = stream_of(tmp_path, corpus)
    expected, _ = read(loaders(stream))
    steps, positions = [], None
    for number, (start, stop) in enumerate(pairwise((0, 1, 2, 3, 4, 5, 10, 12))):
        world = worlds[number % len(worlds)]
        found, positions = read(loaders(stream, world=world, positions=positions), start, stop)
        steps += found
    assert steps == expected
    assert read(loaders(stream), start=7)[0] == expected[7:]  # without positions: slower, and the same


def test_a_loader_goes_back_and_refuses_positions_from_later_steps(tmp_path, corpus, small):
    """Catches a loader that waits for ever for bins that lie before its positions, its own or a checkpoint's."""
    stream = stream_of(tmp_path, corpus)
    ranks = loaders(stream)
    expected, positions = read(ranks)
    assert read(ranks, start=2, stop=4)[0] == expected[2:4]
    with pytest.raises(ValueError, match="positions: they were taken after the first bin of step 2, the start"):
        read(loaders(stream, positions=positions), start=2)


def test_the_seed_is_part_of_the_hash_without_shuffling_too(tmp_path, corpus, small):
    """Catches equal hashes of different orders: a resume with another seed would repeat and lose documents."""
    streams = [stream_of(tmp_path, corpus, seed=seed, shuffle=False) for seed in (3, 4)]
    assert read(loaders(streams[0]))[0] != read(loaders(streams[1]))[0]
    first, second = (StreamPlan.over(stream, bins_per_step=24, max_steps=12) for stream in streams)
    assert first.hash != second.hash


def test_a_resume_reads_a_run_again_and_not_all(tmp_path, corpus, small, monkeypatch):
    """Catches a resume that takes as long as what it resumes."""
    stream = stream_of(tmp_path, corpus)
    expected, _ = read(loaders(stream, num_steps=40))
    _, positions = read(loaders(stream, num_steps=40), stop=38)
    chunks = []
    monkeypatch.setattr(lane, "block_chunks", lambda *a, f=lane.block_chunks: chunks.append(1) or f(*a))
    assert read(loaders(stream, num_steps=40, positions=positions), start=38)[0] == expected[38:]
    assert len(chunks) < 16 * 8


def test_every_document_comes_once_an_epoch_in_another_order(tmp_path, corpus, small):
    """Catches documents lost or doubled where blocks meet, and an order that is the same in every epoch."""
    stream = stream_of(tmp_path, corpus)
    blocks = order.StreamOrder(stream)
    orders = []
    for epoch in range(2):
        seen = Counter()
        sequence = []
        for place in range(epoch * blocks.blocks_per_cycle, (epoch + 1) * blocks.blocks_per_cycle):
            index, number = divmod(place, blocks.num_lanes)
            sequence.append(blocks.block(number, index)[1])
            one = StreamLane(stream, blocks, number, lane.RunStart(0, index, 0))
            for after, encoded in one._chunks():
                if after.block != index:
                    break
                starts = np.cumsum(encoded.lengths) - encoded.lengths
                seen.update(tuple(encoded.input_ids[start : start + 2].tolist()) for start in starts)
        assert seen == {divmod(index, 1000): 1 for index in range(NUM_ROWS)}
        orders.append(sequence)
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(blocks.blocks_per_cycle))
    assert orders[0] != orders[1]


def test_bins_are_full_and_documents_whole(tmp_path, corpus, small):
    """Catches documents that are cut or lost by packing, bins that overflow, and runs that end in empty bins."""
    stream = stream_of(tmp_path, corpus)
    rows = {tuple(row["input_ids"]) for row in map(json.loads, Path(corpus.path).read_text().splitlines())}
    steps, _ = read(loaders(stream))
    bins = [members for step in steps for members in step]
    assert all(document in rows for members in bins for document in members)
    sizes = [sum(map(len, members)) for members in bins]
    assert max(sizes) <= 64
    assert sum(sizes) > 0.85 * 64 * len(sizes)


def test_the_order_follows_the_seed_or_the_files(tmp_path, corpus, small):
    """Catches a seed that is ignored, and a shuffle that nobody asked for."""
    first, again, other = (stream_of(tmp_path, corpus, seed=seed) for seed in (3, 3, 4))
    steps = [read(loaders(stream), stop=3)[0] for stream in (first, again, other)]
    assert steps[0] == steps[1] != steps[2]
    plans = [StreamPlan.over(stream, bins_per_step=24, max_steps=1).hash for stream in (first, again, other)]
    assert plans[0] == plans[1] != plans[2]
    still = order.StreamOrder(stream_of(tmp_path, corpus, shuffle=False))
    assert [still.block(place % 16, place // 16)[1] for place in range(40)] == list(range(40))


def rows_in(stream):
    """The rows of one epoch by number."""
    blocks = order.StreamOrder(stream)
    seen = Counter()
    for place in range(blocks.blocks_per_cycle):
        entry, number = blocks.block(place % blocks.num_lanes, place // blocks.num_lanes)
        file, inner = files.BlockTable(stream.entries[entry])[number]
        for chunk in lane.block_chunks(file, inner, None, "entries[0]"):
            seen.update(row["input_ids"][0] * 1000 + row["input_ids"][1] for row in chunk.rows())
    return seen


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet", "json", "csv"])
def test_every_format_is_cut_without_loss(tmp_path, small, kind):
    """Catches rows lost or doubled where a file is cut: lines by bytes, Parquet by row groups, others not at all."""
    rows = numbered(make_rows(100))
    if kind == "gz":
        path = tmp_path / "rows.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "parquet":
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    else:
        path = write_as(kind, tmp_path, rows)
    stream = stream_of(tmp_path, DatasetEntry(path))
    assert (stream.entries[0].num_blocks > 3) == (kind in ("jsonl", "parquet"))
    if kind != "csv":
        assert rows_in(stream) == dict.fromkeys(range(100), 1)
    steps, _ = read(loaders(stream, num_steps=2))
    assert len(steps[1]) == 24


def test_shares_of_a_stream(tmp_path, small):
    """Catches an entry that is read more or less often than its share says."""
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", numbered(make_rows(100, seed=n), 100 * n))) for n in range(2)]
    seen = rows_in(stream_of(tmp_path, DatasetEntry(paths[0], num_epochs=2.0), DatasetEntry(paths[1])))
    assert seen == {index: 2 - index // 100 for index in range(200)}
    # Which blocks are drawn differs by the files' names and times; of so many, shares hardly do.
    paths = [
        str(write_jsonl(tmp_path / f"many_{n}.jsonl", numbered(make_rows(2000, seed=n), 2000 * n))) for n in range(2)
    ]
    seen = rows_in(stream_of(tmp_path, DatasetEntry(paths[0], weight=3.0), DatasetEntry(paths[1], weight=1.0)))
    parts = [sum(times for index, times in seen.items() if index // 2000 == part) for part in range(2)]
    assert 0.7 < parts[0] / sum(parts) < 0.8
    assert 3600 < sum(parts) < 4400


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (({"weight": 0.95}, {"weight": 0.05}), [19, 1]),
        (({"weight": 0.99}, {"weight": 0.01}), [99, 1]),
        (({"num_epochs": 1.0}, {"num_epochs": 0.1}), [10, 1]),
        (({"num_epochs": 0.1}, {"num_epochs": 0.1}), [1, 1]),
        (({}, {"num_epochs": 3.0}), [1, 3]),
    ],
)
def test_shares_of_files_that_are_one_block_each(tmp_path, shuffle, shares, expected):
    """Catches shares rounded to whole files: a dataset of weight 0.01 was a third of what was trained on."""
    text = "".join(json.dumps(row) + "\n" for row in make_rows(20))
    entries = []
    for number, share in enumerate(shares):
        path = tmp_path / f"{number}.jsonl.gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        entries.append(DatasetEntry(path, **share))
    blocks = order.StreamOrder(stream_of(tmp_path, *entries, shuffle=shuffle))
    assert blocks.num_lanes == 1
    drawn = [blocks.block(0, place)[0] for place in range(2 * sum(expected))]
    assert [drawn.count(entry) for entry in (0, 1)] == [2 * num for num in expected]
    # The large one does not wait for all passes of a cycle over the other.
    assert set(drawn[: sum(expected)]) == set(drawn[sum(expected) :]) == {0, 1}


def test_what_a_stream_cannot_be_is_refused(tmp_path, corpus, small):
    """Catches a stream over nothing that spins for ever, and one over files that changed while it ran."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"input_ids": []}\n' * 50)
    with pytest.raises(DataError, match="has no documents"):
        read(loaders(stream_of(tmp_path, DatasetEntry(str(empty)))))
    empty.write_text("")
    for entry, words in (
        (DatasetEntry(str(empty)), "is empty"),
        (DatasetEntry("dummy"), "dummy cannot be streamed"),
        (DatasetEntry(corpus.path, shards=2, shards_idx=0), "cannot be divided into shards"),
    ):
        with pytest.raises(DataError, match=words):
            stream_of(tmp_path, entry)
    stream = stream_of(tmp_path, corpus)
    with open(corpus.path, "a") as file:
        file.write('{"input_ids": [1, 2, 3]}\n')
    with pytest.raises(DataError, match="changed while it was streamed"):
        read(loaders(stream))
    assert stream_of(tmp_path, corpus).fingerprint != stream.fingerprint


def test_a_bad_row_names_its_line(tmp_path, small):
    """Catches an error that tells of a block and leaves the user to search a terabyte."""
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(100))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:60], '{"input_ids": ["a"]}', *lines[60:]]))
    with pytest.raises(DataError, match=r"rows.jsonl, line 61"):
        read(loaders(stream_of(tmp_path, DatasetEntry(path))))


def tally_of(ranks):
    return sum(rank.tally.values for rank in ranks)


def test_a_tally_counts_each_reading_once(tmp_path, corpus, small):
    """Catches samples counted twice where ranks share a lane, where workers read ahead, or where a resume does."""
    stream = stream_of(tmp_path, corpus)
    whole = loaders(stream)
    read(whole)
    for world, num_workers in ((3, 0), (8, 0), (2, 3)):
        ranks = loaders(stream, world=world, num_workers=num_workers)
        read(ranks)
        assert (tally_of(ranks) == tally_of(whole)).all()
    total, positions = 0, None
    for world, (start, stop) in zip((1, 6, 2), pairwise((0, 3, 8, 12)), strict=True):
        ranks = loaders(stream, world=world, positions=positions)
        _, positions = read(ranks, start, stop)
        total = total + tally_of(ranks)
    assert (total == tally_of(whole)).all()
    receipt = StreamTally(stream, total.tolist()).receipt("abc")
    assert (receipt.num_bins, receipt.plan_hash) == (24 * 12, "abc")
    assert 0.85 < receipt.fill <= 1


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (5, "saved: 5 is int, want a list of int or None"),
        ([1], r"saved: int64 \[1\], want \d+ integers"),
        ([1.5] * 100, r"saved: float64 \[100\], want"),
    ],
)
def test_a_tally_begins_with_counts_of_its_own_stream(tmp_path, corpus, saved, message):
    """Catches one count that is taken for all of them, and counts that are rounded."""
    with pytest.raises(DataError, match=message):
        StreamTally(stream_of(tmp_path, corpus), saved)


def test_the_receipt_of_a_stream_is_that_of_preparing(tmp_path, options):
    """Catches counts that mean something else when the data is streamed, and a sample other than what is counted."""
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(300))
    entry = DatasetEntry(path, max_seq_len=30)
    expected = prepare([entry], options).receipt.total
    stream = stream_of(tmp_path, entry)
    (loader,) = loaders(stream, bins_per_step=1, num_steps=1)
    next(loader.steps())
    assert loader.tally.receipt(None).total == expected
    assert expected.truncated > 0
    sample = read_sample(stream, 10_000)
    assert sample.is_all
    assert sample.receipt.total == expected
    assert (len(sample), sample.lengths.sum(), sample.num_trained.sum()) == (
        expected.documents,
        expected.tokens,
        expected.trained_tokens,
    )
    assert sum(len(sample.document(index)[0]) for index in range(len(sample))) == expected.tokens


def test_a_sample_stops_where_it_was_told_to(tmp_path, corpus, small):
    """Catches statistics of a terabyte that read all of it, or that read a repeated block as duplicates."""
    sample = read_sample(stream_of(tmp_path, DatasetEntry(corpus.path, num_epochs=2.0)), 50)
    assert 50 <= len(sample) < 80
    assert not sample.is_all
    assert len({tuple(sample.document(index)[0][:2].tolist()) for index in range(len(sample))}) == len(sample)


SHORT, LONG = {"input_ids": [1, 2, 3]}, {"input_ids": list(range(20))}
UNTRAINED = {"input_ids": [1, 2, 3], "labels": [-100] * 3}
TRAINED = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
STOPS = {
    "untrained, in little data": ([TRAINED] * 48 + [UNTRAINED] * 2, "2 of the 50 samples of .* no trained token"),
    "untrained, in much": ([TRAINED] * 1500 + [UNTRAINED] * 50, "samples of .* no trained token"),
    "nothing trained": ([UNTRAINED] * 50, "is trained: none of its 50 samples"),
    "too long": ([SHORT] * 48 + [LONG] * 2, "2 of the 50 samples of .* would be cut"),
    "beyond the vocabulary": ([SHORT] * 3 + [{"input_ids": [1000]}], "line 4: .*the id 1000"),
}


@pytest.mark.parametrize(("rows", "message"), STOPS.values(), ids=STOPS)
def test_what_stops_prepared_data_stops_a_stream(tmp_path, rows, message):
    """Catches a stream that trains on nothing, on less than was given, or on ids that the model has not."""
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=message):
        read(loaders(stream_of(tmp_path, DatasetEntry(path), bin_len=16), bins_per_step=8, num_steps=80))
    with pytest.raises(DataError, match=message):
        check_first_samples(stream_of(tmp_path, DatasetEntry(path), bin_len=16))


def test_the_beginning_of_a_stream_is_judged_and_no_more(tmp_path, corpus, small, caplog):
    """Catches a stream that is read whole before it is trained on, and few long samples judged by a hundredth."""
    check_first_samples(stream_of(tmp_path, corpus))
    rows = [TRAINED] * 2000 + ["not reached"] * 5
    path = write_jsonl(tmp_path / "much.jsonl", rows)
    check_first_samples(stream_of(tmp_path, DatasetEntry(path), shuffle=False, seed=1))
    many_blocks = write_jsonl(tmp_path / "blocks.jsonl", [LONG, LONG, *[SHORT] * 900])
    check_first_samples(stream_of(tmp_path, DatasetEntry(str(many_blocks)), bin_len=16))
    nothing = write_jsonl(tmp_path / "nothing.jsonl", [UNTRAINED] * 900)
    stream = stream_of(tmp_path, DatasetEntry(str(nothing)), bin_len=16)
    with pytest.raises(DataError, match=r"no token of .* is trained"):
        check_first_samples(stream)
    check_first_samples(stream, strict=False)
    assert "this would stop a run: entries[0]: no token of" in caplog.text


def test_a_tokenizer_that_is_not_the_models_stops_a_stream(tmp_path, text_options):
    """Catches text streamed into ids that the model has not, and ends that it does not know."""
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": "abc"}] * 4))
    entry, folder = DatasetEntry(path, type="text"), text_options.tokenizer_folder
    with pytest.raises(DataError, match=r"line 1: .*writes '.*' as id 257, but the model's vocab_size is 257"):
        read(loaders(stream_of(tmp_path, entry, tokenizer_folder=folder, vocab_size=257), num_steps=1))
    for special in ({"eos": (256,)}, {"bos": (257,)}):
        with pytest.raises(DataError, match=f"the {next(iter(special))}_token of the tokenizer"):
            stream_of(tmp_path, entry, tokenizer_folder=folder, model_special_ids=special)
