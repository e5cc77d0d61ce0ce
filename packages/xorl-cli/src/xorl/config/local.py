"""The options of local training, by section: model, train and lora; those of data are in `data`.

The fields of a group are in documentation order. A default that depends on another option is null here; resolve.py
fills it in.
"""

from typing import Annotated, Literal

from pydantic import Field

from xorl.config.checkpoint_fields import LocalCheckpointFields
from xorl.config.data import DataConfig
from xorl.config.entries import SweepMemberConfig
from xorl.config.fields import (
    AtLeastOne,
    AtLeastZero,
    LogLevel,
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

Fp8Recipe = Literal["none", "tensorwise", "rowwise"]
DecayStyle = Literal["constant", "linear", "cosine"]
RecomputableModule = Literal["self_attn", "mlp"]
RecomputePolicy = Literal["module", "operation", "auto"]
ExpertCheckpointMethod = Literal["moe_act"]
ExpertForm = Literal["per_expert", "peft", "sglang"]
OnNonfinite = Literal["stop", "skip"]
LossName = Literal["cross_entropy", "dpo", "orpo", "kto", "simpo"]
PreferenceReference = Literal["base", "initial"]
LogFormat = Literal["progress_bar", "structured"]


class ModelConfig(NumericsFields, ModelFields):
    """Model"""

    router_fp32: bool = Field(
        default=True,
        description="Compute the logits of mixture-of-experts routers in fp32. false multiplies in the compute dtype, "
        "as transformers does in some families.",
    )


class ScheduleFields(OptimizerFields):
    """Optimizer"""

    lr: NonNegative = Field(default=5e-5, description="Peak learning rate.")
    lr_min: NonNegative = Field(
        default=1e-7, description="Learning rate at the end of the decay. The default is at most lr."
    )
    lr_start: NonNegative = Field(default=0.0, description="Learning rate at the start of the warm-up.")
    lr_warmup_ratio: Ratio = Field(
        default=0.0,
        description="Fraction of all optimizer steps in which the learning rate rises linearly from lr_start to lr.",
    )
    lr_decay_style: DecayStyle = Field(
        default="constant", description="Shape of the schedule after the warm-up: constant, linear or cosine."
    )
    lr_decay_ratio: Ratio = Field(
        default=1.0,
        description="Fraction of all optimizer steps, including the warm-up, after which the learning rate stays at "
        "lr_min.",
    )
    weight_decay: NonNegative = Field(
        default=0.0,
        description="Weight decay, decoupled from the gradient in AdamW. Trained scalars of activations have none.",
    )
    no_decay_modules: list[str] = Field(
        default=[],
        description="Names of modules as in the checkpoint, such as norm or v_proj; their parameters get no weight "
        "decay. An entry selects modules whose names, or parts between dots, end with it: norm includes "
        "input_layernorm, and gate is a router, not gate_proj. If no name ends with an entry, it selects all that "
        "contain it.",
    )
    no_decay_params: list[str] = Field(
        default=[],
        description="Last parts of parameter names, or their ends, such as bias; these parameters get no weight decay.",
    )
    max_grad_norm: NonNegative | None = Field(
        default=1.0,
        description="Maximum norm of the gradient over all parameters; a larger gradient is scaled down to it. 0 and "
        "null disable clipping, but the norm is still measured.",
    )


class RouterFields(Section):
    """Mixtures of experts"""

    router_aux_loss_coef: NonNegative | None = Field(
        default=None,
        description="Weight of the routers' load-balancing loss, computed for each document, so that it does not "
        "depend on how a batch is split. It takes the softmax of the routers' logits, as transformers does, also where "
        "tokens choose experts by the sigmoid. null means router_aux_loss_coef of config.json if that sets "
        "output_router_logits, else 0.",
    )
    router_z_loss_coef: NonNegative = Field(
        default=0.0, description="Weight of the routers' z-loss: the mean square of the logsumexp of their logits."
    )
    router_correction_rate: NonNegative = Field(
        default=0.0,
        description="For routers with a correction bias, such as e_score_correction_bias: how much each step adds to "
        "the bias of experts chosen by fewer tokens than the mean, and subtracts from that of experts chosen by more. "
        "DeepSeek-V3 was trained with 1e-3. 0 keeps the biases as they are.",
    )
    freeze_router: bool = Field(default=False, description="Do not train the routers, nor the gates of shared experts.")


class ImageFields(Section):
    """Models that read images"""

    freeze_encoders: bool = Field(
        default=True,
        description="Do not train the image encoder, except for its projectors (see freeze_projectors). If the data "
        "has no images, the whole encoder stays as it is.",
    )
    freeze_projectors: bool = Field(
        default=False,
        description="Do not train the projectors, which map the outputs of the image encoder to the width of the "
        "decoder. Adapters leave them as they are too, unless lora.modules_to_save names them.",
    )
    freeze_decoder: bool = Field(default=False, description="Do not train the language model.")
    encoder_lr: NonNegative | None = Field(
        default=None,
        description="Peak learning rate of the image encoder. It follows the same schedule as lr. null means lr.",
    )
    projector_lr: NonNegative | None = Field(
        default=None,
        description="Peak learning rate of the projectors (see freeze_projectors). It follows the same schedule as "
        "lr. null means lr.",
    )


class BatchFields(Section):
    """Batch sizing"""

    micro_batch_size: AtLeastOne = Field(
        default=1, description="Number of bins that a rank runs through the model at once."
    )
    gradient_accumulation_steps: AtLeastOne = Field(
        default=1,
        description="Number of micro-batches per rank in each optimizer step. A step trains on micro_batch_size x "
        "gradient_accumulation_steps x data-parallel size bins.",
    )
    num_train_epochs: AtLeastOne = Field(default=1, description="Number of passes over the data.")
    max_steps: AtLeastOne | None = Field(
        default=None,
        description="Number of optimizer steps after which training ends; the learning-rate schedule spans them. null "
        "means that num_train_epochs decides.",
    )
    on_nonfinite: OnNonfinite = Field(
        default="stop",
        description="What happens at a step whose loss or gradient is not finite. Its update is never applied. stop "
        "ends the run; skip continues with the next step, unless 10 steps in a row are skipped. Either way, the bins "
        "and parameters that are not finite are listed in nonfinite.jsonl in output_dir.",
    )
    eval_steps: AtLeastOne | None = Field(
        default=None,
        description="Number of optimizer steps between evaluations on held-out data. null evaluates only before the "
        "first and after the last step. Without held-out data nothing is evaluated.",
    )


class LocalLossFields(LossFields):
    """Loss"""

    loss: LossName = Field(
        default="cross_entropy",
        description="What is minimised. cross_entropy: the mean over trained tokens. The others train on pairs of "
        "answers (datasets of type preference) and are means over pairs: dpo and kto with a reference model, orpo and "
        "simpo without one.",
    )
    preference_beta: Positive | None = Field(
        default=None,
        description="Scale of the rewards of a preference loss; for orpo, the weight of the odds ratio. null means 2.0 "
        "for simpo, and 0.1 for the others.",
    )
    preference_reference: PreferenceReference | None = Field(
        default=None,
        description="The model that dpo and kto compare with. base: the base without its adapters, which costs another "
        "forward pass in each step. initial: the model with which the run starts; it scores all pairs once, before the "
        "first step, and dataset_prepared_path keeps the results. null means base for new adapters, and initial "
        "without adapters, for lora.adapter_path, and where the base is trained or merged into.",
    )
    preference_label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Probability that the preference of a pair is the wrong way round, for dpo and simpo.",
    )
    dpo_length_normalized: bool = Field(
        default=False, description="Divide the log-probability of an answer by its number of tokens in dpo."
    )
    simpo_gamma: NonNegative = Field(
        default=0.5, description="Margin of rewards by which the chosen answer is to win in simpo."
    )
    kto_desirable_weight: NonNegative = Field(default=1.0, description="Weight of chosen answers in kto.")
    kto_undesirable_weight: NonNegative = Field(default=1.0, description="Weight of rejected answers in kto.")


class LocalMemoryFields(MemoryFields):
    """Memory and performance"""

    param_dtype: ParameterDtype | None = Field(
        default=None,
        description="Dtype in which parameters are stored; null means fp32. bf16 halves the memory of parameters and "
        "gradients, while reductions and the accumulation over micro-batches stay in fp32. anyprecision_adamw and "
        "muon train bf16 parameters as well as fp32 ones; adamw and sgd round updates to nearest and lose small ones. "
        "With lora.enable_lora it is the dtype of the frozen weights (trained ones are fp32), and null means the "
        "compute dtype; fp32 is useful there if adapters are merged into the weights.",
    )
    fp8: Fp8Recipe = Field(
        default="none",
        description="Run the matrix products of linear layers in 8-bit floating point, forward and backward, with "
        "scales computed from the current values: tensorwise (one scale per matrix; fastest, and fsdp2 gathers the "
        "weights in fp8) or rowwise (one scale per row; more accurate). Experts have one scale per row with either; "
        "gradients of their weights are not in fp8. The head, embeddings and routers are excluded. Needs a GPU of "
        "compute capability 8.9 or higher (a CPU emulates it, slowly).",
    )
    recompute_policy: RecomputePolicy = Field(
        default="module",
        description="What gradient checkpointing recomputes. module: recompute_modules, or whole layers. operation: "
        "everything except matrix products and attention, whose outputs are kept (latent attention keeps its latents "
        "instead of its heads); nearly as fast as keeping everything. auto: a short probe before training picks the "
        "first of nothing, operation, whole layers, and whole layers with enable_activation_offload that fits into "
        "memory, in as few layers as possible (recompute_num_layers). On a CPU, auto recomputes nothing.",
    )
    recompute_num_layers: AtLeastOne | None = Field(
        default=None,
        description="Number of layers, counted from the first, in which gradient checkpointing recomputes; the others "
        "keep all activations. null means all layers.",
    )
    recompute_modules: Annotated[list[RecomputableModule], Field(min_length=1)] | None = Field(
        default=None,
        description="Parts of a layer to recompute: [self_attn], [mlp] or both. null means the whole layer.",
    )
    moe_checkpoint_method: ExpertCheckpointMethod | None = Field(
        default=None,
        description="With gradient checkpointing, moe_act recomputes only the gate, up and activation of experts, and "
        "what recompute_modules or recompute_policy: operation select; tokens are neither routed nor sent again. null "
        "recomputes experts with their layer.",
    )
    enable_cpu_offload: bool = Field(
        default=False,
        description="Under fsdp2 on GPUs, keep parameters, gradients and optimizer state in host memory and run the "
        "optimizer there. Slow; for models that do not fit otherwise.",
    )
    activation_gpu_limit: NonNegative = Field(
        default=0.0,
        description="Activations, in GB, that enable_activation_offload leaves on the GPU: those saved last, which "
        "are needed first. The activations of the last layer and of the layer being computed stay on the GPU in "
        "addition. 0 means none.",
    )
    enable_cuda_graphs: bool = Field(
        default=False,
        description="Launch the forward and the backward pass of a layer as one CUDA graph each, not kernel by kernel. "
        "It pays where the host takes longer to launch a layer than the GPU to compute it: for a mixture of experts "
        "with up to about 8,192 tokens a GPU, or where ranks share short rows (Ulysses) or matrices (tensor "
        "parallelism). Rows share graphs if they have equal numbers of tokens, and if the number of documents and the "
        "length of the longest round up to the same powers of two; set data.pad_to_multiple_of to "
        "data.sample_packing_sequence_len to make all rows equally long. Needs GPUs, flash attention, compiled layers "
        "that are recomputed as a whole, and parameters that stay in place: data_parallel_mode ddp or none.",
    )
    enable_full_determinism: bool = Field(
        default=False,
        description="Use only deterministic kernels, so that a run repeats bit for bit; slower. Needs "
        "allow_cuda_launch_blocking: true.",
    )
    allow_cuda_launch_blocking: bool = Field(
        default=False, description="Allow CUDA_LAUNCH_BLOCKING=1, which is otherwise refused because it is slow."
    )
    empty_cache_steps: AtLeastZero = Field(
        default=500, description="Number of optimizer steps between releases of cached GPU memory. 0 means never."
    )
    gc_steps: AtLeastZero = Field(
        default=500,
        description="Number of optimizer steps between Python garbage collections; no others run in between. 0 leaves "
        "garbage collection to Python.",
    )


class LoggingFields(Section):
    """Logging"""

    log_format: LogFormat = Field(
        default="progress_bar",
        description="Console output of a run: progress_bar (lines if it is not a terminal), or structured "
        "(key=value lines). metrics.jsonl has all metrics in either case.",
    )
    log_level: LogLevel = Field(
        default="INFO",
        description="Minimum level of the lines on the console. DEBUG adds every choice and measure of the start-up, "
        "with its duration; ranks other than the first log warnings and errors, whatever the level.",
    )
    use_wandb: bool = Field(
        default=True,
        description="Log to Weights & Biases. Without an API key or a network, it logs offline and prints one line "
        "about it. A resumed run continues its Weights & Biases run.",
    )
    wandb_project: str = Field(default="Xorl", description="Weights & Biases project.")
    wandb_name: str | None = Field(
        default=None, description="Name of the run in Weights & Biases. null means a generated name."
    )
    wandb_tags: list[str] | None = Field(
        default=None, description="Tags of the run in Weights & Biases. null means none."
    )
    wandb_log_interval: AtLeastOne = Field(
        default=1, description="Number of optimizer steps between logs to Weights & Biases."
    )


class ProfilingFields(Section):
    """Profiling"""

    enable_profiling: bool = Field(default=False, description="Record a trace with torch's profiler.")
    profile_start_step: AtLeastOne = Field(default=1, description="First optimizer step to record.")
    profile_end_step: AtLeastOne = Field(
        default=2,
        description="Optimizer step before which recording stops. By default a single step is recorded.",
    )
    profile_trace_dir: str = Field(default="./trace", description="Folder for the traces.")
    profile_record_shapes: bool = Field(default=True, description="Record input shapes.")
    profile_profile_memory: bool = Field(default=True, description="Record memory use.")
    profile_with_stack: bool = Field(default=True, description="Record Python stacks.")
    profile_rank0_only: bool = Field(default=True, description="Record only rank 0; false writes one trace per rank.")


# Pydantic collects fields from the last base class first.
class TrainConfig(
    SeedFields,
    ProfilingFields,
    LoggingFields,
    LocalCheckpointFields,
    LocalLossFields,
    LocalMemoryFields,
    BatchFields,
    RouterFields,
    ImageFields,
    ScheduleFields,
    ParallelFields,
):
    """Train"""

    @property
    def context_parallel_size(self) -> int:
        """Number of ranks that share each row of tokens."""
        return self.ringattn_parallel_size * self.ulysses_parallel_size


class LocalLoraFields(LoraFields):
    """LoRA"""

    lora_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of the adapters' inputs that is zeroed during training."
    )
    use_rslora: bool = Field(
        default=False, description="Scale adapters by alpha/sqrt(rank), so that high ranks do not learn less."
    )
    use_dora: bool = Field(
        default=False,
        description="Train the norms of the adapted weights' rows separately from their directions (DoRA). Not "
        "supported for embeddings.",
    )
    rank_pattern: dict[str, AtLeastOne] = Field(
        default={},
        description="Ranks of individual adapters: a mapping from regular expressions to ranks. An expression must "
        "match the end of a layer's name, in whole dot-separated parts; the first match applies.",
    )
    alpha_pattern: dict[str, Positive] = Field(
        default={}, description="Alphas of individual adapters, by regular expressions as in rank_pattern."
    )
    modules_to_save: list[str] = Field(
        default=[],
        description="Modules that are trained in full beside the adapters, by the last parts of their names in the "
        "checkpoint, such as lm_head or norm.",
    )
    adapter_path: str | None = Field(
        default=None,
        description="Adapter to start from, saved by PEFT or xorl: its folder, a checkpoint that contains one, or a "
        "Hub id. Its files determine rank, alpha, targets and everything else except lora_dropout. To resume a run "
        "with its optimizer, use train.load_checkpoint_path. null creates new adapters.",
    )
    save_lora_only: bool = Field(
        default=False,
        description="Leave the base weights out of checkpoints and out of the export at the end, which is then the "
        "adapter in PEFT's format instead of the model with the adapter merged in. A resumed run reads the base from "
        "model.model_path again. Checkpoints contain the adapter in PEFT's format in either case.",
    )
    moe_lora_format: ExpertForm | None = Field(
        default=None,
        description="Form of adapters on experts in files: per_expert (A and B of each expert, which vLLM and SGLang "
        "read), peft (the target_parameters of PEFT), or sglang (SGLang's shared outer form, for "
        "moe_hybrid_shared_lora). null means sglang with moe_hybrid_shared_lora, and else per_expert; factors that "
        "experts share are then repeated for each. xorl reads all forms. A form is refused if the programs that read "
        "it would compute something else.",
    )
    exclude_modules: list[str] | None = Field(
        default=None,
        description="Modules that are not quantized, by parts of their names in the checkpoint, such as experts or "
        "0.self_attn.o_proj, or by patterns with * for whole names. null means those listed in the checkpoint's "
        "config. Routers, embeddings, the head and norms are never quantized.",
    )
    enable_aqn: bool = Field(
        default=False,
        description="Add noise to quantized weights during training, drawn again in each step: aqn_alpha times half a "
        "quantization step of the group.",
    )
    aqn_alpha: NonNegative = Field(default=1.0, description="Scale of the noise that enable_aqn adds.")


class LoraConfig(LocalLoraFields):
    """LoRA"""

    sweep: list[SweepMemberConfig] = Field(
        default=[],
        description="Adapters to train together on one frozen base, each as if in a separate run with these options. "
        "Results are written to sweep/NAME in train.output_dir. An empty list trains a single adapter.",
    )
    sweep_members_per_pass: AtLeastOne | None = Field(
        default=None,
        description="Number of members of lora.sweep whose micro-batches go through the model together; fewer need "
        "less memory. null means all.",
    )


class Config(Section):
    """Local training"""

    model: ModelConfig = Field(default=ModelConfig(), description="The model, and the kernels that compute it.")
    data: DataConfig = Field(description="The training data, and how it is prepared, packed and loaded.")
    train: TrainConfig = Field(description="How the model is trained, saved and monitored.")
    lora: LoraConfig = Field(default=LoraConfig(), description="Adapters and quantized base weights.")
