"""The names of experts in checkpoints, and tensors that stack what all experts of a layer have.

Shapes: E experts, D model width, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertStack:
    """How checkpoints stack the matrices of experts: [E, outputs, inputs], and biases [E, outputs].

    Attributes:
        is_transposed: matrices are [E, inputs, outputs] instead.
        alternates: the outputs of gate and up alternate, instead of all of the gate's coming first.
        module: the module of the stacks in transformers, relative to the layer.
        gate_up, down: their names in files, relative to the layer, if these are not gate_up_proj and down_proj of the
            module. Those of biases end with "_bias".
    """

    is_transposed: bool = False
    alternates: bool = False
    module: str = "mlp.experts"
    gate_up: str | None = None
    down: str | None = None

    @property
    def in_files(self) -> Mapping[str, str]:
        """The names in files of both tensors, relative to the layer."""
        return {
            "gate_up": self.gate_up or f"{self.module}.gate_up_proj",
            "down": self.down or f"{self.module}.down_proj",
        }


# The form that transformers 5 has in memory of all families that do not declare another one.
IN_MEMORY = ExpertStack()


@dataclass(frozen=True)
class ExpertNames:
    """The names of routers and experts in a family's checkpoints, relative to their layer.

    Attributes:
        router: the router's module.
        expert: the module of one expert, with {} for its index.
        gate, up, down: the projections of an expert; gate is empty for experts without one.
        correction: the tensor that routers add to scores for the choice; only for families whose routers have one.
        stack: how checkpoints stack what all experts of a layer have; None: they have a tensor for each expert, under
            the names above. Recipes, adapters and other code use these names in both cases: `CheckpointView` cuts the
            stacks, and exports make them.
    """

    router: str
    expert: str
    gate: str
    up: str
    down: str
    correction: str = "mlp.gate.e_score_correction_bias"
    stack: ExpertStack | None = None

    @property
    def stacks(self) -> ExpertStack:
        """How stacks look: those of checkpoints or, if these have none, those of transformers 5 in memory."""
        return self.stack or IN_MEMORY

    @property
    def ups(self) -> tuple[str, ...]:
        """The projections that are stacked first."""
        return (self.gate, self.up) if self.gate else (self.up,)

    @property
    def is_in_memory(self) -> bool:
        """Whether files may also have the stacks of transformers 5, under the names that these have in memory."""
        return self.stack is None and self.expert == f"{IN_MEMORY.module}.{{}}"


@dataclass(frozen=True)
class Cut:
    """The tensor of one projection of an expert in a stack: some of its outputs, [outputs, inputs] or [outputs]."""

    expert: int
    outputs: slice
    is_transposed: bool
    shape: tuple[int, ...]

    def of(self, held: Tensor) -> Tensor:
        """The tensor, in memory of what a stack has of the expert."""
        return (held.t() if self.is_transposed else held)[self.outputs]


def is_stack(name: str, names: ExpertNames) -> bool:
    """Whether a tensor with this name, as in recipes, is a stack: of the family, or of transformers 5 in memory."""
    return _parsed(name, names.stacks) is not None


def _parsed(name: str, stack: ExpertStack) -> tuple[str, str, str] | None:
    """What a stack has: its layer, which projection, and the leaf of each expert's tensors. None for other tensors."""
    for projection, tensor in stack.in_files.items():
        for leaf, ending in (("weight", ""), ("bias", "_bias")):
            if name.endswith(whole := f".{tensor}{ending}"):
                return name.removesuffix(whole), projection, leaf
    return None


def cuts_of(name: str, shape: Sequence[int], names: ExpertNames) -> dict[str, Cut]:
    """The tensors of the experts in a stack of this name and shape, by name."""
    stack = names.stacks
    parsed = _parsed(name, stack)
    assert parsed is not None, f"{name} is no stack"
    layer, projection, leaf = parsed
    parts = (names.down,) if projection == "down" else names.ups
    is_transposed = stack.is_transposed and leaf == "weight"
    num_experts, sizes = shape[0], list(shape[1:])
    if is_transposed:
        sizes.reverse()
    count = sizes[0] // len(parts)
    return {
        f"{layer}.{names.expert.format(expert)}.{part}.{leaf}": Cut(
            expert,
            slice(index, None, len(parts)) if stack.alternates else slice(index * count, (index + 1) * count),
            is_transposed,
            (count, *sizes[1:]),
        )
        for expert in range(num_experts)
        for index, part in enumerate(parts)
    }


def stack_of(name: str, names: ExpertNames) -> str:
    """The name in files of what holds the tensor with this name, as in recipes: a stack, or the tensor itself."""
    layer, _, rest = name.partition(f".{names.expert.removesuffix('.{}')}.")
    expert, _, last = rest.partition(".")
    part, _, leaf = last.partition(".")
    is_part = expert.isdecimal() and part in (names.gate, names.up, names.down) and leaf in ("weight", "bias")
    if names.stack is None or not is_part:
        return name
    tensor = names.stack.in_files["down" if part == names.down else "gate_up"]
    return f"{layer}.{tensor}{'_bias' if leaf == 'bias' else ''}"


def stacked_shape(shape: Sequence[int], num_tensors: int, name: str, names: ExpertNames) -> tuple[int, ...]:
    """The shape of the stack `name` of so many tensors of experts of this shape."""
    parsed = None if names.stack is None else _parsed(name, names.stack)
    assert names.stack is not None, "asked only for families with stacks"
    assert parsed is not None, f"{name} is no stack"
    num_parts = 1 if parsed[1] == "down" else len(names.ups)
    sizes = [num_parts * shape[0], *shape[1:]]
    is_transposed = names.stack.is_transposed and len(shape) > 1
    return (num_tensors // num_parts, *(reversed(sizes) if is_transposed else sizes))


def stacked(name: str, tensors: Mapping[str, Tensor], names: ExpertNames) -> Tensor:
    """The stack `name` of the tensors of experts, by their names as in recipes."""
    first = next(iter(tensors.values()))
    out = first.new_empty(stacked_shape(first.shape, len(tensors), name, names))
    for single, cut in cuts_of(name, out.shape, names).items():
        cut.of(out[cut.expert]).copy_(tensors[single])
    return out
