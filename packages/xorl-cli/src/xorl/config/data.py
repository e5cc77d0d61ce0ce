"""The options of the data section of local training."""

from typing import Annotated, Literal

from pydantic import Field

from xorl.config.entries import DatasetEntryConfig
from xorl.config.fields import AtLeastOne, AtLeastZero, Section

PackingMethod = Literal["sequential", "multipack"]
StartMethod = Literal["fork", "spawn", "forkserver"]


class DataConfig(Section):
    """Data"""

    datasets: list[DatasetEntryConfig] = Field(
        min_length=1, description="Training data: one entry per dataset, merged in order."
    )
    test_datasets: list[DatasetEntryConfig] = Field(
        default=[],
        description="Evaluation data, with the same fields as datasets. Cannot be combined with val_set_size.",
    )
    streaming: bool = Field(
        default=False,
        description="Read, tokenize and pack the datasets during training instead of preparing them first, for data "
        "larger than the disk. The length of the data is then unknown, so train.max_steps is required. Blocks of "
        "about 1 MiB are shuffled by train.seed, and so are the rows within each block. weight is then a share of "
        "bytes. test_datasets are still prepared.",
    )
    dataset_prepared_path: str = Field(
        default="last_prepared_dataset",
        description="Folder for prepared datasets. Each is stored under a hash of everything it was made from.",
    )
    image_min_pixels: AtLeastOne | None = Field(
        default=None,
        description="Smallest size of an image, in pixels: smaller ones are enlarged. null means that of the model's "
        "image processor, which is exported with its own limits.",
    )
    image_max_pixels: AtLeastOne | None = Field(
        default=None,
        description="Largest size of an image, in pixels: larger ones are reduced. Smaller images have fewer tokens. "
        "null means that of the model's image processor, which is exported with its own limits.",
    )
    image_root: str | None = Field(
        default=None,
        description="Folder of the image files that rows name; paths are relative to it and must not lead out of it. "
        "null means the folder of the dataset.",
    )
    select_columns: list[str] | None = Field(
        default=None,
        description="Columns to read from each tokenized dataset, such as [input_ids, labels]. null means those of "
        "input_ids, labels and attention_mask that are present. A column weights, with a number for each token, "
        "multiplies the loss of its label; a token with the weight 0 does not count.",
    )
    sample_packing_method: PackingMethod = Field(
        default="sequential",
        description="How documents are packed into bins: sequential keeps roughly the order of the data; multipack "
        "fills bins best (best-fit decreasing within a group; the bins are shuffled afterwards).",
    )
    sample_packing_sequence_len: AtLeastOne = Field(default=32000, description="Size of a bin, in tokens.")
    sample_packing_group_size: AtLeastOne = Field(
        default=100000,
        description="Number of documents that multipack packs together. Larger groups fill bins slightly better.",
    )
    sample_packing_sequentially: bool | None = Field(
        default=None,
        description="true packs in the exact order of the data, regardless of the method. null and false leave the "
        "order to sample_packing_method.",
    )
    sample_packing_mp_start_method: StartMethod | None = Field(
        default=None,
        description="Pack the groups of multipack in dataset_num_proc processes, started with this method: fork, "
        "spawn or forkserver. null packs them in the training process.",
    )
    eval_sample_packing: bool | None = Field(
        default=None,
        description="Pack held-out data too; false puts each document into a separate bin. null means true.",
    )
    dataloader_num_workers: AtLeastZero = Field(
        default=8,
        description="Number of processes per rank that build batches. 0 builds them in the training process. Before "
        "Python 3.11.10, starting one hangs on rare occasions (python/cpython#112275).",
    )
    dataloader_prefetch_factor: AtLeastOne | None = Field(
        default=2,
        description="Number of batches that each of these processes builds in advance. With dataloader_num_workers: 0 "
        "it must be null, which is then the default; null with workers means torch's default, 2.",
    )
    dataloader_pin_memory: bool = Field(
        default=True, description="Put batches into page-locked memory, from which a GPU copies faster."
    )
    dataloader_drop_last: bool = Field(
        default=True,
        description="Drop the bins at the end of an epoch that do not fill an optimizer step. false trains a smaller "
        "last step.",
    )
    pad_to_multiple_of: AtLeastOne = Field(
        default=128,
        description="Pad each micro-batch to a multiple of this many tokens. The padding is not trained on.",
    )
    val_set_size: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Rows to hold out of datasets for evaluation: a number of rows, or a fraction below 1. null means "
        "none.",
    )
    shuffle_merged_datasets: bool = Field(
        default=True,
        description="Shuffle the merged rows, and in each epoch the bins that they are packed into, by train.seed. If "
        "this and shuffle_before_merging_datasets are false, every epoch trains in the order of the data, as far as "
        "sample_packing_method keeps it.",
    )
    shuffle_before_merging_datasets: bool = Field(
        default=True, description="Shuffle the rows of each dataset by train.seed before merging."
    )
    dataset_num_proc: AtLeastOne | None = Field(
        default=None,
        description="Number of processes that prepare data. null means the environment variable XORL_DATASET_NUM_PROC "
        "if it is set, otherwise the number of CPU cores.",
    )
    dataset_shard_num: AtLeastOne | None = Field(
        default=None,
        description="Split the merged rows of datasets into this many parts and use only part dataset_shard_idx; "
        "test_datasets are not split. null means no split.",
    )
    dataset_shard_idx: AtLeastZero | None = Field(
        default=None, description="Part to use, counted from 0. null if dataset_shard_num is null."
    )
    num_dataset_shards_to_save: AtLeastOne | None = Field(
        default=None,
        description="Number of files that the tokens of a prepared dataset, or of an upload, are stored in. Documents "
        "are not split across files. null means one.",
    )
    skip_prepare_dataset: bool = Field(
        default=False, description="Read dataset_prepared_path as it is, without checking the sources again."
    )
    push_dataset_to_hub: str | None = Field(
        default=None,
        description="Hub repository (org/name) to which the merged documents of datasets are uploaded, as tokenized "
        "Parquet files. It is created as private if it does not exist. Needs hf_use_auth_token: true. null means no "
        "upload.",
    )
    hf_use_auth_token: bool | None = Field(
        default=None,
        description="Use the stored Hub token for private datasets and uploads. null leaves the choice to the Hub "
        "library.",
    )
