"""Generation on a GPU: FlashAttention over the cache, and the sampler in bf16 beside the decoder without a cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tiny_models import hf_config
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import choose_kernels
from xorl.core.parallel import ParallelModel, ParallelPolicy, parallelize
from xorl.kernels.attention import AttentionRequest, CachedLayout, KeyValueCache, resolve_attention
from xorl.kernels.attention.cached import flash_cached_attention, plain_cached_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.server.sampler import Sampler, SampleRequest

pytestmark = pytest.mark.gpu

HF_CONFIG = hf_config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    max_position_embeddings=1024,
    use_sliding_window=True,
    sliding_window=40,
    max_window_layers=1,
    initializer_range=0.05,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Mesh(ParallelDims.resolve("none", 1, shard_size=-1, replicate_size=-1), "cuda")
    dist.destroy_process_group()


def place(mesh: Mesh, dtype: torch.dtype, *, compiled: bool) -> ParallelModel:
    spec, device = spec_for(HF_CONFIG), torch.device("cuda")
    config = spec.config_from_hf(HF_CONFIG)
    attention = resolve_attention("auto", AttentionRequest("cuda", dtype, config.head_dim, 40))
    kernels = choose_kernels(attention, device_type="cuda", dtype=dtype, compiled=compiled, native=(), cast_bf16=False)
    decoder = spec.build(config, merge_qkv=True, kernels=kernels)
    decoder.init_weights(0)
    decoder.compute_dtype = dtype
    policy = ParallelPolicy(data_parallel_mode="none", compile_backend="inductor" if compiled else None)
    return parallelize(decoder.to(device), mesh, policy, device=device, fill=lambda module: None)


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 64, 130], [200]], ids=str)
def test_flash_attention_reads_the_cache_as_the_plain_twin(lengths: list[int], window: int | None) -> None:
    # Catches a causal mask that is not aligned to the last key, and windows and rows that are off by one.
    totals = [length + 29 * index + 3 for index, length in enumerate(lengths)]
    cache = KeyValueCache(
        num_layers=1,
        num_blocks=64,
        block_size=16,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    generator = torch.Generator("cuda").manual_seed(0)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    blocks = iter(torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist())
    tables = [[next(blocks) for _ in range(-(-total // 16))] for total in totals]
    layout = CachedLayout(cache, tables, lengths, totals, "cuda").of_layer(0)
    q = torch.randn(sum(lengths), 4, 64, device="cuda", generator=generator).bfloat16()
    keys, values = cache.keys[0], cache.values[0]
    flash = flash_cached_attention(q, keys, values, layout, scale=0.125, window=window)
    plain = plain_cached_attention(q, keys, values, layout, scale=0.125, window=window)
    torch.testing.assert_close(flash, plain, rtol=0.016, atol=8e-3)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("compiled", [False, True])
def test_sampled_logprobs_are_the_trainers(mesh: Mesh, dtype: torch.dtype, limit: float, compiled: bool) -> None:
    # Catches a sampler that computes something else than training does, which no loss would show.
    model = place(mesh, dtype, compiled=compiled)
    sampler = Sampler(model, device=torch.device("cuda"), cache_tokens=2048, max_step_tokens=64)
    requests = [SampleRequest(tuple(range(length)), 50, seed=length, num_samples=2) for length in (1, 33, 130)]
    for request, result in zip(requests, sampler.run(requests), strict=True):
        for sample in result.samples:
            tokens = torch.tensor(request.prompt + sample.tokens, device="cuda")
            labels = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
            assert isinstance(model.module, Decoder)
            with torch.no_grad():
                layout = SequenceLayout.from_lengths([len(tokens)], "cuda")
                _, wanted = model.module(tokens, layout, lambda h, w, y=labels: linear_cross_entropy(h, w, y))
            difference = wanted[len(request.prompt) - 1 : -1].cpu() - torch.from_numpy(sample.logprobs)
            assert difference.abs().max() <= limit
