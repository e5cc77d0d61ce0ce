"""The options of local training, by section: model, data, train and lora.

Fields of a group are in documentation order. A default that depends on another option is null here; resolve.py fills it
in.
"""

from typing import Annotated, Literal

from pydantic import Field

from xorl.config.entries import DatasetEntryConfig, SweepMemberConfig
from xorl.config.fields import (
    AtLeastOne,
    AtLeastZero,
    CheckpointFields,
    LoraFields,
    LossFields,
    MemoryFields,
    ModelFields,
    NonNegative,
    NumericsFields,
    OptimizerFields,
    ParallelFields,
    ParameterDtype,
    Positive,
    Ratio,
    Section,
    SeedFields,
)

PackingMethod = Literal["sequential", "multipack"]
StartMethod = Literal["fork", "spawn", "forkserver"]
Fp8Recipe = Literal["none", "tensorwise", "rowwise"]
DecayStyle = Literal["constant", "linear", "cosine"]
RecomputableModule = Literal["self_attn", "mlp"]
RecomputePolicy = Literal["module", "operation", "auto"]
ExpertCheckpointMethod = Literal["moe_act"]
LogFormat = Literal["progress_bar", "structured"]


class ModelConfig(NumericsFields, ModelFields):
    """Model"""


class DataConfig(Section):
    """Data"""

    datasets: list[DatasetEntryConfig] = Field(
        min_length=1, description="What is trained on: one entry per dataset, merged in order."
    )
    test_datasets: list[DatasetEntryConfig] = Field(
        default=[],
        description="What is evaluated on, with the fields of datasets. Not together with val_set_size.",
    )
    streaming: bool = Field(
        default=False,
        description="Read, tokenize and pack the datasets while training runs instead of preparing them first, for "
        "data larger than the disk. The length of the data is then unknown, so train.max_steps has to say when to end. "
        "Blocks of about 1 MiB are shuffled by train.seed, and so are the rows in each. weight is then a share of "
        "bytes. test_datasets are prepared.",
    )
    dataset_prepared_path: str = Field(
        default="last_prepared_dataset",
        description="Folder of prepared datasets. Each is stored under a hash of all it was made from.",
    )
    select_columns: list[str] | None = Field(
        default=None,
        description="Columns to read of each dataset, such as [input_ids, labels]. null means those of input_ids, "
        "labels and attention_mask that it has.",
    )
    sample_packing_method: PackingMethod = Field(
        default="sequential",
        description="How documents fill a bin: sequential keeps about the order of the data, multipack fills bins "
        "best (best-fit decreasing within a group, bins shuffled afterwards).",
    )
    sample_packing_sequence_len: AtLeastOne = Field(default=32000, description="Size of a bin, in tokens.")
    sample_packing_group_size: AtLeastOne = Field(
        default=100000,
        description="Documents that are packed together under multipack. More fill bins slightly better.",
    )
    sample_packing_sequentially: bool | None = Field(
        default=None,
        description="true packs in the exact order of the data, whatever the method. null and false leave it to the "
        "method.",
    )
    sample_packing_mp_start_method: StartMethod | None = Field(
        default=None,
        description="Pack the groups of multipack in dataset_num_proc processes, started this way: fork, spawn or "
        "forkserver. null packs them in the process that trains.",
    )
    eval_sample_packing: bool | None = Field(
        default=None,
        description="Pack held-out data too; false puts each document into a bin of its own. null means true.",
    )
    dataloader_num_workers: AtLeastZero = Field(
        default=8, description="Processes of each rank that make batches. 0 makes them in the training process."
    )
    dataloader_prefetch_factor: AtLeastOne | None = Field(
        default=2,
        description="Batches that each of these processes makes ahead. Must be null when dataloader_num_workers is 0 "
        "(and is, unless set); null with workers means torch's own default, 2.",
    )
    dataloader_pin_memory: bool = Field(
        default=True, description="Put batches into page-locked memory, from which a GPU copies faster."
    )
    dataloader_drop_last: bool = Field(
        default=True,
        description="Leave out the bins at the end of an epoch that do not fill an optimizer step. false trains a "
        "smaller last step.",
    )
    pad_to_multiple_of: AtLeastOne = Field(
        default=128, description="Pad each micro-batch to a multiple of this many tokens. The padding is not trained."
    )
    val_set_size: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Rows held out of datasets for evaluation: a whole number of them, or a fraction below 1. null "
        "means none.",
    )
    shuffle_merged_datasets: bool = Field(
        default=True,
        description="Shuffle the merged rows, and in each epoch the bins that they are packed into, by train.seed. "
        "false, with shuffle_before_merging_datasets: false too, trains in the order of the data, as far as "
        "sample_packing_method keeps it, in every epoch alike.",
    )
    shuffle_before_merging_datasets: bool = Field(
        default=True, description="Shuffle the rows of each dataset before merging, by train.seed."
    )
    dataset_num_proc: AtLeastOne | None = Field(
        default=None,
        description="Processes that prepare data. null means the environment variable XORL_DATASET_NUM_PROC, else the "
        "number of CPU cores.",
    )
    dataset_shard_num: AtLeastOne | None = Field(
        default=None,
        description="Cut the merged rows of datasets into this many parts and use dataset_shard_idx alone; "
        "test_datasets stay whole. null means all of it.",
    )
    dataset_shard_idx: AtLeastZero | None = Field(
        default=None, description="Which of these parts to use, from 0. null goes with dataset_shard_num: null."
    )
    num_dataset_shards_to_save: AtLeastOne | None = Field(
        default=None,
        description="Files that the tokens of each prepared dataset, or upload, are stored in, of whole documents. "
        "null means one.",
    )
    skip_prepare_dataset: bool = Field(
        default=False, description="Read dataset_prepared_path as it is, without looking at the sources again."
    )
    push_dataset_to_hub: str | None = Field(
        default=None,
        description="Upload the merged documents of datasets, as tokenized Parquet files, to this Hub repository "
        "(org/name), made private where it does not exist. Needs hf_use_auth_token: true. null means no upload.",
    )
    hf_use_auth_token: bool | None = Field(
        default=None,
        description="Use the stored Hub token for private datasets and uploads. null leaves it to the Hub library.",
    )


class ScheduleFields(OptimizerFields):
    """Optimizer"""

    lr: NonNegative = Field(default=5e-5, description="Peak learning rate.")
    lr_min: NonNegative = Field(default=1e-7, description="Learning rate at the end of the decay.")
    lr_start: NonNegative = Field(default=0.0, description="Learning rate at the start of the warm-up.")
    lr_warmup_ratio: Ratio = Field(
        default=0.0, description="Fraction of all optimizer steps in which the rate rises linearly from lr_start to lr."
    )
    lr_decay_style: DecayStyle = Field(
        default="constant", description="Shape of the schedule after the warm-up: constant, linear or cosine."
    )
    lr_decay_ratio: Ratio = Field(
        default=1.0,
        description="Fraction of all optimizer steps, warm-up included, after which the rate stays at lr_min.",
    )
    weight_decay: NonNegative = Field(default=0.0, description="Weight decay, decoupled from the gradient in AdamW.")
    no_decay_modules: list[str] = Field(
        default=[], description="Parts of module names, such as norm, whose parameters get no weight decay."
    )
    no_decay_params: list[str] = Field(
        default=[], description="Parts of parameter names, such as bias, that get no weight decay."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0,
        description="Largest norm of the gradient over all parameters; a larger gradient is scaled down to it. null "
        "does not clip, but the norm is still measured.",
    )


class BatchFields(Section):
    """Batch sizing"""

    micro_batch_size: AtLeastOne = Field(default=1, description="Bins that a rank runs through the model at once.")
    gradient_accumulation_steps: AtLeastOne = Field(
        default=1,
        description="Micro-batches of each rank per optimizer step. A step trains micro_batch_size times this times "
        "the data-parallel size bins.",
    )
    num_train_epochs: AtLeastOne = Field(default=1, description="Passes over the data.")
    max_steps: AtLeastOne | None = Field(
        default=None,
        description="Optimizer steps after which training ends and to which the learning-rate schedule is stretched. "
        "null means that num_train_epochs decides.",
    )
    eval_steps: AtLeastOne | None = Field(
        default=None,
        description="Evaluate on held-out data every so many optimizer steps. null evaluates only before the first and "
        "after the last step. Without held-out data nothing is evaluated.",
    )


class LocalMemoryFields(MemoryFields):
    """Memory and performance"""

    param_dtype: ParameterDtype | None = Field(
        default=None,
        description="Precision in which parameters are kept; null means fp32. bf16 halves their memory and that of "
        "their gradients, while reductions and the accumulation of micro-batches stay in fp32. anyprecision_adamw and "
        "muon train bf16 parameters as well as fp32 ones; adamw and sgd round updates to nearest and lose small ones. "
        "With lora.enable_lora it is the precision of the frozen weights (trained ones are fp32), and null means the "
        "precision of the computation; fp32 is useful there if adapters are merged into the weights.",
    )
    fp8: Fp8Recipe = Field(
        default="none",
        description="Multiply in 8-bit floating point in the linear layers, forward and backward, with scales taken "
        "from the values: tensorwise (one scale a matrix; fastest, and under fsdp2 weights are gathered in fp8) or "
        "rowwise (one scale a row; more exact). Not in the head, the embeddings and routers. Needs a GPU of compute "
        "capability 8.9 (a CPU computes the same, slowly).",
    )
    recompute_policy: RecomputePolicy = Field(
        default="module",
        description="What gradient checkpointing computes again: module (recompute_modules, or whole layers), "
        "operation (everything but matrix products and attention, whose outputs are kept: nearly as fast as keeping "
        "everything), or auto: nothing, operation, whole layers, or these with enable_activation_offload, the first "
        "whose memory fits by a short probe before training, in as few layers (recompute_num_layers) as it takes. On a "
        "CPU auto computes nothing again.",
    )
    recompute_num_layers: AtLeastOne | None = Field(
        default=None,
        description="Layers, from the first, in which gradient checkpointing computes again; the others keep "
        "everything. null means all.",
    )
    recompute_modules: Annotated[list[RecomputableModule], Field(min_length=1)] | None = Field(
        default=None,
        description="Parts of a layer that are computed again: [self_attn], [mlp] or both. null means the whole layer.",
    )
    moe_checkpoint_method: ExpertCheckpointMethod | None = Field(
        default=None,
        description="moe_act computes only the activations inside experts again, without the communication. null "
        "means the whole layer.",
    )
    enable_cpu_offload: bool = Field(
        default=False,
        description="Under fsdp2 on GPUs, keep parameters, gradients and the optimizer's state in host memory, where "
        "the optimizer then steps. Slow; for models that fit no other way.",
    )
    activation_gpu_limit: NonNegative = Field(
        default=0.0,
        description="Activations, in GB, that enable_activation_offload leaves on the GPU: those saved last, which are "
        "needed first. Those of the last layer and of the layer that computes stay in addition. 0 means none.",
    )
    enable_full_determinism: bool = Field(
        default=False,
        description="Use deterministic kernels alone, so that a run repeats to the bit; slower. Needs "
        "allow_cuda_launch_blocking: true.",
    )
    allow_cuda_launch_blocking: bool = Field(
        default=False, description="Allow CUDA_LAUNCH_BLOCKING=1, which is slow enough to be refused otherwise."
    )
    empty_cache_steps: AtLeastZero = Field(
        default=500, description="Return cached GPU memory every so many optimizer steps. 0 means never."
    )
    gc_steps: AtLeastZero = Field(
        default=500,
        description="Collect Python garbage every so many optimizer steps, and only then. 0 leaves it to Python.",
    )


class LocalCheckpointFields(CheckpointFields):
    """Checkpointing"""

    output_dir: str = Field(
        min_length=1,
        description="Folder of checkpoints, exported models and metrics. All nodes must see the same one.",
    )
    save_steps: AtLeastZero = Field(
        default=0, description="Save a checkpoint every so many optimizer steps. 0 means not by steps."
    )
    save_epochs: NonNegative = Field(
        default=1.0,
        description="Save a checkpoint every so many epochs; 0.25 saves four in each. 0 means not by epochs.",
    )
    save_async: bool = Field(default=False, description="Write checkpoints in the background while training goes on.")
    save_hf_weights: bool = Field(
        default=True,
        description="Export the trained model to Hugging Face safetensors at the end, in the last checkpoint.",
    )
    load_checkpoint_path: str | None = Field(
        default=None,
        description="Checkpoint folder to continue from; auto takes the newest in output_dir, if there is one. null "
        "or empty starts afresh, and stops if output_dir already holds checkpoints.",
    )


class LoggingFields(Section):
    """Logging"""

    log_format: LogFormat = Field(
        default="progress_bar", description="What a run prints: progress_bar, or structured (key=value lines)."
    )
    use_wandb: bool = Field(
        default=True,
        description="Log to Weights & Biases; offline, with one line about it, when there is no key or network. A run "
        "that is resumed goes on with its run there.",
    )
    wandb_project: str = Field(default="Xorl", description="Project in Weights & Biases.")
    wandb_name: str | None = Field(
        default=None, description="Name of the run in Weights & Biases. null means a name that it makes up."
    )
    wandb_tags: list[str] | None = Field(default=None, description="Tags of the run in Weights & Biases. null: none.")
    wandb_log_interval: AtLeastOne = Field(
        default=1, description="Log to Weights & Biases every so many optimizer steps."
    )


class ProfilingFields(Section):
    """Profiling"""

    enable_profiling: bool = Field(default=False, description="Record a trace with torch's profiler.")
    profile_start_step: AtLeastOne = Field(default=1, description="First optimizer step that is recorded.")
    profile_end_step: AtLeastOne = Field(default=2, description="Optimizer step before which recording stops.")
    profile_trace_dir: str = Field(default="./trace", description="Folder of the traces.")
    profile_record_shapes: bool = Field(default=True, description="Record the shapes of inputs.")
    profile_profile_memory: bool = Field(default=True, description="Record memory use.")
    profile_with_stack: bool = Field(default=True, description="Record Python stacks.")
    profile_rank0_only: bool = Field(default=True, description="Record rank 0 alone; false writes a trace per rank.")


# pydantic collects the fields of the last base first.
class TrainConfig(
    SeedFields,
    ProfilingFields,
    LoggingFields,
    LocalCheckpointFields,
    LossFields,
    LocalMemoryFields,
    BatchFields,
    ScheduleFields,
    ParallelFields,
):
    """Train"""


class LocalLoraFields(LoraFields):
    """LoRA"""

    lora_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the adapters' inputs that are zeroed in training."
    )
    use_rslora: bool = Field(
        default=False, description="Multiply adapters by alpha/sqrt(rank), so that high ranks do not learn less."
    )
    use_dora: bool = Field(
        default=False,
        description="Train the norms of the adapted weights' rows apart from their directions (DoRA). Not for "
        "embeddings.",
    )
    rank_pattern: dict[str, AtLeastOne] = Field(
        default={},
        description="Ranks of some adapters: a regular expression that the end of a layer's name matches, in whole "
        "parts, to its rank. The first that matches counts.",
    )
    alpha_pattern: dict[str, Positive] = Field(
        default={}, description="Alphas of some adapters, by expressions as in rank_pattern."
    )
    modules_to_save: list[str] = Field(
        default=[],
        description="Modules that are trained whole beside the adapters, by the last parts of their names in the "
        "checkpoint, such as lm_head or norm.",
    )
    adapter_path: str | None = Field(
        default=None,
        description="Adapter to start from, of PEFT or of xorl: its folder (also a checkpoint with an adapter) or Hub "
        "id. Its files decide rank, alpha, targets and everything else but lora_dropout. To continue a run with its "
        "optimizer, use train.load_checkpoint_path. null starts new adapters.",
    )
    save_lora_only: bool = Field(
        default=False,
        description="Leave the base's weights out of checkpoints and of the export at the end, which is then PEFT's "
        "adapter instead of the model with the adapter merged in. A resumed run reads the base from model.model_path "
        "again. Checkpoints contain the adapter as PEFT's files in any case.",
    )
    exclude_modules: list[str] | None = Field(
        default=None,
        description="Modules that are not quantized, by the last parts of their names in the checkpoint, or patterns "
        "with * for whole names. null means those that the checkpoint's config names. Embeddings, the head and norms "
        "are never quantized.",
    )
    enable_aqn: bool = Field(
        default=False,
        description="Add noise to quantized weights in training, another in each step, of aqn_alpha times half a "
        "quantization step of their group.",
    )
    aqn_alpha: NonNegative = Field(default=1.0, description="Scale of the noise of enable_aqn.")


class LoraConfig(LocalLoraFields):
    """LoRA"""

    sweep: list[SweepMemberConfig] = Field(
        default=[],
        description="Adapters that are trained together on one frozen base, each as a run of its own with these "
        "options would train it: results of each are in sweep/NAME in train.output_dir. Empty trains one adapter.",
    )
    sweep_members_per_pass: AtLeastOne | None = Field(
        default=None,
        description="Members of lora.sweep whose micro-batches go through the model together: fewer need less memory. "
        "null means all.",
    )


class Config(Section):
    """Local training"""

    model: ModelConfig = Field(default=ModelConfig(), description="Which model, and which kernels compute it.")
    data: DataConfig = Field(description="What is trained on, and how it is prepared, packed and loaded.")
    train: TrainConfig = Field(description="How it is trained, saved and observed.")
    lora: LoraConfig = Field(default=LoraConfig(), description="Adapters and quantized base weights.")
