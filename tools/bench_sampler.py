"""Times generation by the embedded sampler, and with --peer by transformers, on one GPU.

    uv run tools/bench_sampler.py --dry-run                              # anywhere: a tiny model, to test the tool
    uv run tools/bench_sampler.py --model qwen3-8b --samples 1 16 64 256 --peer

Random weights in bf16. Each line is one batch of samples from different prompts: first with one new token each, which
mostly times the prefill, then with all of them; the difference is pure decoding. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from xorl.cli.bench_config import SHAPES, shapes
from xorl.core import runtime
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import spec_for
from xorl.core.nn.kernels import choose_kernels
from xorl.core.parallel import ParallelPolicy, parallelize
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.server.sampler import GenerationRequest, Sampler

Generate = Callable[[list[list[int]], int], int]
"""Generates this many tokens for each prompt, and returns the total number."""


def ours(shape: str, device: torch.device, num_samples: int, length: int) -> Generate:
    """The embedded sampler, on a model as built for training."""
    hf_config = json.loads((SHAPES / f"{shape}.json").read_text())
    spec = spec_for(hf_config)
    config = spec.config_from_hf(hf_config)
    attention = resolve_attention(
        "auto", AttentionRequest(device.type, torch.bfloat16, config.layers[0].attention.head_dim, None)
    )
    kernels = choose_kernels(
        attention, device_type=device.type, dtype=torch.bfloat16, compiled=True, native=(), cast_bf16=False
    )
    with torch.device("meta"):
        decoder = spec.build(config, merge_qkv=True, kernels=kernels).to(torch.bfloat16)
    decoder.compute_dtype = torch.bfloat16
    mesh = Mesh(ParallelDims.resolve("none", 1, shard_size=-1, replicate_size=-1), device.type)
    model = parallelize(
        decoder,
        mesh,
        ParallelPolicy(data_parallel_mode="none"),
        device=device,
        fill=lambda module: decoder.init_weights(0),
    )
    cache_tokens = num_samples * (length + 16)
    sampler = Sampler(model, device=device, cache_tokens=cache_tokens, max_running=num_samples)

    def generate(prompts: list[list[int]], num_new: int) -> int:
        requests = [GenerationRequest(tuple(prompt), num_new, seed=index) for index, prompt in enumerate(prompts)]
        return sum(len(sample.tokens) for result in sampler.run(requests) for sample in result.samples)

    return generate


def theirs(shape: str, device: torch.device) -> Generate:
    """`generate` of transformers."""
    config = AutoConfig.from_pretrained(str(SHAPES / f"{shape}.json"))
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_new: int) -> int:
        tokens = torch.tensor(prompts, device=device)
        options = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": True, "pad_token_id": 0}
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), eos_token_id=None, **options)
        return found.numel() - tokens.numel()

    return generate


def timed(call: Callable[[], int], device: torch.device) -> tuple[float, int]:
    """Returns the seconds of a call, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    count = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, count


def measure(name: str, generate: Generate, flags: argparse.Namespace, device: torch.device) -> None:
    """Prints one row per number of samples, after a warm-up batch."""
    generator = torch.Generator().manual_seed(0)

    def run(count: int, num_new: int) -> tuple[float, int]:
        # Always new prompts, because the sampler reuses the cached keys of known ones.
        prompts = torch.randint(0, 256, (count, flags.prompt), generator=generator).tolist()
        return timed(partial(generate, prompts, num_new), device)

    for count in flags.samples:
        # The first batch compiles kernels and records passes.
        run(count, flags.new)
        first_s, _ = run(count, 1)
        all_s, num_tokens = run(count, flags.new)
        growth_s = all_s - first_s
        print(
            f"| {name} | {count} | {first_s:.3f} | {all_s:.2f} | {growth_s / (flags.new - 1) * 1e3:.2f} | "
            f"{(num_tokens - count) / growth_s:,.0f} |",
            flush=True,
        )


def main() -> None:
    """Parses the command line, measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=shapes(), help="a shape of `xorl bench`")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16, 64, 256], help="concurrent samples")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens drawn for each sample")
    parser.add_argument("--peer", action="store_true", help="also measure transformers")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, whose times are meaningless")
    flags = parser.parse_args()
    if flags.dry_run:
        flags.model, flags.samples, flags.prompt, flags.new = "tiny", [1, 3], 20, 5
    device = runtime.init().device
    print(
        f"{flags.model}, prompts of {flags.prompt} tokens, {flags.new} drawn, torch {torch.__version__}\n\n"
        "| system | samples | first token s | all s | ms a step | tokens/s of growth |\n|---|---|---|---|---|---|"
    )
    systems = {"xorl": lambda: ours(flags.model, device, max(flags.samples), flags.prompt + flags.new)}
    if flags.peer:
        systems["transformers"] = lambda: theirs(flags.model, device)
    for name, build in systems.items():
        measure(name, build(), flags, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    runtime.shutdown()


if __name__ == "__main__":
    main()
