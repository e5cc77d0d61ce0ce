"""What memory computations hold on a CPU, which counts none itself."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors computed under it: those still held, and the peak; a `Meter` of step_memory."""

    def __init__(self) -> None:
        super().__init__()
        # torch keeps the Python object of a storage for as long as the storage lives.
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._held = self._peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A view of what was given is nothing new.
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._add(storage)
        self._peak = max(self._peak, self._held)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        reference = weakref.ref(storage, self._freed)
        # Several results may share one, and equal references of living objects are one key.
        self._held += storage.nbytes() - self._sizes.pop(reference, 0)
        self._sizes[reference] = storage.nbytes()

    def _freed(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._held -= self._sizes.pop(reference)

    def held(self) -> int:
        return self._held

    def peak(self) -> int:
        return self._peak

    def restart(self) -> None:
        self._peak = self._held
