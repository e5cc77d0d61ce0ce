"""Groups of options that local training and the service share, and the closed sets of their values.

Each description is the option's documentation: its effect, its unit, and the meaning of null. This file only checks the
type and range of single values; conflicts.py checks combinations, refusals.py what is not built yet.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

AttentionBackend = Literal[
    "auto", "eager", "sdpa", "native", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]
ExpertBackend = Literal["eager", "triton", "native", "quack"]
ExpertDispatch = Literal["alltoall", "deepep"]
EncoderKind = Literal["image", "video", "audio"]
DataParallelMode = Literal["none", "ddp", "fsdp2"]
PipelineSchedule = Literal["1F1B", "GPipe"]
ContextShardingMode = Literal["all", "ulysses_only", "ring_only", "none"]
OptimizerName = Literal["adamw", "anyprecision_adamw", "sgd", "muon"]
OptimizerDtype = Literal["fp32", "bf16"]
ParameterDtype = Literal["fp32", "bf16"]
MuonAdjustment = Literal["original", "match_rms_adamw"]
InitDevice = Literal["auto", "cpu", "cuda", "meta", "npu"]
LoadWeightsMode = Literal["broadcast", "all_ranks", "auto", "safetensors", "dcp"]
CheckpointFormat = Literal["dcp", "torch"]
QuantFormat = Literal["nvfp4", "block_fp8", "nf4"]
CrossEntropyMode = Literal["compiled", "eager"]

AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]
DegreeOrRest = Literal[-1] | AtLeastOne
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of options: unknown names are errors, no value is silently converted, and values are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class EncoderConfig(Section):
    """An encoder of another modality."""

    model_path: str = Field(description="Hub id or local folder of the encoder's weights.")
    config_path: str | None = Field(
        default=None, description="Hub id or local folder of the encoder's config.json; null means model_path."
    )


class ModelFields(Section):
    """Model"""

    model_path: str | None = Field(
        default=None,
        description="Hub id or local folder of the weights to start from. null means random initialisation, for which "
        "config_path is needed.",
    )
    config_path: str | None = Field(
        default=None,
        description="Hub id or local folder (or file) of the model's config.json. null means model_path.",
    )
    tokenizer_path: str | None = Field(
        default=None,
        description="Hub id or local folder of the tokenizer. null means config_path. Tokenized data needs none; when "
        "there is one, exported models carry it.",
    )
    attn_implementation: AttentionBackend = Field(
        default="auto",
        description="Attention kernel. auto uses the fastest one that can run here and logs which. A kernel that is "
        "named here runs, or the run stops. eager is plain torch, sdpa and native are torch's own fused kernels, "
        "flash_attention_2, 3 and 4 need their library and a GPU that it supports.",
    )
    moe_implementation: ExpertBackend | None = Field(
        default=None,
        description="Kernel of mixture-of-experts layers: eager (plain torch), triton (grouped matmul), native "
        "(torch's grouped matmul) or quack. null takes the fastest that can run here.",
    )
    ep_dispatch: ExpertDispatch = Field(
        default="alltoall",
        description="How tokens reach their experts on other GPUs: alltoall (collectives of torch) or deepep (the "
        "DeepEP library over NVLink).",
    )
    deepep_buffer_size_gb: float = Field(
        default=2.0, gt=0, description="Size of the DeepEP NVLink buffer on each GPU, in GB. Used by deepep alone."
    )
    deepep_num_sms: int = Field(
        default=20,
        ge=2,
        multiple_of=2,
        description="Streaming multiprocessors given to the kernels of DeepEP, an even number. Fewer leave more for "
        "the computation they overlap with.",
    )
    deepep_async_combine: bool = Field(
        default=False, description="Overlap the combine step of DeepEP with the computation of the next layer."
    )
    merge_qkv: bool = Field(
        default=True,
        description="Keep the query, key and value projections as one matrix. Set false for tensor parallelism or an "
        "adapter on one of them alone. Loading and exporting convert either way. Gate and up are one matrix always.",
    )
    basic_modules: list[str] = Field(
        default=[],
        description="Modules that FSDP2 shards as units of their own, besides the decoder layers: class names, such as "
        "GatedMLP, or last parts of module paths, such as mlp.",
    )
    foundation: dict[str, JsonValue] = Field(
        default={},
        description="Entries of the model's config.json that replace what the file says, such as "
        "{rms_norm_eps: 1e-5}, in training and in what is exported. One that changes nothing is an error.",
    )
    encoders: dict[EncoderKind, EncoderConfig] = Field(
        default={}, description="Encoders of other modalities by kind, each with model_path and maybe config_path."
    )


class NumericsFields(Section):
    """Numerics"""

    lm_head_fp32: bool = Field(
        default=True,
        description="Keep the logits in fp32, as they are accumulated. false rounds them to the compute dtype before "
        "the softmax, which is fp32 either way, as an inference engine may do. Needs enable_mixed_precision.",
    )
    rmsnorm_native: bool = Field(
        default=False,
        description="Compute RMS norms and the addition of the residual in plain torch, also under enable_compile; "
        "each step rounds its result. false uses the fused kernel wherever it can run and is faster, which does both "
        "in one pass.",
    )
    activation_native: bool = Field(
        default=False,
        description="Compute silu(gate) * up in plain torch, also under enable_compile; each step rounds its result. "
        "false uses the fused kernel wherever it can run and is faster. Other activations are always plain torch.",
    )
    rope_native: bool = Field(
        default=False,
        description="Apply rotary positions to queries and keys in plain torch. false uses the fused kernel wherever "
        "it can run and is faster; unless rmsnorm_native is true, it also computes the norms of queries and keys.",
    )
    attention_cast_bf16: bool = Field(
        default=False,
        description="Round queries and keys to bf16 after the rotation. Needs enable_mixed_precision: false; with it "
        "they are in bf16 already.",
    )


class LossFields(Section):
    """Loss"""

    ce_mode: CrossEntropyMode = Field(
        default="compiled",
        description="How cross-entropy is computed: compiled (fused, from the hidden states, with the logits of a "
        "chunk of tokens at a time) or eager (plain torch on the logits of all tokens at once, which take 4 bytes "
        "times tokens times vocabulary, several times over).",
    )


class ParallelFields(Section):
    """Parallelism"""

    data_parallel_mode: DataParallelMode = Field(
        default="fsdp2",
        description="How ranks share the data: none (one process), ddp (each rank holds the whole model) or fsdp2 "
        "(parameters, gradients and optimizer state are sharded).",
    )
    data_parallel_shard_size: DegreeOrRest = Field(
        default=-1,
        description="Ranks that share one sharded copy of the model under fsdp2. -1 means all ranks that "
        "data_parallel_replicate_size leaves.",
    )
    data_parallel_replicate_size: DegreeOrRest = Field(
        default=-1,
        description="Copies of the sharded model (HSDP when above 1); shard size times this is the data-parallel "
        "size. -1 means what data_parallel_shard_size leaves, which is 1 when that is -1 too, and all ranks under ddp.",
    )
    tensor_parallel_size: AtLeastOne = Field(
        default=1, description="Ranks that split each weight matrix between them. Above 1 needs merge_qkv: false."
    )
    pipeline_parallel_size: AtLeastOne = Field(default=1, description="Pipeline stages that the layers are cut into.")
    pipeline_parallel_schedule: PipelineSchedule = Field(
        default="1F1B",
        description="Order of micro-batches in the pipeline: 1F1B (less memory) or GPipe (all forwards first).",
    )
    pp_variable_seq_lengths: bool = Field(
        default=True,
        description="Let pipeline stages agree on the longest micro-batch of each step, in place of padding all of "
        "them to sample_packing_sequence_len.",
    )
    expert_parallel_size: AtLeastOne = Field(
        default=1, description="Ranks that share the experts of a mixture-of-experts model."
    )
    ulysses_parallel_size: AtLeastOne = Field(
        default=1, description="Ranks that share a sequence by exchanging heads (Ulysses context parallelism)."
    )
    ringattn_parallel_size: AtLeastOne = Field(
        default=1, description="Ranks that share a sequence by passing keys and values round (ring attention)."
    )
    cp_fsdp_mode: ContextShardingMode = Field(
        default="all",
        description="Which context-parallel axes FSDP2 shards parameters over as well: all, ulysses_only, ring_only "
        "or none.",
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free gathered parameters after the forward pass of each unit and gather them again in the "
        "backward pass: true saves memory (ZeRO-3), false saves communication (ZeRO-2). null follows "
        "enable_full_shard.",
    )
    ep_outside: bool = Field(
        default=False, description="Place the expert axis outside the mesh over which experts are sharded by FSDP2."
    )


class OptimizerFields(Section):
    """Optimizer"""

    optimizer: OptimizerName = Field(
        default="adamw",
        description="Update rule: adamw, sgd, anyprecision_adamw (AdamW whose bf16 states and parameters are rounded "
        "stochastically, so that they train as well as fp32 ones) or muon (orthogonalised updates of the layers' "
        "matrices, anyprecision_adamw for the rest).",
    )
    optimizer_dtype: OptimizerDtype = Field(
        default="bf16",
        description="Precision of the states of anyprecision_adamw and muon. adamw and sgd keep that of the "
        "parameters.",
    )
    muon_lr: NonNegative = Field(
        default=0.02, description="Peak learning rate of matrices under muon; its schedule has the shape of that of lr."
    )
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Momentum of muon.")
    muon_nesterov: bool = Field(default=True, description="Use Nesterov momentum in muon.")
    muon_ns_steps: AtLeastOne = Field(default=5, description="Newton-Schulz iterations of each muon update.")
    muon_adjust_lr_fn: MuonAdjustment | None = Field(
        default=None,
        description="How muon scales the learning rate by a matrix's shape: original (sqrt(max(1, rows/columns))) or "
        "match_rms_adamw (updates as large as those of AdamW, so that its lr and weight_decay serve). null means "
        "original.",
    )


class MemoryFields(Section):
    """Memory and performance"""

    enable_mixed_precision: bool = Field(
        default=True,
        description="Compute in bf16 with parameters, reductions and accumulation in fp32; false computes in fp32.",
    )
    enable_gradient_checkpointing: bool = Field(
        default=True, description="Keep only the inputs of each layer and compute its activations again when needed."
    )
    enable_reentrant: bool = Field(
        default=False, description="Use torch's older, reentrant form of gradient checkpointing."
    )
    enable_full_shard: bool = Field(
        default=True,
        description="Under fsdp2, free gathered parameters between uses (ZeRO-3). false keeps them from the forward to "
        "the backward pass (ZeRO-2), which is faster if the memory suffices.",
    )
    enable_forward_prefetch: bool = Field(
        default=True, description="Under fsdp2, gather the next unit's parameters while one computes its forward pass."
    )
    enable_activation_offload: bool = Field(
        default=False,
        description="Move what the layers save for the backward pass to pinned host memory until it is needed. With "
        "enable_gradient_checkpointing these are only the inputs of layers, which is little traffic; otherwise "
        "everything. Needs a GPU.",
    )
    enable_compile: bool = Field(
        default=False,
        description="Compile each decoder layer with torch.compile, once for all equal layers and for packs of any "
        "length. The first step waits for it; later runs find the result in ~/.cache/xorl (or XDG_CACHE_HOME). Needs a "
        "C++ compiler on a CPU, a C compiler with a GPU.",
    )
    init_device: InitDevice = Field(
        default="auto",
        description="Where parameters are created: meta (each rank then makes only its own shards; fsdp2), cuda or "
        "cpu. auto uses meta under fsdp2, otherwise the device that trains.",
    )
    load_weights_mode: LoadWeightsMode = Field(
        default="broadcast",
        description="Who reads the weights: broadcast (rank 0 reads and sends) or all_ranks (each rank reads its "
        "share). auto and safetensors mean broadcast. dcp: model_path is a checkpoint of xorl, saved with either "
        "ckpt_manager on any number of ranks, or a run's folder, whose newest is meant. Only its weights are read; the "
        "run begins at step 0. Where config_path and tokenizer_path are null, both are as the checkpoint says.",
    )


class CheckpointFields(Section):
    """Checkpointing"""

    ckpt_manager: CheckpointFormat = Field(
        default="dcp",
        description="Form of checkpoints: dcp (each rank writes its shards) or torch (one gathered file).",
    )


class LoraFields(Section):
    """LoRA"""

    enable_lora: bool = Field(
        default=False,
        description="Train low-rank adapters instead of the weights, which are then kept in the compute dtype.",
    )
    lora_rank: AtLeastOne = Field(default=16, description="Rank of the adapters.")
    lora_alpha: float = Field(
        default=16.0, gt=0, description="Scale of the adapters: they are multiplied by alpha/rank."
    )
    lora_target_modules: Literal["all-linear"] | list[str] | None = Field(
        default=None,
        description="Layers that get an adapter, by the last parts of their names in the checkpoint, such as q_proj or "
        "0.self_attn.q_proj; embed_tokens and lm_head can be named too. all-linear means every linear layer but the "
        "head. null means the linear projections that the architecture names.",
    )
    enable_qlora: bool = Field(
        default=False,
        description="Keep the linear layers of the base quantized and train adapters over them (QLoRA). Implies "
        "enable_lora. Weights are quantized as they are read; checkpoints that are quantized already are read as they "
        "are.",
    )
    quant_format: QuantFormat = Field(
        default="nvfp4",
        description="Format of quantized base weights: nvfp4 (4-bit float), block_fp8 (8-bit float in blocks) or nf4 "
        "(4-bit normal float, as bitsandbytes has it). On a GPU the first two need compute capability 8.9 or more.",
    )
    quant_group_size: AtLeastOne | None = Field(
        default=None,
        description="Weights of a row that share one quantization scale, or in block_fp8 the side of a block. null "
        "means 16 for nvfp4, 128 for block_fp8, 64 for nf4.",
    )
    merge_lora_interval: AtLeastZero = Field(
        default=0,
        description="Merge the adapter into the base weights every so many optimizer steps (and quantize again under "
        "qlora). 0 means never.",
    )
    reset_optimizer_on_merge: bool = Field(
        default=False, description="Clear the optimizer state after each merge. Needs merge_lora_interval."
    )


class SeedFields(Section):
    """Seeding"""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=42, description="Seed of initialisation, data order and everything else that is random."
    )
