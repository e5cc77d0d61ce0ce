"""Publishing a folder atomically: it appears under its name when it is complete, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import sync_file
from xorl.ckpt.ranks import agreed, this_rank


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Collective: yields, on every rank, a temporary sibling to write into; it becomes `folder` when the block ends.

    Only rank 0 creates and renames it. The block may run collectives; it must raise on every rank or on none. Raises
    CheckpointError if the folder exists and is not empty: nothing is written into it. Leftovers of a killed process are
    removed when the same folder is published again.
    """
    folder = Path(folder).absolute()
    # Not the name of a save in progress: the sibling may lie in a run's checkpoint folder, and the run's next save
    # removes those.
    temporary = folder.with_name(f".exporting_{folder.name}")
    with agreed(f"export to {folder}"):
        if this_rank() == 0:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise CheckpointError(
                    f"{folder} exists already; an export is never written into it. Choose another folder."
                )
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    try:
        yield temporary
        with agreed(f"export to {folder}"):
            if this_rank() == 0:
                sync_file(temporary)
                temporary.rename(folder)
                sync_file(folder.parent)
    except BaseException:  # Ctrl-C too: nothing else removes it
        if this_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
