"""Parts of weight sync that need no receiver: buckets, options, addresses."""

import os
from collections.abc import Callable

import pytest
import torch

from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.tensor_file import TensorGroup
from xorl.train.sync import ReceiverAddress, SyncOptions, WeightSender
from xorl.train.sync.buckets import plan_buckets
from xorl.train.sync.group import Rendezvous, let_nccl_reach, require_nccl_reaches, source_address_for


def group(**tensors: torch.Tensor) -> TensorGroup:
    records = {name: TensorRecord.of(t) for name, t in tensors.items()}
    return TensorGroup(records, lambda: tensors)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [40, 8, 12, 4]), (50, [48, 16]), (1000, [64])])
def test_buckets_keep_the_order_and_hold_what_fits(limit: int, sizes: list[int]) -> None:
    # Catches a group that is dropped or cut where it is larger than a bucket.
    counts = {"a": 10, "b": 2, "c": 3, "d": 1}
    groups = [group(**{name: torch.zeros(count)}) for name, count in counts.items()]
    buckets = plan_buckets(groups, limit)
    assert [bucket.num_bytes for bucket in buckets] == sizes
    assert [name for bucket in buckets for name in bucket.records] == list(counts)


def test_a_receiver_can_view_each_tensor_where_it_lies() -> None:
    # Catches wide elements behind an odd number of narrow ones, at addresses where torch refuses to view them.
    first = group(codes=torch.arange(3, dtype=torch.uint8), half=torch.ones(3, 1, dtype=torch.bfloat16))
    second = group(scale=torch.tensor([[0.5, 2.0]]))
    (bucket,) = plan_buckets([first, second], 1000)
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    bucket.fill_(buffer)
    start = 0
    found = {}
    for name, record in bucket.records.items():
        found[name] = buffer[start : start + record.num_bytes].view(record.torch_dtype).reshape(record.shape)
        start += record.num_bytes
    assert start == len(buffer)
    for name, tensor in {**first.make(), **second.make()}.items():
        assert torch.equal(found[name], tensor)


def send(groups: list[TensorGroup], receivers: list[ReceiverAddress]) -> object:
    return WeightSender(torch.device("cpu")).send(groups, receivers, SyncOptions())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SyncOptions(pause_mode="in_place"), "flush_cache: pause_mode in_place keeps the cache"),
        (lambda: SyncOptions(bucket_bytes=0), "buffer_size_mb: must be at least 1"),
        (lambda: send([group(a=torch.zeros(1))], []), "0 receivers"),
        (lambda: send([], [ReceiverAddress("localhost", 1)]), "0 groups"),
    ],
)
def test_what_cannot_be_sent_is_refused(call: Callable[[], object], message: str) -> None:
    # Catches a sync that would fail at every receiver after its weights were sent, or has none and reports success.
    with pytest.raises(ValueError, match=message):
        call()


def test_nccl_is_reachable_only_from_hosts_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a service that opens NCCL's ports to a network for servers of its own host, and a sync to another host
    # that hangs on a loopback address.
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    let_nccl_reach(["127.0.0.1", "localhost"])
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    require_nccl_reaches("localhost")
    with pytest.raises(RuntimeError, match=r"which 203.0.113.1 cannot reach. Name the server in inference_endpoints"):
        require_nccl_reaches("203.0.113.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    require_nccl_reaches("203.0.113.1")


def test_the_store_listens_where_it_was_told() -> None:
    # Catches a store that every interface reaches, and a taken port that shows as a hang of the receivers.
    assert source_address_for("127.0.0.1") == "127.0.0.1"
    first = Rendezvous("127.0.0.1", 0, timeout_s=5)
    with pytest.raises(RuntimeError, match="master_port: cannot listen at 127"):
        Rendezvous("127.0.0.1", first.port, timeout_s=5)
