"""The loader: the same batches for any number of workers, the same bins for any number of ranks, from any step."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from data_files import make_rows
from xorl.data import DataPlan, StepLoader, pack


@pytest.fixture
def prepared(prepare_rows):
    """Documents of a file, their bins, and a function that makes loaders over them."""
    documents = prepare_rows(make_rows(150))
    bins = pack(documents.lengths, bin_len=64)

    def loader(plan=None, **arguments):
        arguments = {"micro_batch_size": 2, "pad_to_multiple_of": 16, **arguments}
        return StepLoader(documents, bins, plan or DataPlan.over(documents, bins, bins_per_step=8, seed=3), **arguments)

    return documents, bins, loader


def same(first, second):
    assert len(first) == len(second)
    for (step, batches), (other_step, others) in zip(first, second, strict=True):
        assert step == other_step
        assert len(batches) == len(others)
        for batch, other in zip(batches, others, strict=True):
            assert batch.lengths == other.lengths
            for name in ("input_ids", "labels", "positions", "cu_seqlens"):
                assert torch.equal(getattr(batch, name), getattr(other, name))


def documents_of(batches):
    """The documents of micro-batches as tuples of ids, padding left out."""
    found = []
    for batch in batches:
        spans = pairwise(batch.cu_seqlens.tolist())
        found += [tuple(batch.input_ids[a:b].tolist()) for a, b in spans if b <= batch.num_tokens]
    return sorted(found)


@pytest.mark.parametrize(("num_workers", "start_method"), [(2, "fork"), (2, None), (1, "spawn")])
def test_workers_change_nothing(prepared, num_workers, start_method):
    """Catches workers that hold state or come out of order, and documents that do not survive a spawn."""
    _, _, loader = prepared
    with_workers = loader(num_workers=num_workers, worker_start_method=start_method, prefetch_factor=3)
    same(list(loader().steps()), list(with_workers.steps()))


def test_every_world_trains_on_the_same_documents_at_every_step(prepared):
    """Catches an order that depends on the number of ranks: a resume elsewhere would repeat and lose data."""
    documents, bins, loader = prepared
    plan = DataPlan.over(documents, bins, bins_per_step=8, seed=3, num_epochs=2, drop_last=False)
    expected = [sorted(i for b in plan.bins_of_step(step) for i in bins.documents(b)) for step in range(plan.num_steps)]
    expected = [sorted(tuple(documents.document(i)[0].tolist()) for i in members) for members in expected]
    for dp_size in (1, 2, 4):
        ranks = [list(loader(plan, dp_rank=rank, dp_size=dp_size).steps()) for rank in range(dp_size)]
        for step in range(plan.num_steps):
            of_ranks = [batches for rank in ranks for at, batches in [rank[step]] if at == step]
            assert len({len(batches) for batches in of_ranks}) == 1
            assert documents_of([batch for batches in of_ranks for batch in batches]) == expected[step]


def test_resuming_at_a_step_gives_what_the_straight_run_gave(prepared):
    """Catches a loader that replays or skips when it starts in the middle, in the second epoch too."""
    documents, bins, loader = prepared
    plan = DataPlan.over(documents, bins, bins_per_step=8, seed=3, num_epochs=3)
    straight = list(loader(plan).steps())
    for start in (0, 1, plan.steps_per_epoch, plan.num_steps - 1, plan.num_steps):
        same(straight[start:], list(loader(plan).steps(start)))
    same(straight[4:], list(loader(plan, num_workers=2).steps(4)))


def test_seeking_costs_nothing(prepared):
    """Catches a start that walks through the steps before it."""
    documents, bins, loader = prepared
    plan = DataPlan.over(documents, bins, bins_per_step=8, max_steps=10**9)
    started = time.monotonic()
    step, batches = next(loader(plan).steps(10**9 - 1))
    assert time.monotonic() - started < 30
    assert step == 10**9 - 1
    assert len(batches) == 4


def test_a_short_step_pads_the_ranks_that_have_no_bins(prepared):
    """Catches ranks with fewer micro-batches than others: the next collective would hang."""
    documents, bins, loader = prepared
    plan = DataPlan.one_pass(documents, bins, bins_per_step=16)
    last = plan.num_steps - 1
    ranks = [dict(loader(plan, dp_rank=rank, dp_size=8).steps())[last] for rank in range(8)]
    assert {len(batches) for batches in ranks} == {1}
    tokens = sum(batch.num_tokens for batches in ranks for batch in batches)
    assert tokens == sum(documents.lengths[bins.documents(b)].sum() for b in plan.bins_of_step(last))
    empty = [batches[0] for batches in ranks if not batches[0].num_tokens]
    assert len(empty) == max(0, 8 - len(plan.bins_of_step(last)))
    assert all(batch.num_trained_tokens == 0 and len(batch.input_ids) == 16 for batch in empty)


def test_an_evaluation_sees_every_document_once_in_order(prepared):
    """Catches an evaluation loss over a part of the data, or one whose order changes between runs."""
    documents, bins, loader = prepared
    plan = DataPlan.one_pass(documents, bins, bins_per_step=4)
    batches = [batch for _, step in loader(plan).steps() for batch in step]
    assert documents_of(batches) == sorted(tuple(documents.document(i)[0].tolist()) for i in range(len(documents)))
    assert sum(batch.num_trained_tokens for batch in batches) == documents.num_trained.sum()
    single = pack(documents.lengths, bin_len=64, method="none")
    unpacked = StepLoader(documents, single, DataPlan.one_pass(documents, single, bins_per_step=4), micro_batch_size=1)
    assert all(len(batch.lengths) == 1 for _, step in unpacked.steps() for batch in step)


def test_workers_end_when_the_iterator_is_closed_early(prepared):
    """Catches worker processes left behind by max_steps or an exception."""
    _, _, loader = prepared
    before = set(multiprocessing.active_children())
    steps = loader(num_workers=2).steps()
    next(steps)
    assert len(set(multiprocessing.active_children()) - before) == 2
    steps.close()
    deadline = time.monotonic() + 10
    while set(multiprocessing.active_children()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(multiprocessing.active_children()) - before


def test_workers_outlive_a_sigterm_to_the_whole_job(prepared):
    """Catches a run that a cluster stops before it could save, because its loader's workers were stopped first."""
    _, _, loader = prepared
    before = set(multiprocessing.active_children())
    steps = loader(num_workers=2).steps()
    first = next(steps)
    for worker in set(multiprocessing.active_children()) - before:
        os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    same(list(loader().steps()), [first, *steps])


UNFINISHED = """
from itertools import count
import torch
from xorl.data.workers import iterate

class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return count()

if __name__ == "__main__":
    items = iterate(Numbers(), num_workers=2)
    print(next(items))
"""


def test_a_process_ends_whose_loader_was_not_used_up(tmp_path):
    """Catches a Python that waits for ever for workers which it has told to end by SIGTERM."""
    script = tmp_path / "unfinished.py"
    script.write_text(UNFINISHED)
    done = subprocess.run([sys.executable, script], timeout=120, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_the_global_random_state_is_left_alone(prepared):
    """Catches a draw from torch's generator: a resumed run would see other dropout."""
    _, _, loader = prepared
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(loader(num_workers=1).steps(start=loader().num_steps - 1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
