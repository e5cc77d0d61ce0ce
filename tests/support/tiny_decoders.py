"""Decoders of tiny models with weights, and what tests do with them; tiny_models.py has the configurations."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xorl.core.loss import cross_entropy
from xorl.core.models import Decoder, spec_for
from xorl.core.models.spec import PLAIN_KERNELS
from xorl.core.nn import LayerKernels
from xorl.kernels.layout import SequenceLayout


def tiny_decoder(
    hf_config: Mapping[str, object], *, seed: int = 0, merge_qkv: bool = True, kernels: LayerKernels = PLAIN_KERNELS
) -> Decoder:
    """The decoder of such a config.json, with weights that are functions of the seed."""
    spec = spec_for(hf_config)
    decoder = spec.build(spec.config_from_hf(hf_config), merge_qkv=merge_qkv, kernels=kernels)
    decoder.init_weights(seed)
    return decoder


def summed_loss(decoder: Decoder, ids: Tensor, lengths: Sequence[int], labels: Tensor | None = None) -> Tensor:
    """The loss of documents of these lengths, whose labels are their own tokens unless others are given."""
    targets = {"labels": ids if labels is None else labels}
    layout = SequenceLayout.from_lengths(lengths)
    return decoder(ids, layout, loss=lambda hidden, head: cross_entropy(hidden, head, targets).sum)


def train_as_if_(parameters: Mapping[str, Tensor], seed: int = 1, scale: float = 0.2) -> None:
    """Move parameters by random numbers, as training would: adapters begin with matrices of zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(parameters.items()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
