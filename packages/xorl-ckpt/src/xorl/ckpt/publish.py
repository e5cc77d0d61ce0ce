"""Publishes a folder atomically: it appears under its final name once it is complete, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import sync_file
from xorl.ckpt.ranks import fail_together, this_rank


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Collective: yields a temporary sibling folder on every rank, and renames it to `folder` when the block ends.

    Only rank 0 creates and renames it. The block may run collectives; it must raise on every rank or on none. Raises
    CheckpointError, before anything is written, if the folder exists and is not empty. Leftovers of a killed process
    are removed when the same folder is published again.
    """
    folder = Path(folder).absolute()
    # Must not look like an unfinished save: in a run's checkpoint folder, the run's next save removes those.
    temporary = folder.with_name(f".exporting_{folder.name}")
    with fail_together(f"export to {folder}"):
        if this_rank() == 0:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise CheckpointError(
                    f"{folder} already exists and is not empty; an export never overwrites it. Choose another folder."
                )
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    try:
        yield temporary
        with fail_together(f"export to {folder}"):
            if this_rank() == 0:
                sync_file(temporary)
                temporary.rename(folder)
                sync_file(folder.parent)
    except BaseException:  # also on Ctrl-C, since nothing else removes the temporary folder
        if this_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
