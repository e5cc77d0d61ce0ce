"""Prepares documents from dataset entries, with a content-addressed cache whose folders are published atomically.

It runs before any process group exists, so it does not use torch.distributed: one process prepares, others on the same
file system wait for its lock, and all of them memory-map the result.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from xorl.data.arguments import check_at_least, check_fields, checked, convert_fields_
from xorl.data.choose import choose_format, limits_of
from xorl.data.chunks import Chunk
from xorl.data.documents import PreparedDocuments, merge
from xorl.data.entry import DUMMY, DatasetEntry, check_entry
from xorl.data.errors import DataError, DataFailure
from xorl.data.formats import EncodedDocuments, Format, TokenizedFormat
from xorl.data.hashing import JSON, digest, hash_files
from xorl.data.images.settings import ImageSettings
from xorl.data.invariants import (
    Limits,
    check_counts,
    check_extras,
    check_largest_id,
    check_special_ids,
    check_tokenizer,
    log_findings,
    validate_counts,
)
from xorl.data.lock import exclusive, remove_if_dead
from xorl.data.mixture import Share, check_repetitions, check_shares
from xorl.data.orphans import exit_with_parent
from xorl.data.receipt import Counts, DatasetReceipt, Findings, Receipt
from xorl.data.saved import SavedStore, is_saved_folder, saved_files
from xorl.data.sources import DOWNLOADS, ShardedSource, Source, count_rows, load_source
from xorl.data.store import (
    FORMAT_VERSION,
    KEY_VERSION,
    MANIFEST,
    DocumentStore,
    FlatStore,
    FlatStoreWriter,
    PartedStore,
    SyntheticStore,
    find_prepared,
    fsync,
    make_prepared_folder,
)

logger = logging.getLogger(__name__)

# Below these sizes, starting processes takes longer than encoding, at 80 MB/s for ids and a few MB/s for text.
_PARALLEL_BYTES = 64 << 20
_PARALLEL_TEXT_BYTES = 4 << 20
_LARGE_BYTES = 1 << 30
_REPORT_EVERY_S = 10.0


@dataclass(frozen=True)
class PrepareOptions:
    """How documents are prepared. `bin_len` limits their lengths.

    With `vocab_size` None, ids are not checked; `dummy` requires it. Text and conversations require `tokenizer_folder`;
    its special tokens must agree with `model_special_ids`, the result of invariants.special_ids. `token` is passed to
    `datasets` for the Hub. Without `strict`, counts that would stop a run are only logged, so that the data can be
    inspected. `images`: how conversations' images are read; None refuses them. Both paths may be given as str.
    """

    bin_len: int
    vocab_size: int | None = None
    tokenizer_folder: Path | None = None
    model_special_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prepared_path: Path = Path("last_prepared_dataset")
    skip_prepare: bool = False
    num_proc: int = 1
    num_files: int = 1
    seed: int = 0
    shuffle_before_merging: bool = True
    shuffle_merged: bool = True
    dataset_shard_num: int | None = None
    dataset_shard_idx: int | None = None
    dummy_documents: int = 4096
    token: str | bool | None = None
    strict: bool = True
    images: ImageSettings | None = None

    def __post_init__(self) -> None:
        convert_fields_(self)
        check_fields(self)
        check_special_ids(self.model_special_ids)
        check_at_least(
            1,
            bin_len=self.bin_len,
            vocab_size=self.vocab_size,
            num_proc=self.num_proc,
            num_files=self.num_files,
            dummy_documents=self.dummy_documents,
        )


@checked
def prepare(entries: Sequence[DatasetEntry], options: PrepareOptions, *, option: str = "entries") -> PreparedDocuments:
    """Returns the documents of `entries`, merged in the order given by `options`; a second call loads the cache.

    `option` is what error messages call the entries. Raises DataError for unusable data or
    options, DataFailure if the environment fails.
    """
    _check_options(entries, options, option)
    direct = _open_prepared_path(entries[0], options) if options.skip_prepare else None
    shares = [Share(entry.weight, entry.num_epochs) for entry in entries]
    if direct is not None:
        prepared, shares = [direct], [Share()]
    else:
        prepared = [_prepare_entry(entry, options, f"{option}[{i}]") for i, entry in enumerate(entries)]
        check_repetitions([len(store.lengths) for store, _ in prepared], shares, option)
        check_extras([(f"{option}[{i}]", store.extra_names) for i, (store, _) in enumerate(prepared)])
    return merge(
        [store for store, _ in prepared],
        Receipt(tuple(receipt for _, receipt in prepared)),
        shares=shares,
        seed=options.seed,
        shuffle_before_merging=options.shuffle_before_merging,
        shuffle_merged=options.shuffle_merged,
        num_shards=options.dataset_shard_num,
        shard_index=options.dataset_shard_idx,
    )


def _check_options(entries: Sequence[DatasetEntry], options: PrepareOptions, option: str) -> None:
    if not entries:
        raise DataError(f"{option} is empty; name at least one dataset")
    num, index = options.dataset_shard_num, options.dataset_shard_idx
    if (num is None) != (index is None):
        raise DataError(f"set both dataset_shard_num and dataset_shard_idx, got {num} and {index}")
    if num is not None and index is not None and not 0 <= index < num:
        raise DataError(f"dataset_shard_idx: {index} is not in 0..{num - 1} (dataset_shard_num={num})")
    for number, entry in enumerate(entries):
        check_entry(entry, f"{option}[{number}]", options.bin_len)
    check_shares([Share(entry.weight, entry.num_epochs) for entry in entries], option)


def _prepare_entry(entry: DatasetEntry, options: PrepareOptions, option: str) -> tuple[DocumentStore, DatasetReceipt]:
    if entry.path == DUMMY:
        return _dummy(entry, options, option)
    started = time.monotonic()
    downloads = options.prepared_path / DOWNLOADS
    source = None
    if not options.skip_prepare:
        source = load_source(entry, option=option, token=options.token, downloads=downloads)
    fmt = choose_format(
        entry,
        bin_len=options.bin_len,
        vocab_size=options.vocab_size,
        option=option,
        source=source,
        tokenizer_folder=options.tokenizer_folder,
        images=options.images,
    )
    check_tokenizer(fmt, options.model_special_ids, entry.path)
    if fmt.uses_current_date:
        logger.warning(
            "prepare dataset=%s: the chat template writes the current date; set %s.chat_template_kwargs: "
            "{strftime_now: 2026-01-31} to fix the date",
            entry.path,
            option,
        )
    parts, num_parts = [entry], entry.preprocess_shards
    if num_parts is not None:
        # Each part is prepared, published and cached separately.
        parts = [replace(entry, preprocess_shards=None, shards=num_parts, shards_idx=i) for i in range(num_parts)]
    if source is None:
        folders = [find_prepared(options.prepared_path, _request(part, fmt), option) for part in parts]
        return _open_stores(
            [FlatStore(folder) for folder in folders], entry, fmt, option, cached=True, strict=options.strict
        )
    if source.num_bytes > _LARGE_BYTES:
        logger.info("prepare dataset=%s phase=hash gib=%.1f", source.name, source.num_bytes / 2**30)
    stores, cached = _prepare_parts(source, parts, fmt, options, option)
    store, receipt = _open_stores(stores, entry, fmt, option, cached=cached, strict=options.strict)
    took = time.monotonic() - started
    line = "prepare dataset=%s cached=%s time_s=%.1f folder=%s"
    logger.debug(line, source.name, str(cached).lower(), took, ",".join(str(part.folder) for part in stores))
    return store, receipt


def _prepare_parts(
    source: Source, parts: Sequence[DatasetEntry], fmt: Format, options: PrepareOptions, option: str
) -> tuple[list[FlatStore], bool]:
    """Returns the published stores of all parts, and whether all of them were already cached."""
    identity = source.identity()
    dataset_key = digest(KEY_VERSION, identity, fmt.fingerprint())
    num_rows: int | None = None
    stores: list[FlatStore] = []
    all_cached = True
    for index, part in enumerate(parts):
        part_source, key = source, dataset_key
        if len(parts) > 1:
            part_source = ShardedSource(source, len(parts), index, num_rows)
            shard = {"source": identity, "shards": len(parts), "shards_idx": index}
            key = digest(KEY_VERSION, shard, fmt.fingerprint())
        # These are part of the folder's name but not of the key, which determines the order of documents.
        layout = [options.num_files] if options.num_files > 1 else []
        folder = options.prepared_path / digest(key, FORMAT_VERSION, *layout)
        lock = options.prepared_path / f".{folder.name}.lock"
        if (folder / MANIFEST).is_file():
            remove_if_dead(lock)
        else:
            make_prepared_folder(options.prepared_path)
            if not os.access(options.prepared_path, os.W_OK):
                raise DataError(f"prepared_path: {options.prepared_path} is not writable")
            with exclusive(lock, f"prepare dataset={part_source.name}"):
                if not (folder / MANIFEST).is_file():
                    all_cached = False
                    if isinstance(part_source, ShardedSource) and len(parts) > 1 and num_rows is None:
                        num_rows = count_rows(source, fmt.selected)
                        part_source = replace(part_source, num_rows=num_rows)
                    _publish(part_source, fmt, folder, key, dataset_key, part, option, options)
        stores.append(FlatStore(folder))
    return stores, all_cached


def _open_prepared_path(entry: DatasetEntry, options: PrepareOptions) -> tuple[DocumentStore, DatasetReceipt] | None:
    """Opens `prepared_path` if it is itself a dataset: a published folder or one of datasets.save_to_disk.

    The dataset then replaces all entries. Returns None for a folder that contains published folders. Raises DataError
    if it does not exist, or has a document that does not fit into a bin.
    """
    path, option, limit_option = options.prepared_path, "prepared_path", "bin_len"
    if not path.is_dir():
        raise DataError(f"{option}: {path} is not a folder, but skip_prepare=True loads the prepared data from it")
    fmt = TokenizedFormat(options.bin_len, "error", limit_option, entry.columns, options.vocab_size)
    if is_saved_folder(path):
        files = saved_files(path, entry.split, option=option)
        store = summary = SavedStore(files, fmt, digest("saved", hash_files(files), list(fmt.wanted)))
    elif (path / MANIFEST).is_file():
        store = FlatStore(path)
        summary = store.manifest
        if summary.longest > fmt.limit:
            raise DataError(
                f"{option}: {path} has a document of {summary.longest} tokens, more than {limit_option} = {fmt.limit}; "
                f"raise {limit_option}, or set skip_prepare=False"
            )
    else:
        return None
    logger.debug("prepare dataset=%s phase=skip", path)
    limits = Limits(explicit_limit=True, overflow_fraction=1.0)
    validate_counts(summary.counts, str(path), fmt, option, limits, strict=options.strict)
    check_largest_id((summary.largest_id, summary.largest_id_row), str(path), fmt)
    log_findings(summary.findings, summary.counts, str(path), None)
    return store, DatasetReceipt(str(path), summary.counts, cached=True, findings=summary.findings)


def _request(entry: DatasetEntry, fmt: Format) -> dict[str, JSON]:
    files = (
        entry.data_files if entry.data_files is None or isinstance(entry.data_files, str) else list(entry.data_files)
    )
    fields = ("path", "type", "name", "split", "revision", "ds_type", "shards", "shards_idx")
    return {**{field: getattr(entry, field) for field in fields}, "data_files": files, **fmt.fingerprint()}


def _dummy(entry: DatasetEntry, options: PrepareOptions, option: str) -> tuple[DocumentStore, DatasetReceipt]:
    if options.vocab_size is None:
        raise DataError(f"{option}.path: dummy generates random token ids, so it needs the model's vocab_size")
    length = entry.max_seq_len or options.bin_len
    # The seed includes the entry's path in the configuration, so that two dummy entries differ.
    store = SyntheticStore(options.dummy_documents, length, options.vocab_size, f"{options.seed} {option}")
    num, tokens, trained = len(store.lengths), int(store.lengths.sum()), int(store.num_trained.sum())
    counts = Counts(samples=num, kept=num, documents=num, tokens=tokens, trained_tokens=trained)
    return store, DatasetReceipt(DUMMY, counts)


def _open_stores(
    stores: Sequence[FlatStore], entry: DatasetEntry, fmt: Format, option: str, *, cached: bool, strict: bool
) -> tuple[DocumentStore, DatasetReceipt]:
    counts, findings, row = Counts(), Findings(), 0
    for store in stores:
        manifest = store.manifest
        check_largest_id((manifest.largest_id, row + manifest.largest_id_row), entry.path, fmt)
        row += manifest.counts.samples
        counts += manifest.counts
        findings += manifest.findings
    log_findings(findings, counts, _part_name(entry), entry.skip_bad_rows)
    validate_counts(counts, _part_name(entry), fmt, option, limits_of(entry), strict=strict)
    receipt = DatasetReceipt(entry.path, counts, cached, findings=findings)
    return stores[0] if len(stores) == 1 else PartedStore(stores), receipt


def _part_name(entry: DatasetEntry) -> str:
    if entry.shards is None:
        return entry.path
    return f"{entry.path} (shard {entry.shards_idx} of {entry.shards})"


def _publish(
    source: Source,
    fmt: Format,
    folder: Path,
    key: str,
    dataset_key: str,
    entry: DatasetEntry,
    option: str,
    options: PrepareOptions,
) -> None:
    """Encodes `source` into a temporary folder and renames that to `folder`. The caller holds the lock.

    `key` and `dataset_key` are equal if the store is the whole dataset.
    """
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        logger.debug("prepare dataset=%s phase=clean leftover=%s", source.name, leftover)
        shutil.rmtree(leftover)
    temporary = folder.parent / f".{folder.name}.tmp-{secrets.token_hex(4)}"
    writer: FlatStoreWriter | None = None
    try:
        writer = FlatStoreWriter(temporary, fmt.extras)
        counts, largest, findings = _write_all(source, fmt, writer, options.num_proc)
        # A part must not be empty; all other counts are checked later, summed over all parts.
        if not counts.documents or (options.strict and key == dataset_key):
            check_counts(counts, _part_name(entry), fmt, option, limits_of(entry))
        writer.finish(
            key=key,
            name=source.name,
            request=_request(entry, fmt),
            created=time.time(),
            counts=counts,
            largest_id=largest,
            whole=dataset_key,
            num_files=options.num_files,
            findings=findings,
        )
        temporary.rename(folder)
        fsync(folder.parent)
    except OSError as error:
        # Another process took over and published the same content.
        if (folder / MANIFEST).is_file():
            return
        raise DataFailure(
            f"the prepared dataset cannot be written to {temporary}: {error}; prepared_path sets the parent folder"
        ) from error
    finally:
        if writer is not None:
            writer.discard()
        shutil.rmtree(temporary, ignore_errors=True)


def _write_all(
    source: Source, fmt: Format, writer: FlatStoreWriter, num_proc: int
) -> tuple[Counts, tuple[int, int], Findings]:
    counts, largest, findings = Counts(), (-1, -1), Findings()
    labelled: tuple[bool, str] | None = None
    num_bytes, total_bytes = 0, source.num_bytes
    started = reported = time.monotonic()
    # Closed explicitly if an error leaves the loop: the traceback would keep the pool's processes alive.
    with closing(_encode_all(source, fmt, num_proc)) as encoded:
        for chunk, documents in encoded:
            before, counts = counts, counts + documents.counts
            findings += documents.findings
            if documents.counts.samples == documents.counts.skipped:
                continue
            if labelled is None:
                labelled = documents.has_labels, chunk.location(0)
            elif labelled[0] != documents.has_labels:
                unlabelled, with_labels = sorted([labelled, (documents.has_labels, chunk.location(0))])
                raise DataError(
                    f"the rows from {with_labels[1]} on have labels, the rows from {unlabelled[1]} on have none; give "
                    "every row labels (-100 where a token is not trained), or ignore the column with "
                    'columns=["input_ids"]'
                )
            if documents.largest_id > largest[0]:
                largest = documents.largest_id, before.samples + documents.largest_id_row
            writer.append(documents)
            num_bytes += chunk.num_bytes
            now = time.monotonic()
            if now - reported > _REPORT_EVERY_S:
                reported, rate = now, num_bytes / (now - started)
                left = max(0.0, total_bytes - num_bytes) / rate
                line = "prepare dataset=%s phase=encode samples=%d mib=%d of=%d mib_per_s=%.1f left_s=%.0f"
                logger.info(line, source.name, counts.samples, num_bytes >> 20, total_bytes >> 20, rate / 2**20, left)
    return counts, largest, findings


def _encode_all(source: Source, fmt: Format, num_proc: int) -> Generator[tuple[Chunk, EncodedDocuments], None, None]:
    """Encodes all chunks in order, in `num_proc` processes if the source is large enough."""
    chunks = source.chunks(fmt.selected)
    is_text = fmt.tokenizer is not None
    worthwhile = source.num_bytes >= (_PARALLEL_TEXT_BYTES if is_text else _PARALLEL_BYTES)
    if num_proc <= 1 or not worthwhile or not (source.parallel or is_text):
        for chunk in chunks:
            yield chunk, fmt.encode(chunk)
        return
    # Forking is cheap here: no CUDA context and no process group exists yet. macOS cannot fork safely.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pending: deque[tuple[Chunk, Future[EncodedDocuments]]] = deque()
    with ProcessPoolExecutor(num_proc, mp_context=context, initializer=_become_worker) as pool:
        try:
            for chunk in chunks:
                pending.append((chunk, pool.submit(fmt.encode, chunk)))
                # Limits the chunks in memory when writing is slower than encoding.
                if len(pending) > 2 * num_proc:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataFailure(
                f"a worker process died during preparation, probably out of memory; lower num_proc "
                f"({num_proc}) and start again"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _become_worker() -> None:
    """Initializes a worker: ignores interrupts, which the parent handles, and exits when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The garbage collector would write to every page shared with the parent, and so copy it.
    gc.freeze()
    exit_with_parent()
