"""Times a layer with a recurrence, forward and backward, and the functions that its recurrence is made of.

    uv run tools/bench_recurrent.py                                          # a tiny layer, to test the tool
    uv run tools/bench_recurrent.py --shape qwen3.5-9b --num-tokens 16384 --json recurrent.json

On a GPU, gated delta nets need fla-core 0.6.0 (the extra `fla` of xorl-kernels). The row has four documents. Prints a
table in Markdown: milliseconds of forward and backward pass together, and the share of the layer's. "layer" is a whole
decoder layer, "mixer" its recurrence with projections, and the rest are functions of the backend. For whole training
steps beside transformers, which uses fla-core too, see `xorl bench --model qwen3.5-9b-4-layers`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bench_experts import median_ms
from xorl.core.models import DecoderConfig, DecoderLayer
from xorl.core.models.decoder_config import DenseConfig, LayerConfig
from xorl.core.nn import LayerKernels, NormConfig
from xorl.core.nn.gated_delta_net import GatedDeltaConfig
from xorl.core.nn.kernels import choose_kernels
from xorl.core.nn.state_space import StateSpaceConfig
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent import RECURRENCES, RecurrenceFns, RecurrenceRequest, resolve_recurrence

# D, F, and the recurrence.
SHAPES = {
    "qwen3.5-9b": (4096, 12_288, GatedDeltaConfig(16, 32, 128, 128, 4)),
    "qwen3-next": (2048, 5120, GatedDeltaConfig(16, 32, 128, 128, 4, by_key_head=True)),
    "tiny": (32, 48, GatedDeltaConfig(2, 4, 8, 8, 4)),
    "nemotron-h-8b": (4096, 21_504, StateSpaceConfig(128, 8, 64, 128, 4)),
    "tiny state space": (32, 48, StateSpaceConfig(4, 2, 8, 8, 4)),
}


@dataclass(frozen=True)
class Row:
    """Median milliseconds of forward and backward pass."""

    backend: str
    num_tokens: int
    name: str
    milliseconds: float


def layer_of(shape: str, kernels: LayerKernels, device: torch.device, dtype: torch.dtype) -> DecoderLayer:
    """A decoder layer with random weights."""
    width, inner, mixer = SHAPES[shape]
    layers = (LayerConfig(mixer, DenseConfig("gated", inner, "silu", bias=False)),)
    config = DecoderConfig(
        vocab_size=1,
        hidden_size=width,
        layers=layers,
        max_position_embeddings=1,
        learned_positions=False,
        norm=NormConfig("rms", 1e-6, offset=1.0),
        tie_word_embeddings=True,
        initializer_range=0.02,
        scale_residual_init=False,
    )
    layer = DecoderLayer(config, 0, merge_qkv=True, kernels=kernels).to(device)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)
    return layer


def passes(
    kernels: LayerKernels, shape: str, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    width, _, config = SHAPES[shape]
    layer = layer_of(shape, kernels, device, dtype)
    quarter = num_tokens // 4
    layout = SequenceLayout.from_lengths([quarter + 7, quarter - 7, quarter - 1, num_tokens - 3 * quarter + 1], device)
    (x,) = trained(torch.randn(num_tokens, width, device=device).to(dtype))
    assert layer.linear_attn is not None
    mixer = layer.linear_attn
    if isinstance(config, GatedDeltaConfig):
        parts = _parts_of_delta(config, kernels.recurrence, layout, dtype)
    else:
        parts = _parts_of_states(config, kernels.recurrence, layout, dtype)
    return {
        "layer": timed(lambda: layer(x, layout, None), [x, *layer.parameters()]),
        "mixer": timed(lambda: mixer(x, layout), [x, *mixer.parameters()]),
        **parts,
    }


def trained(*inputs: Tensor) -> list[Tensor]:
    """Leaves with a gradient."""
    return [x.detach().requires_grad_() for x in inputs]


def timed(compute: Callable[[], Tensor | tuple], leaves: Sequence[Tensor]) -> Callable[[], object]:
    """A forward and backward pass."""

    def run() -> object:
        out = compute()
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, list(leaves), torch.ones_like(out))

    return run


def _parts_of_delta(
    delta: GatedDeltaConfig, functions: RecurrenceFns, layout: SequenceLayout, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    num_tokens, device = layout.num_tokens, layout.cu_seqlens.device

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(dtype)

    q, k = (
        functions.unit_norm(draw(num_tokens, delta.num_key_heads, delta.key_dim), scale)
        for scale in (delta.key_dim**-0.5, 1.0)
    )
    v, gate = (draw(num_tokens, delta.num_value_heads, delta.value_dim) for _ in range(2))
    g = -torch.rand(num_tokens, delta.num_value_heads, device=device)
    inputs = trained(q, k, v, g, g.exp())
    mixed, taps = trained(draw(num_tokens, sum(delta.row_counts)), draw(sum(delta.row_counts), delta.num_taps))
    (heads,) = trained(draw(num_tokens, delta.num_key_heads, delta.key_dim))
    normed = trained(v, draw(delta.value_dim), gate)
    return {
        "gated_delta": timed(
            lambda: functions.gated_delta(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], layout), inputs
        ),
        "causal_conv": timed(lambda: functions.causal_conv(mixed, taps, None, "silu", layout), [mixed, taps]),
        "unit_norm, twice": timed(lambda: functions.unit_norm(heads, 1.0) + functions.unit_norm(heads, 0.1), [heads]),
        "gated_norm": timed(lambda: functions.gated_norm(normed[0], normed[1], normed[2], 1e-6), normed),
    }


def _parts_of_states(
    space: StateSpaceConfig, functions: RecurrenceFns, layout: SequenceLayout, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    num_tokens, device = layout.num_tokens, layout.cu_seqlens.device

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(dtype)

    x, gate = (draw(num_tokens, space.num_heads, space.head_dim) for _ in range(2))
    b, c = (draw(num_tokens, space.num_groups, space.state_dim) for _ in range(2))
    dt = torch.rand(num_tokens, space.num_heads, device=device) * 0.1
    inputs = trained(
        x, dt, -torch.rand(space.num_heads, device=device), b, c, torch.ones(space.num_heads, device=device)
    )
    mixed, taps = trained(draw(num_tokens, sum(space.mixed_counts)), draw(sum(space.mixed_counts), space.num_taps))
    by_group = (num_tokens, space.num_groups, space.width // space.num_groups)
    normed = trained(x.reshape(by_group), draw(*by_group[1:]), gate.reshape(by_group))
    return {
        "state_space": timed(
            lambda: functions.state_space(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], inputs[5], layout),
            inputs,
        ),
        "causal_conv": timed(lambda: functions.causal_conv(mixed, taps, None, "silu", layout), [mixed, taps]),
        "norm_of_gated": timed(lambda: functions.norm_of_gated(normed[0], normed[1], normed[2], 1e-6), normed),
    }


def main() -> None:
    """Time the backends that can run here, and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--backends", nargs="+", help="[all that can run here; on a GPU, only the fastest]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mixer = SHAPES[options.shape][2]
    if isinstance(mixer, GatedDeltaConfig):
        request = RecurrenceRequest(device.type, dtype, heads=(mixer.key_dim, mixer.value_dim))
    else:
        request = RecurrenceRequest(device.type, dtype, states=(mixer.head_dim, mixer.state_dim))
    fastest = RECURRENCES.resolved_name("auto", request)
    backends = options.backends or ([fastest] if device.type == "cuda" else RECURRENCES.runnable(request))
    rows: list[Row] = []
    print("| backend | tokens | part | ms | share of the layer |\n|---|---|---|---|---|")
    for backend in backends:
        kernels = choose_kernels(
            sdpa_attention,
            device_type=device.type,
            dtype=dtype,
            compiled=False,
            native=(),
            cast_bf16=False,
            recurrence=resolve_recurrence(backend, request),
        )
        for num_tokens in options.num_tokens:
            parts = passes(kernels, options.shape, num_tokens, device, dtype)
            times = {name: median_ms(run, device, options.rounds) for name, run in parts.items()}
            for name, milliseconds in times.items():
                rows.append(Row(backend, num_tokens, name, milliseconds))
                share = milliseconds / times["layer"]
                print(f"| {backend} | {num_tokens:,} | {name} | {milliseconds:.2f} | {share:.1%} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
