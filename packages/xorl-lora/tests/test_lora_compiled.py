"""Compiled layers with adapters: one graph, shared by equal layers, with the gradients of plain ones."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tiny_decoders import summed_loss, tiny_decoder, train_as_if_
from tiny_models import hf_config
from xorl.core.loss import cross_entropy
from xorl.core.models import Decoder
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.core.parallel.compile import CompileBackend, compile_layers
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, inject

SIZES = hf_config(num_hidden_layers=3)
PACKS = [[32], [3, 9, 1, 20], [17, 5], [40, 2, 2]]


def decoder(spec: AdapterSpec, recompute: Recompute, backend: CompileBackend | None) -> Decoder:
    model = tiny_decoder(SIZES)
    inject(model, spec)
    train_as_if_(adapter_parameters(model))
    recompute_layers(model.layers, recompute, reentrant=False, compiled=backend is not None)
    if backend is not None:
        compile_layers(list(model.layers), backend=backend, device_type="cpu")
    return model


def gradients(model: Decoder) -> dict[str, Tensor]:
    for lengths in PACKS:
        summed_loss(model, torch.arange(sum(lengths)) % 64, lengths).backward()
    return {name: parameter.grad for name, parameter in adapter_parameters(model).items()}


@pytest.mark.parametrize(
    ("options", "recompute"),
    [({}, "none"), ({"use_dora": True, "targets": ("q_proj", "v_proj", "up_proj")}, "operation"), ({}, "layer")],
)
def test_a_layer_with_adapters_is_one_graph(options: dict, recompute: Recompute) -> None:
    # Catches a break in the graph, and a name or a number of an adapter that makes each layer a graph of its own.
    spec = AdapterSpec(rank=3, alpha=4.0, **options)
    expected = gradients(decoder(spec, "none", None))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    measured = gradients(decoder(spec, recompute, counter))
    assert counter.frame_count == 1
    for name, gradient in expected.items():
        assert (measured[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_a_recomputed_layer_keeps_little_but_its_input() -> None:
    # Catches what torch keeps of autograd functions in a graph, whatever is marked to be computed again around them.
    torch._dynamo.reset()
    model = decoder(AdapterSpec(rank=3, alpha=4.0), "layer", "aot_eager_decomp_partition")
    layout = SequenceLayout.from_lengths([40])
    ids = torch.arange(40)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        loss = model(ids, layout, partial(cross_entropy, targets={"labels": ids})).sum
    loss.backward()
    widths = [tensor.numel() // 40 for tensor in kept if tensor.shape[:1] == (40,)]
    # Three layers' inputs, and three around the last norm and the head: none as wide as a fused projection's output.
    assert [width for width in widths if width >= 8] == [32] * 6
