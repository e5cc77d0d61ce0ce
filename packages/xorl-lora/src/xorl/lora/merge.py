"""Adapters folded into the weights they stand beside, after which the module is as plain as it was."""

import torch
from torch import nn

from xorl.lora.inject import adapted_linears
from xorl.lora.linear import LoRALinear


def merge_(model: nn.Module) -> None:
    """Fold every adapter of `model` into its base weight and put plain nn.Linear modules back, in place.

    W + (alpha / rank) * B @ A (Hu et al., 2021, arXiv:2106.09685) is computed in fp32 (fp64 for an fp64 base) and
    rounded once, to the dtype of the base, whose parameters stay the same objects. They also stay frozen.

    Raises ValueError if `model` has no adapters.
    """
    adapted = adapted_linears(model)
    if not adapted:
        raise ValueError(f"{type(model).__name__} has no adapters to merge")
    for name, module in adapted.items():
        model.set_submodule(name, _folded_(module))


@torch.no_grad()
def _folded_(module: LoRALinear) -> nn.Linear:
    weight = module.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight.copy_(torch.addmm(weight.to(wide), module.lora_B.to(wide), module.lora_A.to(wide), alpha=module.scale))
    # On the meta device, since its own parameters are replaced at once.
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    linear.weight = weight
    if module.bias is not None:
        linear.bias = module.bias
    return linear.train(module.training)
