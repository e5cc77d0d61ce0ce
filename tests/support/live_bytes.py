"""What memory computations hold on a CPU, which counts none itself."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors computed under it: those still held, and the peak; a `Meter` of step_memory."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A view of what was given is nothing new.
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._peak = max(self._peak, self.held())
        return result

    def held(self) -> int:
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())

    def peak(self) -> int:
        return self._peak

    def restart(self) -> None:
        self._peak = self.held()
