"""Uploads prepared documents to the Hub, as Parquet files in the tokenized format."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from xorl.data.arguments import check_at_least
from xorl.data.documents import PreparedDocuments
from xorl.data.errors import DataError, DataFailure
from xorl.data.hashing import digest
from xorl.data.lock import exclusive
from xorl.data.sources import shard_range
from xorl.data.store import make_prepared_folder

logger = logging.getLogger(__name__)

_OPTION = "repo_id"
# Documents per Parquet row group.
_GROUP = 1000


def push_documents(
    documents: PreparedDocuments,
    repo_id: str,
    prepared_path: Path | str,
    *,
    token: str | bool | None,
    num_files: int = 1,
) -> None:
    """Uploads `documents` in order to the dataset repository `repo_id`, which is created as private if it is missing.

    Each content is uploaded once per repository: one process uploads, and records it in a file below `prepared_path`.
    Raises DataError if `num_files` is below 1, if `prepared_path` cannot be a folder, if documents have images, which
    are not uploaded, or if the Hub rejects the upload; DataFailure if the network or the disk fails.
    """
    check_at_least(1, num_files=num_files)
    if documents.image_patches() is not None:
        raise DataError(f"{_OPTION}: documents with images cannot be uploaded, only their tokens could; leave it out")
    prepared_path = Path(prepared_path)
    key = digest("pushed", documents.fingerprint, repo_id, num_files)
    done = prepared_path / "pushed" / f"{key}.json"
    make_prepared_folder(done.parent)
    with exclusive(prepared_path / f".push-{key}.lock", f"push repo={repo_id}"):
        if done.is_file():
            return
        folder = prepared_path / f".push-{key}.tmp-{secrets.token_hex(4)}"
        try:
            _write(documents, folder / "data", num_files)
            logger.info("push repo=%s documents=%d files=%d", repo_id, len(documents), num_files)
            api = HfApi(token=token)
            api.create_repo(repo_id, repo_type="dataset", private=True, exist_ok=True)
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                repo_type="dataset",
                commit_message=f"Prepared by xorl, {documents.fingerprint[:12]}",
            )
            done.write_text(json.dumps({"repo": repo_id, "fingerprint": documents.fingerprint}) + "\n")
        except (LocalTokenNotFoundError, HFValidationError) as error:
            raise DataError(f"{_OPTION}: {repo_id}: {error}") from error
        except HfHubHTTPError as error:
            raise DataError(f"{_OPTION}: the Hub rejects the upload to {repo_id}: {error}") from error
        except OSError as error:
            raise DataFailure(f"{_OPTION}: the upload to {repo_id} failed: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write(documents: PreparedDocuments, folder: Path, num_files: int) -> None:
    folder.mkdir(parents=True)
    for index in range(num_files):
        start, stop = shard_range(len(documents), num_files, index)
        path = folder / f"train-{index:05}-of-{num_files:05}.parquet"
        schema = pa.schema(
            [(name, pa.list_(pa.int32())) for name in ("input_ids", "labels")]
            + [(name, pa.list_(pa.float32())) for name in documents.extra_names]
        )
        with pa_parquet.ParquetWriter(path, schema) as writer:
            for table in _tables(documents, range(start, stop), schema):
                writer.write_table(table)


def _tables(documents: PreparedDocuments, indices: range, schema: pa.Schema) -> Iterator[pa.Table]:
    for first in range(indices.start, indices.stop, _GROUP):
        group = range(first, min(first + _GROUP, indices.stop))
        offsets = np.concatenate([[0], np.cumsum(documents.lengths[group.start : group.stop])]).astype(np.int32)
        pairs = [documents.document(index) for index in group]
        columns = [np.concatenate([pair[part] for pair in pairs]) for part in range(2)]
        for name in documents.extra_names:
            columns.append(np.concatenate([documents.extras(index)[name] for index in group]))
        arrays = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(column)) for column in columns]
        yield pa.Table.from_arrays(arrays, schema=schema)
