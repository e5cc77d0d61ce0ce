"""Builds the data of a run from the data section of its configuration: prepared documents, plans and loaders."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.distributed as dist

from xorl.config import Config
from xorl.config.data import DataConfig
from xorl.config.entries import DatasetEntryConfig
from xorl.core.mesh import Mesh
from xorl.data import DataError, DataPlan, DatasetEntry, PrepareOptions, StepLoader, pack, prepare, split_documents
from xorl.data.batch import PREFERENCE, WEIGHTS
from xorl.data.documents import PreparedDocuments
from xorl.data.formats import load_tokenizer
from xorl.data.formats.template import load_template
from xorl.data.images import ImageSettings
from xorl.data.invariants import special_ids
from xorl.data.packing import Bins
from xorl.data.pairs import ScoredPairs
from xorl.data.plan import rescale_accumulation
from xorl.data.push import push_documents
from xorl.data.receipt import Findings, Receipt
from xorl.data.stream import (
    Stream,
    StreamLoader,
    StreamOptions,
    StreamPlan,
    StreamTally,
    check_first_samples,
    open_stream,
)
from xorl.kernels.layout import row_multiple
from xorl.train.architecture import Architecture
from xorl.train.images import image_cost
from xorl.train.output_dir import write_json

logger = logging.getLogger(__name__)

# Leaving out a larger fraction of an epoch's bins is logged as a warning; the receipt always records it.
_MAX_LEFT_OUT = 0.05

Plan: TypeAlias = DataPlan | StreamPlan
Loader: TypeAlias = StepLoader | StreamLoader


@dataclass(frozen=True)
class PackedDocuments:
    """Documents and the bins they are packed into. scored: of pairs, the same with scores of the reference model."""

    documents: PreparedDocuments
    bins: Bins
    scored: ScoredPairs | None = None

    def receipt(self, plan: DataPlan | None = None) -> Receipt:
        """A record of every sample, the contents of the bins and, for training data, the steps of `plan`."""
        documents = self.documents
        packed = {
            "documents": len(documents),
            "tokens": int(documents.lengths.sum()),
            "trained_tokens": int(documents.num_trained.sum()),
        }
        plan_hash = None if plan is None else plan.hash
        receipt = documents.receipt.with_bins(
            num_bins=len(self.bins), fill=self.bins.fill, plan_hash=plan_hash, packed=packed
        )
        if plan is None:
            return receipt
        return receipt.with_steps(
            bins_per_step=plan.bins_per_step, steps_per_epoch=plan.steps_per_epoch, left_out_bins=plan.left_out_bins
        )


@dataclass(frozen=True)
class RunData:
    """The training data of a run, and its held-out data."""

    train: PackedDocuments | Stream
    held_out: PackedDocuments | None

    @property
    def has_images(self) -> bool:
        """Whether any document has an image. A stream has none."""
        parts = [part for part in (self.train, self.held_out) if isinstance(part, PackedDocuments)]
        return any(total.images > total.cut_images for part in parts for total in [part.documents.receipt.total])

    @property
    def end_tokens(self) -> dict[str, int]:
        """The special tokens that end the trained text, and how often; for a stream, in its first samples."""
        if isinstance(self.train, PackedDocuments):
            return self.train.documents.receipt.end_tokens
        return sum(self.train.findings, Findings()).end_tokens_by_number


@dataclass(frozen=True)
class DataIdentity:
    """Identifies the documents of every step, independent of where training stops.

    `order` is a hash of the content, packing, seed and bins per step; the numbers are for messages and for rescaling.
    """

    order: str
    num_bins: int
    bins_per_step: int

    @classmethod
    def of(cls, plan: Plan) -> DataIdentity:
        """The identity of a plan."""
        return cls(plan.hash, plan.num_bins, plan.bins_per_step)


@dataclass(frozen=True)
class _ModelLimits:
    """The properties of the model that the data must match; `strict` and `images` as in PrepareOptions."""

    vocab_size: int
    tokenizer_folder: Path | None
    special_ids: Mapping[str, tuple[int, ...]]
    strict: bool
    images: ImageSettings | None


def prepare_data(
    config: Config,
    vocab_size: int,
    tokenizer_folder: Path | None = None,
    hf_config: Mapping[str, object] = MappingProxyType({}),
    *,
    images: ImageSettings | None = None,
    strict: bool = True,
) -> RunData:
    """Prepare, split and pack the data. Call it before the process group exists: one rank may take hours.

    Text and conversations need `tokenizer_folder`, whose special tokens must agree with the model's `hf_config`.
    `images`: how those of conversations are read. Without `strict`, data that would stop a run is only logged, and
    nothing is uploaded.
    """
    data = config.data
    model = _ModelLimits(vocab_size, tokenizer_folder, special_ids(hf_config), strict, images)
    if data.streaming:
        tests = _prepare(config, "data.test_datasets", data.test_datasets, model) if data.test_datasets else None
        return RunData(_stream(config, model), None if tests is None else _pack(config, tests, held_out=True))
    documents = _prepare(config, "data.datasets", data.datasets, model)
    if strict and data.push_dataset_to_hub is not None:
        push_documents(
            documents,
            data.push_dataset_to_hub,
            Path(data.dataset_prepared_path),
            token=data.hf_use_auth_token,
            num_files=data.num_dataset_shards_to_save or 1,
        )
    held_out = None
    if data.val_set_size is not None:
        documents, held_out = split_documents(documents, data.val_set_size, config.train.seed)
        for part, name in ((documents, "left to train on"), (held_out, "held out")):
            if not part.num_trained.any():
                raise ValueError(
                    f"data.val_set_size: none of the {len(part)} documents {name} has a trained token; choose another "
                    "size, or remove the documents without trained tokens"
                )
    elif data.test_datasets:
        held_out = _prepare(config, "data.test_datasets", data.test_datasets, model)
        if data.skip_prepare_dataset and held_out.has_same_stores(documents):
            raise ValueError(
                f"data.skip_prepare_dataset: {data.dataset_prepared_path} holds a single dataset, which would be both "
                "data.datasets and data.test_datasets. Hold out a part of it with data.val_set_size"
            )
    train = _pack(config, documents)
    return RunData(train, None if held_out is None else _pack(config, held_out, held_out=True))


def with_chat_template(architecture: Architecture, data: DataConfig) -> Architecture:
    """The architecture with the chat template of the training data, if its entries name exactly one.

    With several templates no single one is right, so the tokenizer's template is kept.
    """
    named = {entry.chat_template for entry in data.datasets if entry.type == "chat" or entry.chat_template}
    if named <= {None} or architecture.tokenizer_folder is None or data.skip_prepare_dataset:
        return architecture
    if len(named) > 1:
        shown = ", ".join(sorted(name or "the tokenizer's own" for name in named))
        logger.warning("chat_template: the data uses several templates (%s); exports keep the tokenizer's", shown)
        return architecture
    tokenizer = load_tokenizer(architecture.tokenizer_folder)
    template = load_template("data.datasets[0].chat_template", named.pop(), tokenizer, with_tools=False)
    return replace(architecture, chat_template=template.source)


def plan_steps(config: Config, data: PackedDocuments | Stream, dp_size: int, resumed_bins_per_step: int | None) -> Plan:
    """The order of the bins over the whole run.

    A resumed run keeps the bins per step of its checkpoint: if the ranks or the options give another number,
    `gradient_accumulation_steps` is adjusted.
    """
    train = config.train
    bins_per_step = train.micro_batch_size * train.gradient_accumulation_steps * dp_size
    if resumed_bins_per_step is not None and resumed_bins_per_step != bins_per_step:
        try:
            accumulation = rescale_accumulation(
                resumed_bins_per_step, micro_batch_size=train.micro_batch_size, dp_size=dp_size
            )
        except DataError as error:
            raise DataError(f"train.load_checkpoint_path: in its run, {error}") from error
        logger.warning(
            "train.gradient_accumulation_steps is %d instead of %d: a resumed run keeps the %d bins per step of its "
            "checkpoint for any number of ranks and any train.micro_batch_size",
            accumulation,
            train.gradient_accumulation_steps,
            resumed_bins_per_step,
        )
        bins_per_step = resumed_bins_per_step
    if isinstance(data, Stream):
        assert train.max_steps is not None, "checked by the configuration"
        return StreamPlan.over(data, bins_per_step=bins_per_step, max_steps=train.max_steps)
    plan = DataPlan.over(
        data.documents,
        data.bins,
        bins_per_step=bins_per_step,
        seed=train.seed,
        num_epochs=train.num_train_epochs,
        max_steps=train.max_steps,
        drop_last=config.data.dataloader_drop_last,
        shuffle=config.data.shuffle_merged_datasets,
    )
    _warn_of_left_out_bins(plan)
    return plan


def _warn_of_left_out_bins(plan: DataPlan) -> None:
    # A run that ends within its first epoch never reaches the incomplete step.
    is_cut_short = plan.max_steps is not None and plan.max_steps <= plan.steps_per_epoch
    if is_cut_short or plan.left_out_bins <= _MAX_LEFT_OUT * plan.num_bins:
        return
    logger.warning(
        "data.dataloader_drop_last: true leaves %d of the %d bins out of each epoch%s, since they do not fill a step "
        "of %d; false trains them in a smaller last step, and smaller steps (train.micro_batch_size, "
        "train.gradient_accumulation_steps) leave out fewer",
        plan.left_out_bins,
        plan.num_bins,
        "" if plan.shuffle else " (the same ones, as they are not shuffled)",
        plan.bins_per_step,
    )


def write_receipt(path: Path, data: RunData, plan: Plan, streamed: Receipt | None = None) -> None:
    """Log the data receipt, which records what happened to every sample, and write it to `path`.

    It is written before the first step. The receipt of a stream, `streamed`, is rewritten with each checkpoint and at
    the end, because samples are counted as they are read.
    """
    stored: dict[str, object] = {}
    train_plan = plan if isinstance(plan, DataPlan) else None
    parts = {"train": (data.train, train_plan), "held_out": (data.held_out, None)}
    for name, (part, own_plan) in parts.items():
        if isinstance(part, PackedDocuments):
            receipt = part.receipt(own_plan)
        elif part is not None:
            assert streamed is not None, "the receipt of a stream must be passed"
            receipt = streamed
        else:
            continue
        stored[name] = receipt.as_dict()
        for line in receipt.lines():
            logger.debug("receipt %s %s", name, line)
    write_json(path, stored)


def padding_multiple(config: Config) -> int:
    """Rows are padded to a multiple of this: of the option, of the ranks that share a row, and of the longest row.

    Of the latter only without `pp_variable_seq_lengths`.
    """
    train, data = config.train, config.data
    of_ranks = row_multiple(train.ringattn_parallel_size, train.ulysses_parallel_size * train.tensor_parallel_size)
    whole = 1 if train.pp_variable_seq_lengths else train.micro_batch_size * data.sample_packing_sequence_len
    return math.lcm(data.pad_to_multiple_of, of_ranks, whole)


def build_loader(
    config: Config, data: PackedDocuments, plan: DataPlan, mesh: Mesh, architecture: Architecture
) -> StepLoader:
    """The loader of this data-parallel rank's micro-batches."""
    options = config.data
    return StepLoader(
        data.documents if data.scored is None else data.scored,
        data.bins,
        plan,
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=mesh.data.rank,
        dp_size=mesh.data.size,
        pad_to_multiple_of=padding_multiple(config),
        num_workers=options.dataloader_num_workers,
        prefetch_factor=options.dataloader_prefetch_factor,
        pin_memory=options.dataloader_pin_memory,
        # The relative cost of attention.
        pair_cost=1 / (12 * architecture.config.hidden_size),
        images=architecture.images,
        image_cost=image_cost(architecture.config, config.train, config.lora),
    )


def build_stream_loader(
    config: Config, stream: Stream, plan: StreamPlan, mesh: Mesh, positions: Sequence[Sequence[int]] | None
) -> StreamLoader:
    """The loader of this data-parallel rank's micro-batches; `positions` are from the checkpoint to resume from."""
    options = config.data
    return StreamLoader(
        stream,
        plan,
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=mesh.data.rank,
        dp_size=mesh.data.size,
        pad_to_multiple_of=padding_multiple(config),
        num_workers=options.dataloader_num_workers,
        prefetch_factor=options.dataloader_prefetch_factor,
        pin_memory=options.dataloader_pin_memory,
        positions=positions,
    )


class StreamState:
    """The positions of a run in its stream and the counts of the samples read, over all ranks.

    `before` are the counts in the checkpoint that the run resumes from; `write` writes the receipt.
    """

    def __init__(
        self,
        stream: Stream,
        loader: StreamLoader,
        mesh: Mesh,
        device: torch.device,
        *,
        before: Sequence[int] | None,
        write: Callable[[Receipt], None],
    ) -> None:
        self._loader = loader
        self._group = mesh.data.group
        self._device = device
        self._before = StreamTally(stream, before)
        self._tally = StreamTally(stream, before)
        self._plan_hash = loader.plan.hash
        self._write = write

    def state(self) -> dict[str, list[list[int]] | list[int]]:
        """The position of each lane and the counts since the first step, for a checkpoint. Collective.

        Positions only grow, and each data-parallel rank knows those of its own lanes, so the maximum over ranks is
        current. Each bin goes to one rank, which counts it, so the sum over ranks counts nothing twice, even if ranks
        share a lane.
        """
        positions = torch.from_numpy(self._loader.positions()).to(self._device)
        dist.all_reduce(positions, op=dist.ReduceOp.MAX, group=self._group)
        counted = torch.tensor(self._loader.tally.values, device=self._device)
        dist.all_reduce(counted, group=self._group)
        self._tally.values[:] = self._before.values + counted.cpu().numpy()
        return {"stream_positions": positions.tolist(), "stream_tally": self._tally.values.tolist()}

    def write_receipt(self) -> None:
        """Write the receipt of all samples counted up to the last call of `state`."""
        self._write(self._tally.receipt(self._plan_hash))


def _stream(config: Config, model: _ModelLimits) -> Stream:
    data = config.data
    options = StreamOptions(
        bin_len=data.sample_packing_sequence_len,
        vocab_size=model.vocab_size,
        tokenizer_folder=model.tokenizer_folder,
        model_special_ids=model.special_ids,
        seed=config.train.seed,
        shuffle=data.shuffle_merged_datasets,
    )
    stream = open_stream(
        [_entry(entry, data) for entry in data.datasets],
        options,
        index_path=Path(data.dataset_prepared_path) / "streams",
        option="data.datasets",
        token=data.hf_use_auth_token,
    )
    _check_rows(stream.extra_names, config.train.loss, "data.datasets")
    stream = check_first_samples(stream, strict=model.strict)
    for entry in stream.entries:
        num_bytes, blocks = entry.num_bytes, entry.num_blocks
        logger.debug(
            "stream dataset=%s files=%d mib=%d blocks=%d", entry.name, len(entry.files), num_bytes >> 20, blocks
        )
    return stream


def _prepare(
    config: Config, option: str, entries: Sequence[DatasetEntryConfig], model: _ModelLimits
) -> PreparedDocuments:
    data = config.data
    assert data.dataset_num_proc is not None, "resolved by the configuration"
    # Test data is never sharded, so that runs on different shards can be compared.
    shard = (data.dataset_shard_num, data.dataset_shard_idx) if option == "data.datasets" else (None, None)
    options = PrepareOptions(
        bin_len=data.sample_packing_sequence_len,
        vocab_size=model.vocab_size,
        tokenizer_folder=model.tokenizer_folder,
        model_special_ids=model.special_ids,
        prepared_path=Path(data.dataset_prepared_path),
        skip_prepare=data.skip_prepare_dataset,
        num_proc=data.dataset_num_proc,
        num_files=data.num_dataset_shards_to_save or 1,
        seed=config.train.seed,
        shuffle_before_merging=data.shuffle_before_merging_datasets,
        shuffle_merged=data.shuffle_merged_datasets,
        dataset_shard_num=shard[0],
        dataset_shard_idx=shard[1],
        token=data.hf_use_auth_token,
        strict=model.strict,
        images=model.images,
    )
    documents = prepare([_entry(entry, data) for entry in entries], options, option=option)
    _check_rows(documents.extra_names, config.train.loss, option)
    if unused := [name for name in documents.extra_names if name not in (PREFERENCE, WEIGHTS)]:
        names = ", ".join(unused)
        logger.info("%s: training does not use the per-token columns %s (data.select_columns)", option, names)
    return documents


def _check_rows(extra_names: Sequence[str], loss: str, option: str) -> None:
    """Raise ValueError unless the rows are pairs exactly if the loss compares some."""
    if (PREFERENCE in extra_names) == (loss != "cross_entropy"):
        return
    if loss == "cross_entropy":
        raise ValueError(
            f"{option}: the rows are pairs of a chosen and a rejected answer, which need a loss of pairs: set "
            "train.loss to dpo, orpo, kto or simpo, or the type of the entries to the one to train on alone"
        )
    raise ValueError(
        f"{option}: the rows are single documents, and train.loss: {loss} compares pairs of answers; set the type of "
        "the entries to preference (columns prompt, chosen and rejected), or the loss to cross_entropy"
    )


def _entry(entry: DatasetEntryConfig, data: DataConfig) -> DatasetEntry:
    columns = None if data.select_columns is None else tuple(data.select_columns)
    return DatasetEntry(
        path=entry.path,
        type=entry.type,
        name=entry.name,
        split=entry.split,
        revision=entry.revision,
        data_files=entry.data_files,
        ds_type=entry.ds_type,
        max_seq_len=entry.max_seq_len,
        overflow=entry.overflow,
        shards=entry.shards,
        shards_idx=entry.shards_idx,
        preprocess_shards=entry.preprocess_shards,
        columns=columns if entry.type in ("tokenized", "auto") else None,
        chat_template=entry.chat_template,
        chat_template_kwargs=entry.chat_template_kwargs,
        train_on=entry.train_on,
        column_names=entry.columns,
        overflow_limit=entry.overflow_limit,
        skip_bad_rows=entry.skip_bad_rows,
        ignore_columns=tuple(entry.ignore_columns or ()),
        weight=entry.weight,
        num_epochs=entry.num_epochs,
    )


def _pack(config: Config, documents: PreparedDocuments, *, held_out: bool = False) -> PackedDocuments:
    data = config.data
    assert data.dataset_num_proc is not None, "resolved by the configuration"
    bins = pack(
        documents.lengths,
        bin_len=data.sample_packing_sequence_len,
        method="none" if held_out and data.eval_sample_packing is False else data.sample_packing_method,
        group_size=data.sample_packing_group_size,
        strict_order=bool(data.sample_packing_sequentially),
        seed=config.train.seed,
        start_method=data.sample_packing_mp_start_method,
        num_proc=data.dataset_num_proc,
    )
    logger.debug("packed=%d bins=%d fill=%.4f", len(documents.lengths), len(bins), bins.fill)
    return PackedDocuments(documents, bins)
