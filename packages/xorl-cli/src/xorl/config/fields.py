"""Groups of options shared by local training and the service, and the allowed values of their enumerations.

Each description is the option's documentation: its effect, its unit, and the meaning of null. This file only checks the
type and range of single values; conflicts.py checks combinations, and unsupported.py rejects values that are not
implemented.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

AttentionBackend = Literal[
    "auto", "eager", "sdpa", "native", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]
ExpertBackend = Literal["eager", "triton", "native", "quack"]
RecurrenceBackend = Literal["auto", "plain", "batched", "triton", "fla"]
ExpertDispatch = Literal["auto", "alltoall", "allgather", "deepep"]
EncoderKind = Literal["image", "video", "audio"]
DataParallelMode = Literal["none", "ddp", "fsdp2"]
PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B"]
ContextShardingMode = Literal["all", "ulysses_only", "ring_only", "none"]
OptimizerName = Literal["adamw", "anyprecision_adamw", "sgd", "muon"]
OptimizerDtype = Literal["fp32", "bf16"]
ParameterDtype = Literal["fp32", "bf16"]
MuonAdjustment = Literal["original", "match_rms_adamw"]
Collectives = Literal["auto", "copy_engine", "nccl"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
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
    """A group of options: unknown names are errors, values are never silently converted, instances are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class EncoderConfig(Section):
    """An encoder of another modality."""

    model_path: str | None = Field(
        default=None,
        description="Hub id or local folder of the encoder's weights: CLIP or SigLIP, alone or with its text model. "
        "null means random initialization, which requires config_path.",
    )
    config_path: str | None = Field(
        default=None, description="Hub id or local folder of the encoder's config.json; null means model_path."
    )


class ModelFields(Section):
    """Model"""

    model_path: str | None = Field(
        default=None,
        description="Hub id or local folder of the weights to start from. null means random initialization, which "
        "requires config_path.",
    )
    config_path: str | None = Field(
        default=None, description="Hub id, local folder or file of the model's config.json. null means model_path."
    )
    tokenizer_path: str | None = Field(
        default=None,
        description="Hub id or local folder of the tokenizer. null means config_path. Tokenized data does not need a "
        "tokenizer; if there is one, exported models include it.",
    )
    attn_implementation: AttentionBackend = Field(
        default="auto",
        description="Attention backend. auto picks the fastest one that can run here, for each kind of layer, and "
        "logs the choice. A backend named explicitly is used, or the run stops with an error. eager is plain torch; "
        "sdpa and native are torch's own fused kernels; flash_attention_2, 3 and 4 need their library and a GPU that "
        "it supports.",
    )
    recurrence_implementation: RecurrenceBackend = Field(
        default="auto",
        description="Kernels of layers with a recurrence: gated delta nets, state spaces and short convolutions. auto "
        "picks fla if it can run here, else triton or batched on GPUs and plain on CPUs, and logs the choice. A "
        "backend named explicitly is used, or the run stops with an error. plain is torch, which is correct "
        "everywhere and slow on GPUs; batched is also torch, but computes convolutions and state spaces of all "
        "documents at once; triton is batched with Triton kernels for state spaces; fla uses these and the library "
        "fla-core for all else, in bf16 on Hopper GPUs. All but plain are compared with it at the start of each run.",
    )
    moe_implementation: ExpertBackend | None = Field(
        default=None,
        description="Kernel for mixture-of-experts layers. null picks the fastest one that can run here, as "
        "measured on Hopper GPUs, and logs the choice. A kernel named explicitly is used, or the run stops with an "
        "error. eager is plain torch, one expert at a time; native uses torch's grouped matmul in bf16; triton gathers "
        "the tokens within its own grouped matmul, in bf16 and fp32; quack uses the library quack-kernels.",
    )
    ep_dispatch: ExpertDispatch = Field(
        default="auto",
        description="How tokens are sent to experts on other GPUs. alltoall sends each token to the ranks of its "
        "experts, and the host waits for their number in every layer; deepep does the same with the DeepEP library "
        "over NVLink. allgather sends all tokens to all ranks and adds up their results: it sends more, but sizes are "
        "known in advance, so that layers can be compiled. auto chooses allgather if at least half of all pairs of a "
        "token and a rank would be sent anyway, else alltoall, and logs the choice.",
    )
    deepep_buffer_size_gb: float = Field(
        default=2.0, gt=0, description="Size of the DeepEP NVLink buffer on each GPU, in GB. Only used by deepep."
    )
    deepep_num_sms: int = Field(
        default=20,
        ge=2,
        multiple_of=2,
        description="Number of streaming multiprocessors for the DeepEP kernels; must be even. Fewer leave more for "
        "the computation that they overlap with.",
    )
    deepep_async_combine: bool = Field(
        default=False, description="Overlap DeepEP's combine step with the computation of the next layer."
    )
    merge_qkv: bool = Field(
        default=True,
        description="Store the query, key and value projections as one matrix. Adapters on one of them and tensor "
        "parallelism work with either value. Loading and exporting convert between the two forms. The gate and up "
        "projections are always one matrix, and projections of latents, as in DeepSeek-V3, always several.",
    )
    basic_modules: list[str] = Field(
        default=[],
        description="Modules that FSDP2 shards as separate units in addition to the decoder layers: class names such "
        "as GatedMLP, or the last parts of module paths such as mlp.",
    )
    foundation: dict[str, JsonValue] = Field(
        default={},
        description="Entries that override the model's config.json, such as {rms_norm_eps: 1e-5}, both in training "
        "and in the exported model. An entry that the model does not read is an error.",
    )
    encoders: dict[EncoderKind, EncoderConfig] = Field(
        default={},
        description="Encoders to combine with a language model, by modality; each has a model_path and optionally a "
        "config_path. The image encoder gets a new projector of two layers, and the model is exported as one folder. "
        "Models that have their own image encoder need no entry.",
    )


class NumericsFields(Section):
    """Numerics"""

    lm_head_fp32: bool = Field(
        default=True,
        description="Keep the logits in fp32, in which they are accumulated. false rounds them to the compute dtype "
        "before the softmax (always fp32), as some inference engines do. Needs enable_mixed_precision.",
    )
    rmsnorm_native: bool = Field(
        default=False,
        description="Compute RMS norms and residual additions in plain torch, even under enable_compile, rounding "
        "after each operation. false uses the fused kernel, which does both in one pass, wherever it can run and is "
        "faster.",
    )
    activation_native: bool = Field(
        default=False,
        description="Compute silu(gate) * up in plain torch, even under enable_compile, rounding after each "
        "operation. false uses the fused kernel wherever it can run and is faster. Other activations always use plain "
        "torch.",
    )
    rope_native: bool = Field(
        default=False,
        description="Apply rotary position embeddings to queries and keys in plain torch. false uses the fused kernel "
        "wherever it can run and is faster; unless rmsnorm_native is true, that kernel also computes the norms of "
        "queries and keys.",
    )
    attention_cast_bf16: bool = Field(
        default=False,
        description="Round queries and keys to bf16 after the rotary embedding. Needs enable_mixed_precision: false; "
        "with mixed precision they are bf16 already.",
    )


class LossFields(Section):
    """Loss"""

    ce_mode: CrossEntropyMode = Field(
        default="compiled",
        description="How cross-entropy is computed. compiled: fused, from the hidden states, with the logits of one "
        "chunk of tokens at a time. eager: plain torch on the logits of all tokens at once, which takes several times "
        "4 bytes x tokens x vocabulary size of memory.",
    )


MODEL_PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "ulysses_parallel_size",
    "ringattn_parallel_size",
)


class ParallelFields(Section):
    """Parallelism"""

    data_parallel_mode: DataParallelMode = Field(
        default="fsdp2",
        description="How ranks share the data: none (a single process), ddp (each rank holds the whole model, except "
        "for experts that expert_parallel_size divides) or fsdp2 (parameters, gradients and optimizer state are "
        "sharded).",
    )
    data_parallel_shard_size: DegreeOrRest = Field(
        default=-1,
        description="Number of ranks that share one sharded copy of the model under fsdp2. -1 uses all ranks left "
        "over by data_parallel_replicate_size.",
    )
    data_parallel_replicate_size: DegreeOrRest = Field(
        default=-1,
        description="Number of copies of the sharded model (HSDP if above 1); the data-parallel size is this times "
        "data_parallel_shard_size. -1 uses all ranks left over by data_parallel_shard_size, which means 1 if that is "
        "-1 too, and all ranks under ddp.",
    )
    tensor_parallel_size: AtLeastOne = Field(
        default=1,
        description="Number of ranks that share each matrix of attention and feed-forward layers and the vocabulary. "
        "Between these layers, each rank has a part of the tokens (sequence parallelism). It must divide the number "
        "of heads and intermediate_size; if there are fewer key/value heads, several ranks hold each of these. "
        "Experts are not split further: these ranks count among those of expert_parallel_size.",
    )
    pipeline_parallel_size: AtLeastOne = Field(
        default=1,
        description="Number of pipeline stages. The layers are divided so that all stages take about the same time, "
        "the head included. The stages work on different micro-batches at the same time, so use several times as "
        "many gradient_accumulation_steps as there are stages. The start of a run says how long they wait for each "
        "other.",
    )
    pipeline_parallel_schedule: PipelineSchedule = Field(
        default="1F1B",
        description="Order of the passes of micro-batches in the pipeline. 1F1B: a backward pass after each forward "
        "pass, as soon as there is one to compute. GPipe: all forward passes first, which takes more memory. "
        "Interleaved1F1B: as 1F1B, but each rank has two stages of half the length, so that it waits half as long.",
    )
    pp_variable_seq_lengths: bool = Field(
        default=True,
        description="Each micro-batch in the pipeline keeps its own length. false pads all of them to "
        "micro_batch_size x sample_packing_sequence_len.",
    )
    expert_parallel_size: AtLeastOne = Field(
        default=1,
        description="Number of ranks that share the experts of a mixture of experts; tokens are sent to the ranks of "
        "their experts. It must divide the number of experts, and the number of ranks over which FSDP2 shards "
        "parameters; each expert is sharded over the quotient of these. Under ddp it must be the number of all ranks: "
        "the fastest layout for small micro-batches if everything but the experts fits on a GPU.",
    )
    ulysses_parallel_size: AtLeastOne = Field(
        default=1,
        description="Number of ranks that share each row of tokens, and exchange tokens for heads around attention "
        "(Ulysses context parallelism). It must divide the attention heads. Meant for rows that do not fit on one "
        "rank; shorter rows usually train faster without it.",
    )
    ringattn_parallel_size: AtLeastOne = Field(
        default=1,
        description="Number of ranks that share each row of tokens, and exchange keys and values (ring attention). "
        "Meant for the same rows as ulysses_parallel_size. If both are above 1, ulysses_parallel_size is the number "
        "of ranks that share each part of a ring.",
    )
    cp_fsdp_mode: ContextShardingMode = Field(
        default="all",
        description="Context-parallel axes over which FSDP2 also shards parameters: all, ulysses_only, ring_only or "
        "none.",
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free the gathered parameters of each unit after its forward pass and gather them again in the "
        "backward pass. true saves memory (ZeRO-3); false saves communication (ZeRO-2). null follows "
        "enable_full_shard; with pipeline_parallel_size above 1 it means false, and parameters are gathered once for "
        "all micro-batches of a step.",
    )
    ep_outside: bool = Field(
        default=False,
        description="Order of the ranks of expert parallelism. true: ranks over which FSDP2 shards the same experts "
        "are neighbours. false: ranks that divide the experts among them are.",
    )

    @property
    def model_parallel_sizes(self) -> dict[str, int]:
        """The sizes of the axes whose ranks compute the same rows together, by option.

        Times the data-parallel sizes, their product is the number of ranks. The ranks of expert_parallel_size are among
        these.
        """
        return {name: getattr(self, name) for name in MODEL_PARALLEL_SIZES}


class OptimizerFields(Section):
    """Optimizer"""

    optimizer: OptimizerName = Field(
        default="adamw",
        description="Update rule: adamw, sgd, anyprecision_adamw (AdamW that rounds bf16 states and parameters "
        "stochastically, so that they train as well as fp32 ones) or muon (orthogonalized updates for the layers' "
        "matrices, anyprecision_adamw for all other parameters).",
    )
    optimizer_dtype: OptimizerDtype = Field(
        default="bf16",
        description="Dtype of the optimizer states of anyprecision_adamw and muon. adamw and sgd use the dtype of the "
        "parameters.",
    )
    muon_lr: NonNegative = Field(
        default=0.02, description="Peak learning rate of matrices under muon. It follows the same schedule as lr."
    )
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Momentum of muon.")
    muon_nesterov: bool = Field(default=True, description="Use Nesterov momentum in muon.")
    muon_ns_steps: AtLeastOne = Field(default=5, description="Number of Newton-Schulz iterations per muon update.")
    muon_adjust_lr_fn: MuonAdjustment | None = Field(
        default=None,
        description="How muon scales the learning rate by the shape of a matrix: original (sqrt(max(1, "
        "rows/columns))) or match_rms_adamw (updates as large as AdamW's, so that its lr and weight_decay can be "
        "reused). null means original.",
    )


class MemoryFields(Section):
    """Memory and performance"""

    enable_mixed_precision: bool = Field(
        default=True,
        description="Compute in bf16, with parameters, reductions and accumulation in fp32. false computes in fp32.",
    )
    enable_gradient_checkpointing: bool = Field(
        default=True,
        description="Keep only the inputs of each layer and recompute its activations in the backward pass.",
    )
    enable_reentrant: bool = Field(
        default=False, description="Use torch's older, reentrant implementation of gradient checkpointing."
    )
    enable_full_shard: bool = Field(
        default=True,
        description="Under fsdp2, free gathered parameters between uses (ZeRO-3). false keeps them from the forward "
        "to the backward pass (ZeRO-2), which is faster if the memory suffices.",
    )
    enable_forward_prefetch: bool = Field(
        default=True,
        description="Under fsdp2, gather the parameters of the next unit during the forward pass of the current one.",
    )
    fsdp_collectives: Collectives = Field(
        default="auto",
        description="Under fsdp2, how GPUs gather parameters and reduce gradients: nccl, or copy_engine, which leaves "
        "the multiprocessors to the computation and needs GPUs of one host that can access each other. auto measures "
        "both at the first start and takes the faster one, also after a resume or restart; name one if separate runs "
        "must repeat each other to the bit.",
    )
    enable_activation_offload: bool = Field(
        default=False,
        description="Move the activations saved for the backward pass to pinned host memory until they are needed. "
        "With enable_gradient_checkpointing these are only the inputs of layers, which is little traffic; otherwise "
        "all saved activations. Needs a GPU.",
    )
    enable_compile: bool = Field(
        default=False,
        description="Compile each decoder layer with torch.compile, once for all identical layers and for packs of "
        "any length. The first step waits for the compilation; later runs reuse the result from ~/.cache/xorl (or "
        "XDG_CACHE_HOME). Needs a C++ compiler on a CPU, a C compiler with a GPU.",
    )
    init_device: InitDevice = Field(
        default="auto",
        description="Device on which parameters are created: meta (under fsdp2; each rank creates only its own "
        "shards), cuda or cpu. auto uses meta under fsdp2, otherwise the training device.",
    )
    load_weights_mode: LoadWeightsMode = Field(
        default="broadcast",
        description="How weights are read: broadcast (rank 0 reads and sends them) or all_ranks (each rank reads its "
        "share); auto and safetensors mean broadcast. dcp: model_path is an xorl checkpoint, saved with either "
        "ckpt_manager on any number of ranks, or a run's folder, of which the newest checkpoint is used. Only the "
        "weights are read, and the run starts at step 0. If config_path or tokenizer_path is null, the checkpoint "
        "determines it.",
    )


class CheckpointFields(Section):
    """Checkpointing"""

    ckpt_manager: CheckpointFormat = Field(
        default="dcp",
        description="Checkpoint format: dcp (each rank writes its shards) or torch (one file with gathered tensors).",
    )


class LoraFields(Section):
    """LoRA"""

    enable_lora: bool = Field(
        default=False,
        description="Train low-rank adapters on frozen base weights, which are kept in the compute dtype.",
    )
    lora_rank: AtLeastOne = Field(default=16, description="Rank of the adapters.")
    lora_alpha: float = Field(
        default=16.0, gt=0, description="Scale of the adapters: their output is multiplied by alpha/rank."
    )
    lora_target_modules: Literal["all-linear"] | list[str] | None = Field(
        default=None,
        description="Layers that get an adapter, by the last parts of their names in the checkpoint, such as q_proj "
        "or 0.self_attn.q_proj; embed_tokens and lm_head can be listed too. The names of an expert's layers, such as "
        "gate_proj, mean all experts. all-linear means every linear layer except the head and experts. null means the "
        "linear projections that the architecture defines as targets.",
    )
    enable_qlora: bool = Field(
        default=False,
        description="Quantize the linear layers and experts of the base model and train adapters on them (QLoRA). "
        "Implies enable_lora. Weights are quantized while they are read; checkpoints that are already quantized are "
        "used as they are. If it is false, these are dequantized.",
    )
    quant_format: QuantFormat = Field(
        default="nvfp4",
        description="Format of quantized base weights: nvfp4 (4-bit float), block_fp8 (8-bit float in blocks) or nf4 "
        "(4-bit normal float, as in bitsandbytes). On a GPU, nvfp4 and block_fp8 need compute capability 8.9 or "
        "higher.",
    )
    quant_group_size: AtLeastOne | None = Field(
        default=None,
        description="Number of weights in a row that share one quantization scale; for block_fp8, the side length of "
        "a block. null means 16 for nvfp4, 128 for block_fp8 and 64 for nf4. With tensor_parallel_size, each rank has "
        "whole groups of every matrix.",
    )
    merge_lora_interval: AtLeastZero = Field(
        default=0,
        description="Number of optimizer steps between merges of the adapter into the base weights, which "
        "enable_qlora then quantizes again. 0 means never.",
    )
    reset_optimizer_on_merge: bool = Field(
        default=False, description="Clear the optimizer state after each merge. Needs merge_lora_interval above 0."
    )
    moe_shared_lora: bool = Field(
        default=False,
        description="Share one adapter between the experts of a layer, for each projection that "
        "lora_target_modules names.",
    )
    moe_hybrid_shared_lora: bool = Field(
        default=False,
        description="Share A of the gate and up projections, and B of the down projections, between the experts of a "
        "layer.",
    )

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained over a frozen base, which enable_qlora implies."""
        return self.enable_lora or self.enable_qlora


class SeedFields(Section):
    """Seeding"""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=42, description="Seed for initialization, data order and all other randomness."
    )
