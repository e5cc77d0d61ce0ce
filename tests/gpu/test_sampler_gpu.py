"""Generation on a GPU: FlashAttention over the cache, and the sampler in bf16 beside the decoder without a cache."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tiny_models import hf_config
from xorl.core import runtime
from xorl.core.mesh import DataParallelMode, Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.nn.kernels import choose_kernels
from xorl.core.parallel import ParallelModel, ParallelPolicy, parallelize
from xorl.kernels.attention import (
    AttentionRequest,
    AttentionSpec,
    DecodeLayout,
    KeyValueCache,
    MixedLayout,
    resolve_attention,
)
from xorl.kernels.attention.cached import flash_cached_attention, plain_cached_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.lora import AdapterBank, AdapterSpec
from xorl.server.sampler import EditRules, GenerationRequest, GenerationResult, Sampler
from xorl.server.sampler.draw import DrawRule, draw
from xorl.server.sampler.edits import LogitEdits, edited_logits

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


MIXTURE = hf_config(
    "qwen3_moe",
    vocab_size=512,
    hidden_size=256,
    head_dim=64,
    num_hidden_layers=3,
    max_position_embeddings=1024,
    num_experts=8,
    moe_intermediate_size=128,
    initializer_range=0.05,
)
SINKS = hf_config(
    "gpt_oss",
    vocab_size=512,
    hidden_size=256,
    head_dim=64,
    num_hidden_layers=3,
    max_position_embeddings=1024,
    sliding_window=40,
    intermediate_size=128,
    initializer_range=0.05,
)
_HYBRID: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}
DELTA_NETS = hf_config("qwen3_5_text", **_HYBRID)
STATE_SPACES = hf_config("nemotron_h", **_HYBRID)
SHAPES = pytest.mark.parametrize(
    "shape",
    [HF_CONFIG, MIXTURE, SINKS, DELTA_NETS, STATE_SPACES],
    ids=["dense", "experts", "sinks", "delta nets", "state spaces"],
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Mesh(ParallelDims.resolve("none", 1, shard_size=-1, replicate_size=-1), "cuda")
    dist.destroy_process_group()


def place(
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    compiled: bool,
    mode: DataParallelMode = "none",
    device: str = "cuda",
    shape: Mapping[str, object] = HF_CONFIG,
) -> ParallelModel:
    spec = spec_for(shape)
    config = spec.config_from_hf(shape)
    heads = config.attentions[0]
    attention = resolve_attention("auto", AttentionRequest("cuda", dtype, heads.head_dim, 40, sinks=heads.sinks))
    kernels = choose_kernels(attention, device_type="cuda", dtype=dtype, compiled=compiled, native=(), cast_bf16=False)
    decoder = spec.build(config, merge_qkv=True, kernels=kernels)
    decoder.init_weights(0)
    decoder.compute_dtype = dtype
    policy = ParallelPolicy(data_parallel_mode=mode, compile_backend="inductor" if compiled else None)
    return parallelize(decoder.to(device), mesh, policy, device=torch.device(device))


def filled_cache(
    num_blocks: int, kv_heads: int, head_dim: int, totals: Sequence[int]
) -> tuple[KeyValueCache, list[list[int]], torch.Generator]:
    """Random keys and values in bf16, blocks in random order for sequences of so many tokens, and the generator."""
    cache = KeyValueCache(
        layers=[(kv_heads, head_dim)],
        num_blocks=num_blocks,
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    generator = torch.Generator("cuda").manual_seed(0)
    for each in (*cache.keys, *cache.values):
        each.normal_(generator=generator)
    blocks = iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist())
    return cache, [[next(blocks) for _ in range(-(-total // 16))] for total in totals], generator


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 64, 130], [200]], ids=str)
def test_flash_attention_reads_the_cache_as_the_plain_twin(lengths: list[int], window: int | None) -> None:
    # Catches a causal mask that is not aligned to the last key, and windows and rows that are off by one.
    totals = [length + 29 * index + 3 for index, length in enumerate(lengths)]
    cache, tables, generator = filled_cache(64, 2, 64, totals)
    layout = MixedLayout(cache, tables, lengths, totals, "cuda").of_layer(0)
    q = torch.randn(sum(lengths), 4, 64, device="cuda", generator=generator).bfloat16()
    keys, values = cache.keys[0], cache.values[0]
    flash = flash_cached_attention(q, keys, values, layout, AttentionSpec(0.125, window))
    plain = plain_cached_attention(q, keys, values, layout, AttentionSpec(0.125, window))
    torch.testing.assert_close(flash, plain, rtol=0.016, atol=8e-3)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("shape", [(4, 2, 64), (32, 8, 128), (9, 3, 96), (2, 2, 256)], ids=str)
@pytest.mark.parametrize("totals", [[1], [700, 1, 64], [16 * (index % 40) + 5 for index in range(200)]], ids=len)
def test_paged_attention_reads_the_cache_as_the_plain_twin(
    totals: list[int], shape: tuple[int, int, int], window: int | None, has_sinks: bool
) -> None:
    # Catches what Triton's interpreter cannot show: layouts of products, and few and many programs for a sequence.
    heads, kv_heads, head_dim = shape
    num_blocks = sum(-(-total // 16) for total in totals)
    cache, tables, generator = filled_cache(num_blocks, kv_heads, head_dim, totals)
    mixed = MixedLayout(cache, tables, [1] * len(totals), totals, "cuda").of_layer(0)
    decode = DecodeLayout(cache, mixed.tables.t(), mixed.positions).of_layer(0)
    assert torch.equal(decode.new_rows, mixed.new_rows)
    q = torch.randn(len(totals), heads, head_dim, device="cuda", generator=generator).bfloat16()
    keys, values = cache.keys[0], cache.values[0]
    sinks = torch.randn(heads, device="cuda", generator=generator).bfloat16() if has_sinks else None
    spec, wide = AttentionSpec(0.125, window), None if sinks is None else sinks.double()
    found = decode.attend(q, keys, values, spec, sinks)
    plain = plain_cached_attention(q.double(), keys.double(), values.double(), mixed, spec, wide)
    torch.testing.assert_close(found.double(), plain, rtol=0.016, atol=8e-3)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("compiled", [False, True])
@SHAPES
def test_sampled_logprobs_are_the_trainers(
    mesh: Mesh, shape: Mapping[str, object], dtype: torch.dtype, limit: float, compiled: bool
) -> None:
    # Catches a sampler that computes something else than training does, which no loss would show.
    model = place(mesh, dtype, compiled=compiled, shape=shape)
    sampler = Sampler(model, device=torch.device("cuda"), cache_tokens=2048, max_step_tokens=64)
    requests = [GenerationRequest(tuple(range(length)), 50, seed=length, num_samples=2) for length in (1, 33, 130)]
    check_logprobs(model, requests, sampler.run(requests), limit, share_of(shape, dtype))


def share_of(shape: Mapping[str, object], dtype: torch.dtype) -> float:
    """Without the tokens whose experts change by rounding: 1 % of them on a CPU."""
    return 1.0 if shape is HF_CONFIG or dtype == torch.float32 else 0.95


def check_logprobs(
    model: ParallelModel,
    requests: Sequence[GenerationRequest],
    results: Sequence[GenerationResult],
    limit: float,
    share: float = 1.0,
) -> None:
    """This share of the samples' log-probabilities is what the decoder without a cache gives their tokens."""
    differences = []
    for request, result in zip(requests, results, strict=True):
        for sample in result.samples:
            assert len(sample.tokens) == request.max_tokens
            tokens = torch.tensor(request.prompt + sample.tokens, device="cuda")
            labels = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
            with torch.no_grad():
                layout = SequenceLayout.from_lengths([len(tokens)], "cuda")
                _, wanted = model.forward(tokens, layout, lambda h, w, y=labels: linear_cross_entropy(h, w, y))
            differences.append(wanted[len(request.prompt) - 1 : -1].cpu() - torch.from_numpy(sample.logprobs))
    assert torch.cat(differences).abs().quantile(share) <= limit


@SHAPES
def test_recorded_growth_follows_the_weights(mesh: Mesh, shape: Mapping[str, object]) -> None:
    # Catches recorded passes that go on with weights, tables or a cache of before, rows of fewer samples than were
    # recorded, samples that begin while others grow, a cache that was dropped and made anew, and experts whose routes
    # the host waits for.
    model = place(mesh, torch.bfloat16, compiled=False, shape=shape)
    sampler = Sampler(model, device=torch.device("cuda"), cache_tokens=2048, max_running=6)
    requests = [GenerationRequest(tuple(range(5 * count)), 7 * count, seed=count) for count in range(1, 10)]
    for number in range(3):
        if number:
            with torch.no_grad():
                for parameter in model.module.parameters():
                    parameter.mul_(1.1)
            sampler.weights_changed(number)
        if number == 2:
            sampler.release_memory()
        check_logprobs(model, requests, sampler.run(requests), 0.08, share_of(shape, torch.bfloat16))
        assert sampler._decode is not None
        assert sorted(rows for rows, *_ in sampler._decode._recorded) == [1, 2, 4, 8]


def test_recorded_growth_returns_routes_that_replay(mesh: Mesh) -> None:
    # Catches routes of another replay of a recorded pass, or of its padding rows, passes that are recorded without
    # routes, and a replay that is not what was sampled.
    model = place(mesh, torch.bfloat16, compiled=False, shape=MIXTURE)
    decoder = model.module
    assert isinstance(decoder, Decoder)
    sampler = Sampler(model, device=torch.device("cuda"), cache_tokens=2048, max_running=6)
    plain = [GenerationRequest(tuple(range(5 * count)), 7 * count, seed=count) for count in range(1, 6)]
    asked = [replace(request, prompt_routes=True, sample_routes=True) for request in plain]
    results = sampler.run(asked)
    for result, same in zip(results, sampler.run(plain), strict=True):
        assert result.samples[0].tokens == same.samples[0].tokens
        assert same.samples[0].routes is None
    assert sampler._decode is not None
    assert {records for *_, records in sampler._decode._recorded} == {False, True}
    differences = []
    for request, result in zip(asked, results, strict=True):
        [sample] = result.samples
        assert sample.routes is not None
        assert result.prompt_routes is not None
        routes = torch.from_numpy(np.concatenate([result.prompt_routes, sample.routes])).cuda()
        tokens = torch.tensor(request.prompt + sample.tokens, device="cuda")
        layout = SequenceLayout.from_lengths([len(tokens) - 1], "cuda")
        with torch.no_grad():
            _, found = model.forward(
                tokens[:-1], layout, lambda h, w, y=tokens[1:]: linear_cross_entropy(h, w, y), recorded=routes
            )
        differences.append(found[len(request.prompt) - 1 :].cpu() - torch.from_numpy(sample.logprobs))
    # With the sampler's routes, no token changes its experts by rounding, so that the limit holds for all.
    assert torch.cat(differences).abs().max() <= 0.08


@pytest.mark.parametrize("compiled", [False, True])
def test_replaying_its_own_routes_is_the_same_on_a_gpu(mesh: Mesh, compiled: bool) -> None:
    # Catches an operation that waits for the device, and routes in another order than the router's.
    model = place(mesh, torch.bfloat16, compiled=compiled, shape=MIXTURE)
    decoder = model.module
    assert isinstance(decoder, Decoder)
    assert decoder.routers is not None
    model.train()
    layout = SequenceLayout.from_lengths([300, 212], "cuda")
    ids = torch.randint(512, (512,), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    routes = None
    for _ in range(2):
        with decoder.routers.recording():
            loss = model.forward(ids, layout, lambda h, w: linear_cross_entropy(h, w, ids)[0].sum(), recorded=routes)
            routes = decoder.routers.take_routes().to(torch.int16)
        sums = decoder.routers.take().sum(0)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in decoder.parameters() if p.grad is not None)])
        decoder.zero_grad()
    assert sums[-5:-3].tolist() == [512 * 3 * 2, 0]
    for first, second in zip(*found, strict=True):
        # The compiler may fuse what it compiles for records in another way.
        assert torch.equal(first, second) or (compiled and (first - second).norm() <= 1e-2 * first.norm())


def test_recorded_growth_is_each_adapters(mesh: Mesh) -> None:
    # Catches a pass recorded for one adapter that serves another, alone or mixed, and one that was changed since.
    model = place(mesh, torch.bfloat16, compiled=False)
    bank = AdapterBank(model.module, num_resident=2, max_rank=8, device="cuda")
    sampler = Sampler(model, device=torch.device("cuda"), cache_tokens=2048, bank=bank)
    for seed, name in enumerate(("a", "b")):
        bank.add(name, AdapterSpec(rank=8, alpha=16), seed=seed)
        for adapter in bank.adapters(name).values():
            adapter.pair.B.data.normal_(std=0.02, generator=torch.Generator("cuda").manual_seed(seed))
    for names in (("a",), ("b",), (None,), ("a", "b", None), ("b",), ("a", "b")):
        requests = [GenerationRequest((1, 2, 3), 20, seed=index, adapter=name) for index, name in enumerate(names)]
        for request, result in zip(requests, sampler.run(requests), strict=True):
            bank.activate([(request.adapter, 3 + request.max_tokens)])
            check_logprobs(model, [request], [result], 0.08)
        if names == (None,):
            for adapter in bank.adapters("b").values():
                adapter.pair.B.data.mul_(-2)
            sampler.weights_changed(1, "b")


def sample_on_all_gpus() -> None:
    """This rank's part: samples of sharded weights, before and after these were trained and are gathered anew."""
    runtime.init()
    mesh = Mesh(ParallelDims.resolve("fsdp2", dist.get_world_size()), "cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    model = place(mesh, torch.bfloat16, compiled=False, mode="fsdp2", device=str(device))
    parameters = list(model.module.parameters())
    sampler = Sampler(model, device=device, cache_tokens=2048, max_running=4, keep_gathered=True, is_distributed=True)
    requests = [GenerationRequest(tuple(range(5 * count)), 7 * count, seed=count) for count in range(1, 10)]
    for number in range(3):
        results = sampler.run(requests)
        assert sampler._decode is not None
        assert {rows for rows, *_ in sampler._decode._recorded} == {1, 2, 4}
        check_logprobs(model, requests, results, 0.08)
        layout = SequenceLayout.from_lengths([20], device)
        model.forward(torch.arange(20, device=device), layout).float().square().sum().backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.1)
                parameter.grad = None
        model.drop_gathered()
        sampler.weights_changed(number)
    runtime.shutdown()


def test_two_gpus_record_growth_of_sharded_weights(two_gpus) -> None:
    # Catches passes that go on with memory into which the weights were gathered before training freed it, ranks that
    # wait for each other's passes, and waits of FSDP2's streams that cannot be recorded.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    path = f"{Path(__file__).parents[1] / 'support'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=environment)
    assert result.returncode == 0, result.stderr[-6000:]


if __name__ == "__main__":
    sample_on_all_gpus()


class _EveryThird:
    """A grammar that allows every third token."""

    problem = None

    def add(self, token: int) -> None: ...

    def allowed(self) -> np.ndarray:
        bits = np.zeros(1024, np.uint8)
        bits[::3] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def test_biases_penalties_and_masks_are_those_of_a_cpu() -> None:
    # Catches words of a mask, or counts of tokens, that reach other rows on the device.
    rules = [
        EditRules(bias={7: 30.0, 999: -5.0}),
        EditRules(repetition=1.3, frequency=0.5, presence=0.25),
        EditRules(grammar=_EveryThird),
        EditRules(bias={3: 2.0}, repetition=0.8, grammar=_EveryThird),
    ]
    edits = [LogitEdits(each, range(50), [40, 41, 40, 500]) for each in rules]
    logits = torch.randn(len(rules), 1000, generator=torch.Generator().manual_seed(1))
    on_cpu = edited_logits(logits, edits)
    torch.testing.assert_close(edited_logits(logits.cuda(), edits).cpu(), on_cpu)
    draws = [DrawRule(0.0, None, 1.0, 0.5, each) for each in edits]
    assert torch.equal(draw(logits.cuda(), draws, 0).tokens, on_cpu.argmax(-1))
