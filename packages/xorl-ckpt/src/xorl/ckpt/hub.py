"""Resolves a model's folder from a local path or the id of a repository on the Hugging Face Hub."""

import logging
from collections.abc import Sequence
from pathlib import Path

from xorl.ckpt.errors import CheckpointError, CheckpointFailure
from xorl.ckpt.export import TOKENIZER_FILES

logger = logging.getLogger(__name__)

CONFIG_PATTERNS = ("config.json", "generation_config.json")
TOKENIZER_PATTERNS = TOKENIZER_FILES
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
MODEL_PATTERNS = (*CONFIG_PATTERNS, *TOKENIZER_PATTERNS, *WEIGHT_PATTERNS)


def resolve_folder(id_or_path: str | Path, *, patterns: Sequence[str] = MODEL_PATTERNS) -> Path:
    """The local folder if it exists, else the Hub's cache folder with the repository's files that match `patterns`.

    Not collective: on each node, call it on one rank first and then on the others. Raises CheckpointError for a path
    or an id that does not exist, CheckpointFailure if the Hub cannot be reached.
    """
    text = str(id_or_path)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return folder.absolute()
    if folder.is_file():
        raise CheckpointError(f"{text} is a file; pass the folder of a model")
    if isinstance(id_or_path, Path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text:
        raise CheckpointError(f"there is no folder {text!r}")
    # Takes half a second, and local folders do not need it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        # Only the top level of the repository: folders below it hold other formats of the same weights.
        found = snapshot_download(text, allow_patterns=list(patterns), ignore_patterns=["*/*"])
    except HFValidationError as error:
        raise CheckpointError(f"{text!r} is neither a folder nor the id of a repository: {error}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if isinstance(error, HfHubHTTPError):
            raise CheckpointError(f"cannot download {text!r} from the Hub: {error}") from error
        raise CheckpointFailure(
            f"{text!r} is neither a local folder nor in the Hub's cache, and the Hub cannot be reached. "
            "Pass the path of a downloaded folder, or run once with network access."
        ) from error
    return Path(found)
