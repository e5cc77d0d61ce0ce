"""What a trainer of a user's own module reads: orders that can be continued, and the forms of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import data as torch_data

from xorl.train.module.loader import DataLoader, batches_of_epoch, read_batch, reject_unshifted_labels, rows_per_batch

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
SHIFTED = torch.tensor([[1, 4, 1, -100], [9, 2, 6, -100]])


def numbered(count: int) -> Tensor:
    return torch.arange(count).view(count, 1)


class Stream(torch_data.IterableDataset):
    """The rows 0 to 9, each epoch 100 higher."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(numbered(10) + 100 * self.epoch)


def read(loader: torch_data.DataLoader, epoch: int, first: int = 0) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in batches_of_epoch(loader, epoch, first)]


def test_the_order_is_new_each_epoch_and_can_be_entered_anywhere() -> None:
    # Catches a resumed epoch that begins at its start or in another order.
    epochs = [read(DataLoader(numbered(11), 2, seed=4), epoch) for epoch in range(3)]
    # One of the 11 rows is left out.
    assert [len({row for batch in epoch for row in batch}) for epoch in epochs] == [10] * 3
    assert epochs[0] != epochs[1]
    loader = DataLoader(numbered(11), 2, seed=4)
    assert read(loader, 1, 3) == epochs[1][3:]
    assert read(loader, 2) == epochs[2]
    assert read(DataLoader(numbered(5), 2, shuffle=False, drop_last=False), 0) == [[0, 1], [2, 3], [4]]
    assert read(DataLoader(numbered(11), 2, seed=5), 0) != epochs[0]


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ([torch.arange(3), torch.arange(4)], r"\[3\], \[4\]\. Cut or pad .* collate_fn"),
        ([{"input_ids": torch.arange(3)}, {"input_ids": torch.arange(4)}], r"\{input_ids: \[3\]\}, .*collate_fn"),
        ([(torch.arange(3),) * 2, (torch.arange(4),) * 2], r"\(\[3\], \[3\]\), \(\[4\], \[4\]\)\. .*collate_fn"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1]}], r"\{input_ids: 2 values\}, .*collate_fn"),
        ([[1, 2, 3], [4, 5]], r"a row is a list of int, want a tensor"),
        ([[1, 2], [4, 5]], r"a row is a list of int, want a tensor"),
        ([None, None], "NoneType"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_that_make_no_batch_are_refused(dataset: list, told: str, num_workers: int) -> None:
    # Catches torch's error about elements of a list, which names neither the rows nor collate_fn.
    with pytest.raises(ValueError, match=rf"(?s)loader: .*{told}"):
        read(DataLoader(dataset, 2, num_workers, shuffle=False), 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_dealt_out_and_skipped(num_workers: int) -> None:
    # Catches workers that each read the whole stream, and an epoch that the stream does not hear of.
    loader = DataLoader(Stream(), 2, num_workers)
    whole = read(loader, 1)
    assert sorted(row for batch in whole for row in batch) == list(range(100, 110))[: len(whole) * 2]
    assert read(loader, 1, 2) == whole[2:]


def test_skipping_draws_no_random_numbers() -> None:
    # Catches dropout that differs after a restart because torch's loader drew its seeds in between.
    loader = torch_data.DataLoader(numbered(6), 2)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert read(loader, 0, 1) == [[2, 3], [4, 5]]
    assert torch.equal(torch.rand(3), expected)


def test_rows_are_counted_over_all_ranks() -> None:
    # Catches a position that is lost when batch_size or the number of ranks changes.
    assert rows_per_batch(DataLoader(numbered(6), 3), 4) == 12
    assert rows_per_batch([IDS, IDS], 4) == 4


def test_a_loader_says_what_it_cannot_do() -> None:
    # Catches an option that is accepted and ignored.
    with pytest.raises(ValueError, match="random access"):
        DataLoader(Stream(), 2, shuffle=True)
    with pytest.raises(RuntimeError, match="setup_distributed"):
        DataLoader(numbered(4), 2, distributed=True)


@pytest.mark.parametrize(
    ("batch", "labels"),
    [
        (IDS, SHIFTED),
        ([IDS], SHIFTED),
        ((IDS, IDS + 1), IDS + 1),
        ({"input_ids": IDS}, SHIFTED),
        ({"input_ids": IDS, "labels": (IDS + 1).int()}, IDS + 1),
        (
            {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])},
            torch.tensor([[1, -100, -100, -100], [9, 2, 6, -100]]),
        ),
    ],
)
def test_forms_of_a_batch(batch, labels: Tensor) -> None:
    # Catches labels that are shifted twice or not at all, and padding that is trained.
    rows = read_batch(batch, 4)
    assert torch.equal(rows.input_ids, IDS)
    assert torch.equal(rows.labels, labels)
    assert rows.labels.dtype == torch.int64
    assert (
        list(rows.extras) == [name for name in batch if name == "attention_mask"] if isinstance(batch, dict) else True
    )


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"ids": IDS}, "must have input_ids"),
        ((IDS, IDS, IDS), "3 parts"),
        (IDS.float(), "float32"),
        (IDS[0], r"\[4\]"),
        ((IDS, IDS[:, 1:]), r"\[2, 3\]"),
        (torch.zeros(1, 6, dtype=torch.int64), "6 token ids, more than context_length 4 and the label"),
        ((torch.zeros(1, 5, dtype=torch.int64),) * 2, "5 token ids, more than context_length 4$"),
    ],
)
def test_other_batches_are_refused(batch, told: str) -> None:
    # Catches a crash deep in the model where the loader is at fault.
    with pytest.raises(ValueError, match=told):
        read_batch(batch, 4)


def test_a_row_of_one_id_more_has_the_label_of_its_last_position() -> None:
    # Catches rows as most tutorials cut them that are refused, or that lose their last label.
    ids = torch.arange(10).view(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    rows = read_batch({"input_ids": ids, "attention_mask": mask}, 4)
    assert torch.equal(rows.input_ids, ids[:, :4])
    assert rows.labels.tolist() == [[1, 2, 3, 4], [6, 7, -100, -100]]
    assert torch.equal(rows.extras["attention_mask"], mask[:, :4])
    assert torch.equal(read_batch(ids, 4).labels, ids[:, 1:])


def test_labels_that_repeat_the_ids_are_refused() -> None:
    # Catches a model that learns to copy its input, with a loss near zero.
    with pytest.raises(ValueError, match="the token after"):
        reject_unshifted_labels(read_batch((IDS, IDS), None))
    same = torch.full((2, 4), 7)
    for labels in (SHIFTED, torch.full_like(IDS, -100)):
        reject_unshifted_labels(read_batch((IDS, labels), None))
    reject_unshifted_labels(read_batch((same, same), None))
