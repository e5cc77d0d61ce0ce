"""What `exposed` reaches into of torch reads as it did when it was written."""

import hashlib
import inspect

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather_copy_out
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@pytest.mark.parametrize(
    ("function", "digest"),
    [
        (FSDPParamGroup.unshard, "fee71791ec4e"),
        (FSDPParamGroup.wait_for_unshard, "716648651556"),
        (FSDPParamGroup.post_backward, "1438aef9f174"),
        (FSDPParamGroup._wait_for_post_backward, "72869cc31c9a"),
        (FSDPParamGroup.finalize_backward, "ddf04924f6ad"),
        (foreach_all_gather_copy_out, "4fd2d16c0069"),
    ],
)
def test_torch_still_waits_where_waits_are_recorded(function: object, digest: str) -> None:
    # Catches a torch whose FSDP2 waits elsewhere: read it again, mend exposed.py and then the digest here.
    source = inspect.getsource(function)  # pyright: ignore[reportArgumentType]
    assert hashlib.blake2b(source.encode(), digest_size=6).hexdigest() == digest, torch.__version__
