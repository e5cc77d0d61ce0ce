"""Activations that wait in other memory: the same gradients, pages that are reused, and a limit that holds."""

import gc

import pytest
import torch
from torch import Tensor

from tiny_decoders import summed_loss, tiny_decoder
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.nn.fp8 import convert_linears
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.core.parallel.fp8 import Fp8Weights
from xorl.core.parallel.offload import PAGE_BYTES, ActivationOffload
from xorl.kernels.layout import SequenceLayout

HF_CONFIG = hf_config(num_hidden_layers=4)
INPUT_BYTES = 64 * 32 * 4


def model_with(recompute: Recompute, limit_bytes: float | None) -> tuple[Decoder, ActivationOffload | None]:
    model = tiny_decoder(HF_CONFIG)
    recompute_layers(model.layers, recompute, reentrant=False)
    if limit_bytes is None:
        return model, None
    offload = ActivationOffload(torch.device("cpu"), limit_bytes=limit_bytes, min_bytes=1)
    offload.install(list(model.layers))
    return model, offload


def step(model: Decoder, num_tokens: int = 64) -> dict[str, Tensor]:
    """The gradients of one step, by name."""
    model.zero_grad()
    summed_loss(model, torch.arange(num_tokens) % 64, [5, 9, num_tokens - 14]).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "layer", ("mlp",)])
def test_offloading_changes_no_bit(recompute: Recompute) -> None:
    # Catches a view that comes back with another offset or stride, and pages that are taken again too soon.
    plain, _ = model_with(recompute, None)
    model, offload = model_with(recompute, 0.0)
    for num_tokens in (64, 96, 32, 64):
        torch.testing.assert_close(step(model, num_tokens), step(plain, num_tokens), rtol=0, atol=0)
    assert offload.traffic_bytes > 0


@pytest.mark.parametrize(("limit", "num_offloaded"), [(0, 3), (INPUT_BYTES, 2), (2 * INPUT_BYTES, 1), (1e9, 0)])
def test_what_was_saved_last_stays_within_the_limit(limit: float, num_offloaded: int) -> None:
    # Catches a limit that is ignored, and copies of parameters, rotary tables or anything but a layer's input.
    model, offload = model_with("layer", limit)
    step(model)
    assert offload.traffic_bytes == num_offloaded * INPUT_BYTES


def test_whole_layers_are_copied_once() -> None:
    # Catches a copy for each view of one storage, and parameters that travel with the activations.
    model, offload = model_with("none", 0.0)
    plain, _ = model_with("none", None)
    saved = {parameter.untyped_storage().data_ptr() for parameter in plain.parameters()}
    sizes: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in saved:
            saved.add(address)
            sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        step(plain)
    step(model)
    # Three of the four layers; the tables and everything outside of the layers are part of the other sum alone.
    assert 0.5 * sum(sizes) < offload.traffic_bytes < 0.75 * sum(sizes)


def test_host_memory_is_bounded_over_varying_packs() -> None:
    # Catches pages that are lost with each pack of another length, or with a forward pass that nobody follows up.
    model, offload = model_with("none", 0.0)
    step(model, 128)
    taken = offload.host_bytes
    assert taken % PAGE_BYTES == 0
    for num_tokens in (16, 48, 128, 80, 32):
        step(model, num_tokens)
        layout = SequenceLayout.from_lengths([num_tokens])
        model(torch.arange(num_tokens) % 64, layout)
        with torch.no_grad():
            model(torch.arange(num_tokens) % 64, layout)
        gc.collect()
    assert offload.host_bytes == taken


def test_copies_of_weights_in_fp8_stay_on_the_device() -> None:
    # Catches weights in fp8, which are no parameters, that travel with the activations of each micro-batch.
    model, _ = model_with("none", None)
    convert_linears(model.layers, "tensorwise")
    Fp8Weights(model)
    offload = ActivationOffload(torch.device("cpu"), limit_bytes=0.0, min_bytes=512)
    offload.install(list(model.layers))
    step(model, 32)
    short = offload.traffic_bytes
    step(model, 64)
    # What does not grow with the tokens would be the weights: 7,680 bytes of each of three layers.
    assert 2 * short - (offload.traffic_bytes - short) < 7680
