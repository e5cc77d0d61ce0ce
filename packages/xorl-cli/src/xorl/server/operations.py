"""What clients ask of models and samplers, and what comes of it: operations and results, as they travel and are kept.

PROTOCOL_VERSION of `messages` changes whenever one of these, or what it means, does; and so does JOURNAL_VERSION of
`orchestrator.journal`, where they wait until nobody needs them, but for a new field whose default is what older ones
meant.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from xorl.server.arrays import Array, Datum
from xorl.server.names import CheckpointKind, CheckpointRef


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of everything that is sent: immutable, told apart by its class's name, without unknown fields.

    Subclasses repeat `frozen`, which type checkers want.
    """


class LoraSpec(Message, frozen=True):
    """The adapter that a client asks for; None is the service's own setting. train_* choose among target modules."""

    rank: int | None = None
    alpha: float | None = None
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    target_modules: tuple[str, ...] | None = None


class CreateModel(Message, frozen=True):
    """Make a model over the base: an adapter by `lora`, or the one full model where the service trains no adapters.

    The API sends what the client asked for; the orchestrator sends None for `lora` where the service trains full
    weights. With `checkpoint` it begins there, and with_optimizer takes the optimizer's state and step count along;
    `lora` None then means the checkpoint's own.
    """

    model_id: str
    base_model: str | None = None
    lora: LoraSpec | None = None
    checkpoint: CheckpointRef | None = None
    with_optimizer: bool = False
    user_metadata: dict[str, str] = {}


class UnloadModel(Message, frozen=True):
    """Forget a model and free what it holds; checkpoints stay."""

    model_id: str


class ForwardBackward(Message, frozen=True):
    """Add the gradient of the SUM of a loss over the data, or with forward_only, only compute the loss."""

    model_id: str
    data: list[Datum]
    loss_fn: str
    loss_params: dict[str, float | str | bool | None] = {}
    forward_only: bool = False


class OptimStep(Message, frozen=True):
    """One step of AdamW, or of the optimizer of full weights, on the accumulated gradient, which is then zero.

    Weight decay is decoupled. grad_clip_norm: the global norm to clip at; 0 is no clipping.
    """

    model_id: str
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class AbortGradients(Message, frozen=True):
    """Drop the accumulated gradient."""

    model_id: str


class SaveWeights(Message, frozen=True):
    """Save what training goes on from: weights, optimizer, step count. ttl_s: delete it after so long; None, never."""

    model_id: str
    name: str
    overwrite: bool = False
    user_metadata: dict[str, str] = {}
    ttl_s: float | None = None


class LoadWeights(Message, frozen=True):
    """Put a model where a checkpoint, its own or another's, was; with `optimizer`, its optimizer too."""

    model_id: str
    checkpoint: CheckpointRef
    optimizer: bool


class SaveWeightsForSampler(Message, frozen=True):
    """Keep a model's weights to sample from: in a checkpoint of this name, or in memory where name is None.

    sampler_id: the sampling session that samples from them, where the client asked for one; always with name None.
    """

    model_id: str
    name: str | None
    sampler_id: str | None = None
    user_metadata: dict[str, str] = {}
    ttl_s: float | None = None


class SaveFullWeights(Message, frozen=True):
    """Export a model as Hugging Face's libraries read it (kind external_weights).

    is_merged: an adapter folded into the base; otherwise the adapter alone, PEFT's two files in fp32. Full weights are
    the same either way. dtype: of whole models.
    """

    model_id: str
    name: str
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    is_merged: bool = True
    ttl_s: float | None = None


class BaseSampler(Message, frozen=True):
    """Sample from the base model."""


class SessionSampler(Message, frozen=True):
    """Sample from what a sampling session is of; the orchestrator says what that is before workers see it."""

    sampling_session_id: str


class NamedSampler(Message, frozen=True):
    """Sample from the newest sampler checkpoint of that name; the orchestrator finds it before workers see it."""

    name: str


class SnapshotSampler(Message, frozen=True):
    """Sample from weights that SaveWeightsForSampler kept in memory for sampler_id."""

    model_id: str
    sampler_id: str


class CheckpointSampler(Message, frozen=True):
    """Sample from a checkpoint of the kinds sampler_weights or weights."""

    checkpoint: CheckpointRef


SamplerRef = BaseSampler | SessionSampler | NamedSampler | SnapshotSampler | CheckpointSampler


class Sample(Message, frozen=True):
    """Continue a prompt num_samples times, and say how likely its tokens are. P tokens of the prompt.

    prompt: int32 [P]. max_tokens: None is as many as the context has room for. top_k: None is all. seed: of the first
    sample, sample i has seed + i; None is a random one. stop_ids: single tokens. ignore_end: go on after the model's
    end token, which otherwise stops, whatever else does. topk_*: how many of the most likely tokens to return at each
    place.
    target_prompt_tokens: int64 [P - 1, K], tokens asked about at the places 1, 2, ...; -1 asks nothing.
    """

    sampler: SamplerRef
    prompt: Array
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_tokens: Array | None = None


class Endpoint(Message, frozen=True):
    """An inference endpoint: where it is, on how many GPUs, and whether weights are sent to it."""

    host: str
    port: int
    world_size: int = 1
    sync_weights: bool = False


class BlockFp8(Message, frozen=True):
    """Linear layers in E4M3 with a scale for each block of 128 x 128, but for modules that `exclude` names."""

    exclude: tuple[str, ...] = ()


class SyncWeights(Message, frozen=True):
    """Send a model's weights to endpoints. The orchestrator fills in what it knows where that is None: `endpoints`,
    `weight_version`, and `quantization`, without which weights are sent as the model computes with them.

    master_address, master_port: where the group of senders and receivers meets; "" and 0 choose.
    """

    model_id: str
    endpoints: tuple[Endpoint, ...] | None = None
    master_address: str = ""
    master_port: int = 0
    group_name: str = "weight_sync_group"
    buffer_size_mb: int = 1024
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    flush_cache: bool = True
    weight_version: str | None = None
    quantization: BlockFp8 | None = None


ModelOperation = (
    CreateModel
    | UnloadModel
    | ForwardBackward
    | OptimStep
    | AbortGradients
    | SaveWeights
    | LoadWeights
    | SaveWeightsForSampler
    | SaveFullWeights
    | SyncWeights
)
ClientOperation = ModelOperation | Sample


class Failure(Message, frozen=True):
    """Why there is no result. status: the HTTP status that says it, 4xx for `user`. Nothing was changed."""

    category: Literal["user", "server"]
    status: int
    message: str


class ModelCreated(Message, frozen=True):
    """Of CreateModel. lora_rank None: full weights. num_steps: optimizer steps taken, of a checkpoint.

    checkpoint_bytes: about what a checkpoint of it takes, by kind.
    """

    model_id: str
    lora_rank: int | None
    lora_alpha: float | None = None
    num_steps: int = 0
    checkpoint_bytes: dict[CheckpointKind, int] = {}


class Unloaded(Message, frozen=True):
    """Of UnloadModel."""

    model_id: str


class LossResult(Message, frozen=True):
    """Of ForwardBackward: fields by name (logprobs; elementwise_loss), each with one array per datum in their order.

    Arrays are float32 of the shape of the datum's target_tokens. metrics: named `name:reduction`, reduction one of
    sum, mean, min, max; `loss:sum` is always there.
    """

    loss_fn_output_type: str
    fields: dict[str, list[Array]]
    metrics: dict[str, float]


class OptimResult(Message, frozen=True):
    """Of OptimStep; free names: grad_norm, learning_rate, step, skipped ..."""

    metrics: dict[str, float]


class GradientsAborted(Message, frozen=True):
    """Of AbortGradients. step: optimizer steps the model has taken."""

    model_id: str
    step: int


class Saved(Message, frozen=True):
    """Of the Save operations. checkpoint: None for what is in memory, then sampler_id names it."""

    checkpoint: CheckpointRef | None
    sampler_id: str | None = None
    size_bytes: int = 0
    num_files: int = 0


class Loaded(Message, frozen=True):
    """Of LoadWeights."""

    model_id: str
    checkpoint: CheckpointRef
    num_steps: int = 0


class TopLogprobs(Message, frozen=True):
    """The K most likely tokens at each of N places: token_ids int32 [N, K], logprobs float32 [N, K]."""

    token_ids: Array
    logprobs: Array


class SampledSequence(Message, frozen=True):
    """One continuation: tokens int32 [N], logprobs float32 [N], versions of the weights at its first and last token."""

    tokens: Array
    logprobs: Array
    stop_reason: Literal["stop", "length"]
    top_logprobs: TopLogprobs | None = None
    versions: tuple[int, int] = (0, 0)


class SampleResult(Message, frozen=True):
    """Of Sample, sequences in the order of their seeds. P tokens of the prompt.

    prompt_logprobs: float32 [P], NaN at the first. topk_prompt_logprobs: of the P - 1 places after the first.
    target_prompt_logprobs: float32 [P - 1, K], NaN where nothing was asked.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: Array | None = None
    topk_prompt_logprobs: TopLogprobs | None = None
    target_prompt_logprobs: Array | None = None
    num_cached_tokens: int = 0


class EndpointSynced(Message, frozen=True):
    """What became of one endpoint in a sync. weights: what it holds now; with mixed ones it stays paused."""

    host: str
    port: int
    success: bool
    weights: Literal["old", "new", "mixed"]
    message: str = ""


class SyncResult(Message, frozen=True):
    """Of SyncWeights."""

    success: bool
    message: str
    endpoints: list[EndpointSynced]
    weight_version: str | None = None
    transfer_time_s: float = 0.0
    total_bytes: int = 0
    num_parameters: int = 0
    num_buckets: int = 0
    timing_s: dict[str, float] = {}


ClientResult = (
    ModelCreated
    | Unloaded
    | LossResult
    | OptimResult
    | GradientsAborted
    | Saved
    | Loaded
    | SampleResult
    | SyncResult
    | Failure
)
