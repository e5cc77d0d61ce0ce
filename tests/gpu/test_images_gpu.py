"""Images on a GPU: the encoder's attention with the heads of real models, and a run in bf16 with compiled layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from image_models import DOCUMENTS, make_image_decoder, make_image_model, packed
from image_runs import image_run, write_image_folder, write_image_rows
from xorl.config import config_from_mapping
from xorl.core.loss import cross_entropy
from xorl.core.models.image_encoder import ImageEncoder
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.kernels.attention.reference import eager_attention
from xorl.train import build_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def encoded(head_dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The features of the documents' images, and the gradients of an encoder with heads of this width, in fp32."""
    config = make_image_decoder(make_image_model())[0].config.images
    assert config is not None
    config = replace(config, width=2 * head_dim)
    request = AttentionRequest(device, dtype, head_dim, None, causal=False)
    attention = eager_attention if device == "cpu" else resolve_attention("auto", request)
    encoder = ImageEncoder(config, attention)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.1 * noise)
    encoder.to(device)
    images = packed(DOCUMENTS)[2]["images"]
    features, taps = encoder(replace(images, patches=images.patches.to(device)), dtype)
    outputs = torch.cat([features, *taps])
    weight = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (outputs.float() * weight).sum().backward()
    gradients = {name: parameter.grad.float().cpu() for name, parameter in encoder.named_parameters()}
    return outputs.detach().float().cpu(), gradients


@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_the_encoder_in_bf16_is_that_in_fp32(head_dim: int) -> None:
    # Catches an attention kernel that is wrong for heads of this width, which no causal test shows.
    found, gradients = encoded(head_dim, "cuda", torch.bfloat16)
    wanted, expected = encoded(head_dim, "cpu", torch.float32)
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() < 0.06 * expected[name].norm(), name


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_in_bf16_learns(tmp_path: Path, compiled: bool) -> None:
    # Catches layers that cannot be compiled between features that are added, and steps that wait for the device.
    write_image_folder(tmp_path / "model")
    write_image_rows(tmp_path / "data", 24)
    options = {"enable_mixed_precision": True, "enable_compile": compiled, "freeze_encoders": False, "max_steps": 8}
    run = build_run(config_from_mapping(image_run(tmp_path, tmp_path / "output", **options)).config)
    losses = []
    for _, batches in run.loader.steps():
        sums = run.engine.forward_backward(batches, cross_entropy)
        run.engine.optim_step(0.01, sums.divisor)
        losses.append(float(sums.loss_sum / sums.num_trained_tokens))
    assert losses[-1] < 0.8 * losses[0]
