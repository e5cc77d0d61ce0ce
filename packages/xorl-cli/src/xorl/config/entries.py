"""Options that come in lists: the entries of datasets, and the members of a sweep."""

from typing import Annotated, Literal

from pydantic import Field

from xorl.config.fields import AtLeastOne, AtLeastZero, NonNegative, Positive, Ratio, Section

DatasetType = Literal["tokenized", "chat", "prompt_completion", "text", "auto"]
DatasetFileFormat = Literal["json", "csv", "parquet", "arrow", "text"]
TrainOn = Literal["assistant", "completion", "all", "last_turn"]
OverflowPolicy = Literal["truncate", "drop", "split", "error"]


class DatasetEntryConfig(Section):
    """Dataset entry"""

    path: str = Field(
        description="Where the rows are: a local file or folder, a Hub id (org/name), a URL (s3://, gs://, abfs://, "
        "https://), or dummy for made-up rows.",
    )
    type: DatasetType = Field(
        default="tokenized",
        description="What a row holds. tokenized: input_ids and maybe labels (-100 is not trained; absent means "
        "input_ids) and attention_mask. chat: messages or conversations. prompt_completion: a prompt and its answer. "
        "text: plain documents. auto: recognised from the columns. All but tokenized need model.tokenizer_path.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template of type chat: a Jinja file, or one of the tokenizer's templates by name. null means "
        "the tokenizer's own. Where all conversations have one and the same, exported models have it too.",
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default={},
        description="Variables of the chat template besides its messages and tools, such as {enable_thinking: false}. "
        "strftime_now: 2026-01-31 sets the date for templates that write it; otherwise it is the date of preparing.",
    )
    train_on: TrainOn | None = Field(
        default=None,
        description="Which tokens are trained. assistant: what the assistant says; last_turn: what it says after the "
        "last user message; completion: what follows the prompt; all: everything. null means assistant for chat, "
        "completion for prompt_completion and all for text; the labels say it for tokenized.",
    )
    columns: dict[str, str] = Field(
        default={},
        description="Names of the columns, where they are not the usual ones: messages, tools and system of chat; "
        "prompt and completion, instruction, input and output, or question and answer of prompt_completion; text of "
        "text. Such as {prompt: query, completion: response}.",
    )
    name: str | None = Field(
        default=None, description="Configuration (subset) of a Hub dataset. null means its default."
    )
    split: str | None = Field(
        default=None, description="Split to read, such as train or validation. null means train, or the only one."
    )
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of a Hub dataset. null means the newest."
    )
    trust_remote_code: bool = Field(default=False, description="Run a loading script that comes with a dataset.")
    data_files: str | list[str] | None = Field(
        default=None,
        description="Files to read within path, as names or patterns. Needs ds_type. null means what path holds.",
    )
    ds_type: DatasetFileFormat | None = Field(
        default=None,
        description="Format of the files: json (also one object a line), csv, parquet, arrow or text. null means what "
        "the file names say.",
    )
    max_seq_len: AtLeastOne | None = Field(
        default=None,
        description="Longest document, in tokens; overflow says what becomes of longer ones. null means "
        "data.sample_packing_sequence_len.",
    )
    overflow: OverflowPolicy = Field(
        default="truncate",
        description="What becomes of a document that is longer than max_seq_len: truncate cuts its end off, drop "
        "leaves it out, split makes several documents of it, error stops the run. What happened is counted and "
        "printed.",
    )
    overflow_limit: Ratio | None = Field(
        default=None,
        description="Largest fraction of the samples, or of the tokens, that may be cut, dropped or split before the "
        "run stops. null means 0.01; for truncate with an explicit max_seq_len, and for split where every token is "
        "trained, it means no limit.",
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Share of this dataset in the mixture, relative to the weights of the other entries, which must "
        "all have one. An epoch has as many documents as all datasets together. If a dataset's share is more than it "
        "has, its documents are repeated equally often, and a draw by train.seed decides which come once more: the "
        "same in every epoch, or with data.streaming others in each. null means no weights.",
    )
    num_epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="How often this dataset is repeated in each epoch. For a fraction, some of its rows are drawn by "
        "train.seed: the same in every epoch, or with data.streaming others in each. Not together with weight. null "
        "means 1.",
    )
    shards: AtLeastOne | None = Field(
        default=None, description="Cut the dataset into this many parts and use shards_idx alone. null means all of it."
    )
    shards_idx: AtLeastZero | None = Field(
        default=None, description="Which of the shards to use, from 0. null goes with shards: null."
    )
    preprocess_shards: AtLeastOne | None = Field(
        default=None,
        description="Prepare the dataset in this many parts, one after the other, each stored when it is done: a start "
        "after a failure goes on with the part that failed. Documents and order stay the same. null means one.",
    )


class SweepMemberConfig(Section):
    """Sweep member"""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the member, and of the folder of its results: letters, digits, dots, dashes and "
        "underscores.",
    )
    lora_rank: AtLeastOne | None = Field(default=None, description="Rank of the adapter. null means lora.lora_rank.")
    lora_alpha: Positive | None = Field(default=None, description="Its alpha. null means lora.lora_alpha.")
    lora_target_modules: Literal["all-linear"] | list[str] | None = Field(
        default=None, description="Layers that it is on. null means lora.lora_target_modules."
    )
    lr: NonNegative | None = Field(default=None, description="Peak learning rate. null means train.lr.")
    weight_decay: NonNegative | None = Field(default=None, description="Weight decay. null means train.weight_decay.")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = Field(
        default=None,
        description="Seed of its initial values and of the order of its data. null means train.seed, from which a base "
        "without weights is drawn in any case.",
    )
    datasets: list[DatasetEntryConfig] | None = Field(
        default=None,
        description="What it is trained on, with the fields of data.datasets. null means data.datasets.",
    )
