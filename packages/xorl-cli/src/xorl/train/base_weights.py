"""Tells whether the base weights of an adapter are still those that it was trained over, by their fingerprint."""

from __future__ import annotations

from xorl.ckpt import CheckpointError, CheckpointFailure, SafetensorsSource, resolve_folder
from xorl.config.fields import LoadWeightsMode
from xorl.train.adapters.folder import AdapterFolder


def base_fingerprint(option: str, path: str | None, mode: LoadWeightsMode = "broadcast") -> str | None:
    """The fingerprint of the weights in a folder or Hub repository: see `SafetensorsSource.fingerprint`.

    None for random weights and for a checkpoint of xorl (`mode` dcp), in which no adapter names its base. Reads at most
    12 KiB of each tensor. Raises ValueError, beginning with `option`, if there are no weights.
    """
    if path is None or mode == "dcp":
        return None
    try:
        with SafetensorsSource(resolve_folder(path)) as source:
            return source.fingerprint()
    except (CheckpointError, CheckpointFailure) as error:
        raise type(error)(f"{option}: {error}") from error


def require_weights(adapter: AdapterFolder, option: str, path: str | None, mode: LoadWeightsMode) -> None:
    """Raise ValueError if an adapter records the fingerprint of other weights than those that `option` names."""
    recorded = adapter.base_fingerprint
    if recorded is None or path is None or mode == "dcp":
        return
    found = base_fingerprint(option, path)
    if found != recorded:
        raise ValueError(
            f"{adapter.option}: the adapter in {adapter.folder} was trained over "
            f"{differing_weights(adapter.base, recorded, f'those in {path}, which {option} names,', found)}. Restore "
            f"the adapter's base, or merge it with `xorl export {adapter.folder} --merge --base {path}` and train that"
        )


def differing_weights(base: str | None, recorded: str, now: str, found: str | None) -> str:
    """Name the weights of both fingerprints, as the end of "was trained over ..."."""
    return (
        f"{base or 'weights'} with the fingerprint {recorded}, but {now} have {found}: the weights changed, or are "
        "others (compared by their names, dtypes and shapes, and samples of their values)"
    )
