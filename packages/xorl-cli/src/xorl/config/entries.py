"""The entries of list options: datasets, and the members of a sweep."""

from typing import Annotated, Literal

from pydantic import Field

from xorl.config.fields import AtLeastOne, AtLeastZero, NonNegative, Positive, Ratio, Section

DatasetType = Literal["tokenized", "chat", "prompt_completion", "preference", "text", "auto"]
DatasetFileFormat = Literal["json", "csv", "parquet", "arrow", "text"]
TrainOn = Literal["assistant", "completion", "all", "last_turn"]
OverflowPolicy = Literal["truncate", "drop", "split", "error"]


class DatasetEntryConfig(Section):
    """Dataset entry"""

    path: str = Field(
        description="Source of the rows: a local file or folder, a Hub id (org/name), a URL (s3://, gs://, abfs://, "
        "https://), or dummy for synthetic rows."
    )
    type: DatasetType = Field(
        default="tokenized",
        description="Contents of a row. tokenized: input_ids, and optionally labels (-100 is not trained on; the "
        "default is input_ids) and attention_mask. chat: messages or conversations. prompt_completion: a prompt and "
        "its completion. preference: a prompt with a chosen and a rejected answer, as texts or messages. text: plain "
        "documents. auto: detected from the columns. All types except tokenized need model.tokenizer_path.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template for types chat and preference: a Jinja file, or the name of one of the "
        "tokenizer's templates. null means the tokenizer's default template. If all conversations use the same "
        "template, exported models include it.",
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default={},
        description="Variables for the chat template in addition to messages and tools, such as {enable_thinking: "
        "false}. strftime_now: 2026-01-31 sets the date in templates that print it; otherwise it is the date of "
        "preparation.",
    )
    train_on: TrainOn | None = Field(
        default=None,
        description="Tokens to train on. assistant: everything that the assistant says. last_turn: what it says after "
        "the last user message. completion: everything after the prompt. all: everything. null means assistant for "
        "chat, completion for prompt_completion and preference, and all for text; for tokenized, the labels decide.",
    )
    columns: dict[str, str] = Field(
        default={},
        description="Names of the columns if they are not the usual ones, such as {prompt: query, completion: "
        "response}. The keys are messages (or prompt and completion with messages), tools, system and images for chat; "
        "prompt and completion, instruction, input and output, or question and answer, and system and history, for "
        "prompt_completion; prompt, chosen, rejected, system and tools for preference; text for text.",
    )
    name: str | None = Field(
        default=None,
        description="Configuration (subset) of a Hub dataset, or of a folder whose README.md declares some, such as a "
        "clone of one. null means its default.",
    )
    split: str | None = Field(
        default=None, description="Split to read, such as train or validation. null means train, or the only split."
    )
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of a Hub dataset. null means the newest."
    )
    trust_remote_code: bool = Field(default=False, description="Run a loading script that is part of the dataset.")
    data_files: str | list[str] | None = Field(
        default=None,
        description="Files to read within path, as names or glob patterns. Needs ds_type. null means all files in it.",
    )
    ds_type: DatasetFileFormat | None = Field(
        default=None,
        description="Format of the files: json (also with one object per line), csv, parquet, arrow or text. null "
        "derives it from the file names.",
    )
    max_seq_len: AtLeastOne | None = Field(
        default=None,
        description="Maximum length of a document, in tokens; for type preference, of both answers with their "
        "prompts. overflow decides what happens to longer ones. null means data.sample_packing_sequence_len.",
    )
    overflow: OverflowPolicy | None = Field(
        default=None,
        description="What happens to a document that is longer than max_seq_len: truncate cuts off its end, drop "
        "leaves it out, split divides it into several documents, error stops the run. The affected documents are "
        "counted and reported. null means truncate, but drop for preference, whose pairs cannot be cut.",
    )
    overflow_limit: Ratio | None = Field(
        default=None,
        description="Maximum fraction of the samples, or of the tokens, that may be cut, dropped or split before the "
        "run stops. null means 0.01, but no limit for truncate with an explicit max_seq_len, and for split if every "
        "token is trained on.",
    )
    skip_bad_rows: Ratio | None = Field(
        default=None,
        description="Skip rows that cannot be used, such as broken JSON, missing columns or messages out of order, and "
        "count them. The log names the first ones. If they are more than this fraction of the samples, the run stops. "
        "null stops at the first such row.",
    )
    ignore_columns: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="Columns to leave out, as if the data did not have them: for columns named like a mask or a weight "
        "of other trainers (loss, weight, mask ...), which are refused because ignoring them could train other text. "
        "null leaves out none.",
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Share of this dataset in the mixture, relative to the weights of the other entries, which must "
        "all have one. An epoch has as many documents as all datasets together. If a dataset has fewer documents than "
        "its share, they are repeated equally often, and a draw by train.seed decides which are repeated once more: "
        "the same in every epoch, or with data.streaming different ones in each. null means no weights.",
    )
    num_epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Number of times that this dataset is repeated in each epoch. For a fraction, some of its rows "
        "are drawn by train.seed: the same in every epoch, or with data.streaming different ones in each. Cannot be "
        "combined with weight. null means 1.",
    )
    shards: AtLeastOne | None = Field(
        default=None,
        description="Split the dataset into this many parts and use only part shards_idx. null means no split.",
    )
    shards_idx: AtLeastZero | None = Field(
        default=None, description="Part to use, counted from 0. null if shards is null."
    )
    preprocess_shards: AtLeastOne | None = Field(
        default=None,
        description="Prepare the dataset in this many parts, one after the other, and store each when it is done: "
        "after a failure, preparation resumes with the part that failed. Documents and their order stay the same. "
        "null means one.",
    )


class SweepMemberConfig(Section):
    """Sweep member"""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the member and of its results folder: letters, digits, dots, dashes and underscores.",
    )
    lora_rank: AtLeastOne | None = Field(default=None, description="Rank of the adapter. null means lora.lora_rank.")
    lora_alpha: Positive | None = Field(default=None, description="Alpha of the adapter. null means lora.lora_alpha.")
    lora_target_modules: Literal["all-linear"] | list[str] | None = Field(
        default=None, description="Layers that get the adapter. null means lora.lora_target_modules."
    )
    lr: NonNegative | None = Field(default=None, description="Peak learning rate. null means train.lr.")
    weight_decay: NonNegative | None = Field(default=None, description="Weight decay. null means train.weight_decay.")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = Field(
        default=None,
        description="Seed for the adapter's initialization and its data order. null means train.seed. A base without "
        "weights is always initialized from train.seed.",
    )
    datasets: list[DatasetEntryConfig] | None = Field(
        default=None,
        description="Training data of the member, with the fields of data.datasets. null means data.datasets.",
    )
