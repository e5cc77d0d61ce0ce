"""A trainer on the first GPU, in a process of its own, that sends its weights; prints what came of it as JSON.

`python sync_trainer.py PORT... [--bucket-s 10] [--block-fp8]` sends to each port in turn, one sync after the other, by
one sender. After each it computes on the GPU, which shows that nothing of a failed sync holds it.
"""

import argparse
import dataclasses
import hashlib
import json
import time

import torch
from torch import Tensor, nn

from tiny_models import hf_config
from xorl.core import runtime
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.core.parallel import ParallelPolicy, parallelize
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.lora.quantize import checkpoint_linears
from xorl.train.export.hf_weights import hf_groups, in_block_fp8
from xorl.train.sync import ReceiverAddress, SyncOptions, Timeouts, WeightSender, match_sglang_nccl

HF_CONFIG = hf_config(
    vocab_size=4099,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=8,
    max_position_embeddings=1024,
    initializer_range=0.05,
)
BUCKET_BYTES = 4 << 20


def sha256_of(tensor: Tensor) -> str:
    """Of its bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def main() -> None:
    """Sends, and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", nargs="+", type=int)
    parser.add_argument("--bucket-s", type=float, default=30.0)
    parser.add_argument("--block-fp8", action="store_true")
    arguments = parser.parse_args()
    match_sglang_nccl()
    place = runtime.init("cuda")
    device = place.device
    spec = spec_for(HF_CONFIG)
    config = spec.config_from_hf(HF_CONFIG)
    recipes = spec.recipes(config, merge_qkv=True)
    with torch.device("meta"):
        module = spec.build(config, kernels=LayerKernels())

    def fill(unfilled: nn.Module) -> None:
        assert isinstance(unfilled, Decoder)
        unfilled.init_weights(0, device=device)

    mesh = Mesh(ParallelDims.resolve("fsdp2", 1), "cuda")
    model = parallelize(module, mesh, ParallelPolicy(), device=device, fill=fill)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    linears = checkpoint_linears(module, []) if arguments.block_fp8 else ()
    wanted = {}
    for native, recipe in recipes.items():
        for name, tensor in recipe.split(module.get_parameter(native).full_tensor().to(torch.bfloat16)).items():
            if name.removesuffix(".weight") in linears:
                codes, scales = quantize_block_fp8(tensor, 128)
                wanted |= {name: sha256_of(codes), f"{name}_scale_inv": sha256_of(scales)}
            else:
                wanted[name] = sha256_of(tensor)
    timeouts = Timeouts(connect_s=2.0, group_s=60.0, bucket_s=arguments.bucket_s, control_s=10.0, flush_s=0.5)
    options = SyncOptions(bucket_bytes=BUCKET_BYTES, weight_version="7", timeouts=timeouts)
    sender = WeightSender(device)
    syncs = []
    for port in arguments.ports:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.monotonic()
        groups = in_block_fp8(hf_groups(model, recipes, dtype=torch.bfloat16, device=device), linears)
        outcome = sender.send(groups, [ReceiverAddress("127.0.0.1", port)], options)
        assert outcome is not None
        seconds, peak = time.monotonic() - start, torch.cuda.max_memory_allocated() - before
        product = torch.ones(2048, 2048, device=device) @ torch.ones(2048, 2048, device=device)
        torch.cuda.synchronize()
        computed_s = time.monotonic() - start - seconds
        assert bool((product == 2048).all())
        entry = {"outcome": dataclasses.asdict(outcome), "seconds": seconds, "peak": peak, "computed_s": computed_s}
        syncs.append(entry)
    largest = max(group.num_bytes for group in groups)
    kept = all(bool((parameter.grad.full_tensor() == 1).all()) for parameter in module.parameters())
    said = {"syncs": syncs, "wanted": wanted, "gradients_kept": kept, "largest": largest, "bucket": BUCKET_BYTES}
    runtime.shutdown()
    print(json.dumps(said), flush=True)  # noqa: T201 - for the test that started it


if __name__ == "__main__":
    main()
