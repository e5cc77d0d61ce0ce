"""The private parts of torch that xorl-kernels uses; any release of torch may change them.

A test ensures that no other file of this package names a private part of torch. Holds for torch 2.10 to 2.15:
`tools/check_torch.py` runs the tests on the oldest and the newest. xorl.core has such a file, too; it takes operators,
and xorl.lora the hooks of modules, from here.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

__all__ = [
    "ATTENTION_AND_SCALED_PRODUCTS",
    "SCALED_PRODUCT",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "UncompiledDispatchMode",
    "add_tensor_",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_autograd",
    "changes_inputs",
    "counted_flops",
    "custom_operator_code",
    "efficient_attention_backward",
    "efficient_attention_forward",
    "flash_attention_backward",
    "flash_attention_forward",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_zero_",
    "fused_adamw_",
    "fused_sdp_choice",
    "grouped_mm",
    "has_hooks",
    "maybe_mark_dynamic",
    "operator_name",
    "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_cudnn_attention_backward",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_efficient_attention_backward",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_backward",
    "scaled_dot_product_flash_attention_for_cpu",
    "scaled_dot_product_flash_attention_for_cpu_backward",
    "scaled_mm",
    "start_all_to_all",
    "storage_key",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "wait_tensor",
]

aten = torch.ops.aten

# Attention over packed documents, and over documents of equal length. Only the operators return the log-sum-exp.
flash_attention_forward = aten._flash_attention_forward
flash_attention_backward = aten._flash_attention_backward
efficient_attention_forward = aten._efficient_attention_forward
efficient_attention_backward = aten._efficient_attention_backward
scaled_dot_product_cudnn_attention = aten._scaled_dot_product_cudnn_attention
scaled_dot_product_cudnn_attention_backward = aten._scaled_dot_product_cudnn_attention_backward
scaled_dot_product_efficient_attention = aten._scaled_dot_product_efficient_attention
scaled_dot_product_efficient_attention_backward = aten._scaled_dot_product_efficient_attention_backward
scaled_dot_product_flash_attention = aten._scaled_dot_product_flash_attention
scaled_dot_product_flash_attention_backward = aten._scaled_dot_product_flash_attention_backward
scaled_dot_product_flash_attention_for_cpu = aten._scaled_dot_product_flash_attention_for_cpu
scaled_dot_product_flash_attention_for_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
fused_sdp_choice = torch._fused_sdp_choice

# Products of groups of rows, and of fp8 matrices with their scales.
grouped_mm = torch._grouped_mm
scaled_mm = torch._scaled_mm

SCALED_PRODUCT: OpOverload = aten._scaled_mm.default
ATTENTION_AND_SCALED_PRODUCTS: frozenset[OpOverload] = frozenset(
    {
        SCALED_PRODUCT,
        scaled_dot_product_flash_attention.default,
        scaled_dot_product_efficient_attention.default,
        scaled_dot_product_cudnn_attention.default,
        scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""The operators that torch's functions for attention and for fp8 products reach the dispatcher as."""

# Operations on lists of tensors, in few launches.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_


def add_tensor_(tensors: Sequence[Tensor], added: Tensor) -> None:
    """Add the 0-dim `added` to each tensor. `torch._foreach_add_` would read it on the host."""
    aten._foreach_add_.Tensor(list(tensors), added)


# Collectives that the compiler can trace; a process group is given by its name.


def all_reduce(value: Tensor, group_name: str) -> Tensor:
    """The sum of `value` over the ranks of a group, without a gradient."""
    return wait_tensor(torch.ops._c10d_functional.all_reduce(value.contiguous(), "sum", group_name))


def all_gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
    """The rows of x on all ranks of a group, which have equally many, in the order of the ranks; without a gradient."""
    return wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group_size, group_name))


# What a dispatch mode sees of an operator and its tensors.


class UncompiledDispatchMode(TorchDispatchMode):
    """A dispatch mode that code under it is not compiled with, so that torch's compiler need not be imported for it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def operator_name(operator: OpOverload) -> str:
    """The name of an operator without its namespace and overload, such as "mm"."""
    return operator._schema.name.partition("::")[2]


def changes_inputs(operator: OpOverload) -> bool:
    """Whether an operator writes into any of its inputs."""
    return operator._schema.is_mutable


def counted_flops(operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> int:
    """The FLOPs by the formula that is registered for an operator; 0 without one. Tensors may be on the meta device,
    except for sizes of documents, which formulas read."""
    formula = flop_registry.get(operator._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory of a tensor among those that exist."""
    return tensor.untyped_storage()._cdata


def has_hooks(module: nn.Module) -> bool:
    """Whether functions are registered to be called in the passes of `module`."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def start_all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group_name: str) -> Tensor:
    """Start to send rows of x, split by rank; `wait_tensor` of the result returns those that the ranks sent.

    `x` must be contiguous, and live until then.
    """
    return torch.ops._c10d_functional.all_to_all_single(x, list(received), list(sent), group_name)


def wait_tensor(started: Tensor) -> Tensor:
    """The result of a collective that was started."""
    return torch.ops._c10d_functional.wait_tensor(started)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group_name: str) -> Tensor:
    """Send rows of x, split by rank, and return those that the ranks sent, without a gradient."""
    return wait_tensor(start_all_to_all(x.contiguous(), sent, received, group_name))


def all_to_all_autograd(x: Tensor, sent: Sequence[int], received: Sequence[int], group_name: str) -> Tensor:
    """As `all_to_all`, with the gradient: the exchange in the opposite direction."""
    exchange = torch.ops._c10d_functional_autograd.all_to_all_single
    return wait_tensor(exchange(x.contiguous(), list(received), list(sent), group_name))


def all_gather_autograd(x: Tensor, group_size: int, group_name: str) -> Tensor:
    """As `all_gather`, with the gradient: its sum over the ranks for this rank's rows."""
    return wait_tensor(
        torch.ops._c10d_functional_autograd.all_gather_into_tensor(x.contiguous(), group_size, group_name)
    )


def reduce_scatter_autograd(x: Tensor, group_size: int, group_name: str) -> Tensor:
    """This rank's rows, of equally many for each rank, of the sum of x over the ranks; with the gradient, all rows."""
    scatter = torch.ops._c10d_functional_autograd.reduce_scatter_tensor
    return wait_tensor(scatter(x.contiguous(), "sum", group_size, group_name))


def maybe_mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Tell the compiler that a size may change, if it can be dynamic. Importing the compiler takes seconds."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def custom_operator_code(operator: object) -> Callable[..., object] | None:
    """The Python function of an operator that `torch.library.custom_op` defined; None for other operators."""
    name = operator.name() if isinstance(operator, OpOverload) else ""
    return OPDEFS[name]._init_fn if name in OPDEFS else None
