"""Parameters that the ranks divide, as checkpoints save them and weights are loaded into them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from xorl.ckpt import Piece, Stateful
from xorl.core.nn.share import Share, pieces


class DividedState:
    """Another state, with the tensors of divided parameters as `Piece`s. `shares` are by name of a parameter.

    The values of an optimizer's state are named after their parameter and divided like it.
    """

    def __init__(self, state: Stateful, shares: Mapping[str, Share]) -> None:
        self._state = state
        self._shares = shares

    def state_dict(self) -> dict[str, Tensor | Piece]:
        """The tensors of the other state."""
        return {name: self._placed(name, tensor) for name, tensor in self._state.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor | Piece]) -> None:
        """Load the other state."""
        self._state.load_state_dict({key: one.tensor if isinstance(one, Piece) else one for key, one in state.items()})

    def _placed(self, name: str, tensor: Tensor | Piece) -> Tensor | Piece:
        share = self._shares.get(name) or self._shares.get(name.rpartition(".")[0])
        if share is None or not share.divided_over or tensor.ndim == 0 or isinstance(tensor, Piece):
            return tensor
        return piece(tensor, share)


def piece(tensor: Tensor, share: Share) -> Piece:
    """A module's tensor, which may be sharded by FSDP2, as the part of a whole parameter that it is for checkpoints."""
    boxes = [(box.offset, box.shape) for box, _ in pieces(tensor, share)]
    return Piece(tensor, share.whole(tensor.shape), boxes)
