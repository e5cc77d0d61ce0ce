"""Operations that clients ask of models and samplers, and their results, as they are sent and kept in the journal.

Whoever changes one of them, or what it means, raises PROTOCOL_VERSION in `messages`, and JOURNAL_VERSION in
`orchestrator.journal`, which keeps them on disk. A new field whose default means what older messages meant needs only
the former.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from xorl.server.datum import Array, Datum
from xorl.server.identifiers import CheckpointKind, CheckpointRef


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of everything that is sent: immutable, tagged with its class's name, and strict about unknown fields.

    Subclasses repeat `frozen` since type checkers need it.
    """


class LoraSpec(Message, frozen=True):
    """The adapter that a client asks for. None takes the service's own setting; train_* choose among target modules."""

    rank: int | None = None
    alpha: float | None = None
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    target_modules: tuple[str, ...] | None = None


class CreateModel(Message, frozen=True):
    """Make a model over the base: an adapter as `lora` says, or the one full model if the service trains full weights.

    The API sends what the client asked for; the orchestrator replaces `lora` by None if the service trains full
    weights. With a `checkpoint` the model starts from it, with_optimizer also from its optimizer's state and step
    count, and a `lora` of None means the adapter in the checkpoint.
    """

    model_id: str
    base_model: str | None = None
    lora: LoraSpec | None = None
    checkpoint: CheckpointRef | None = None
    with_optimizer: bool = False
    user_metadata: dict[str, str] = {}


class UnloadModel(Message, frozen=True):
    """Remove a model and free what it holds; its checkpoints stay."""

    model_id: str


class ForwardBackward(Message, frozen=True):
    """Add the gradient of the SUM of a loss over the data; with forward_only, compute the loss alone."""

    model_id: str
    data: list[Datum]
    loss_fn: str
    loss_params: dict[str, float | str | bool | None] = {}
    forward_only: bool = False


class OptimStep(Message, frozen=True):
    """One step of AdamW, or of the service's optimizer of full weights, with the accumulated gradient, and clear it.

    Weight decay is decoupled. grad_clip_norm: the global norm to clip to; 0 does not clip.
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
    """Save weights, optimizer and step count, to continue training from. ttl_s: when to delete it; None: never."""

    model_id: str
    name: str
    overwrite: bool = False
    user_metadata: dict[str, str] = {}
    ttl_s: float | None = None


class LoadWeights(Message, frozen=True):
    """Load a checkpoint of this or another model: weights, and with `optimizer` also the optimizer's state."""

    model_id: str
    checkpoint: CheckpointRef
    optimizer: bool


class SaveWeightsForSampler(Message, frozen=True):
    """Keep a model's weights to sample from: in a checkpoint of this name, or in memory if name is None.

    sampler_id: the sampling session that will use them, if the client asked for one; required if name is None.
    """

    model_id: str
    name: str | None
    sampler_id: str | None = None
    user_metadata: dict[str, str] = {}
    ttl_s: float | None = None


class SaveFullWeights(Message, frozen=True):
    """Export a model for Hugging Face's libraries (kind external_weights).

    is_merged: merge an adapter into the base; otherwise export the adapter alone, as PEFT's two files in fp32. For full
    weights it makes no difference. dtype: of the weights of whole models.
    """

    model_id: str
    name: str
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    is_merged: bool = True
    ttl_s: float | None = None


class BaseSampler(Message, frozen=True):
    """Sample from the base model."""


class SessionSampler(Message, frozen=True):
    """Sample from the weights of a sampling session. The orchestrator replaces it before the workers see it."""

    sampling_session_id: str


class NamedSampler(Message, frozen=True):
    """Sample from the newest sampler checkpoint of that name. The orchestrator replaces it, too."""

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
    """Continue a prompt num_samples times, and return log-probabilities. P tokens of the prompt.

    prompt: int32 [P]. max_tokens: None fills the context. top_k: None considers all tokens. seed: of the first sample;
    sample i has seed + i; None draws one. stop_ids: single tokens. ignore_end: do not stop at the model's end token.
    topk_*: how many of the most likely tokens to return at each position.
    target_prompt_tokens: int64 [P - 1, K], further tokens whose log-probabilities to return at the positions 1, 2, ...
    of the prompt; -1 asks for none.
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
    """Linear layers in E4M3 with a scale for each block of 128 x 128, except for the modules in `exclude`."""

    exclude: tuple[str, ...] = ()


class SyncWeights(Message, frozen=True):
    """Send a model's weights to inference endpoints.

    The orchestrator fills in `endpoints`, `weight_version` and `quantization` if they are None. If no quantization is
    set, weights are sent in the dtype that the model computes in. master_address, master_port: where the process group
    of senders and receivers meets; "" and 0 choose.
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
    """Why there is no result; nothing was changed. status: the HTTP status, 4xx for the category `user`.

    model_given_up: the workers do not hold the operation's model, as where it failed once it had begun to change it.
    """

    category: Literal["user", "server"]
    status: int
    message: str
    model_given_up: bool = False


class ModelCreated(Message, frozen=True):
    """Result of CreateModel. lora_rank is None for full weights. num_steps: optimizer steps of the loaded checkpoint.

    checkpoint_bytes: about how large a checkpoint of the model will be, by kind.
    """

    model_id: str
    lora_rank: int | None
    lora_alpha: float | None = None
    num_steps: int = 0
    checkpoint_bytes: dict[CheckpointKind, int] = {}


class Unloaded(Message, frozen=True):
    """Result of UnloadModel."""

    model_id: str


class LossResult(Message, frozen=True):
    """Result of ForwardBackward: fields by name (logprobs, elementwise_loss), each one array per datum, in order.

    Arrays are float32, of the shape of the datum's target_tokens. metrics: named `name:reduction`, where reduction is
    sum, mean, min or max; `loss:sum` is always there.
    """

    loss_fn_output_type: str
    fields: dict[str, list[Array]]
    metrics: dict[str, float]


class OptimResult(Message, frozen=True):
    """Result of OptimStep: grad_norm, learning_rate, step, skipped and others, by name."""

    metrics: dict[str, float]


class GradientsAborted(Message, frozen=True):
    """Result of AbortGradients. step: how many optimizer steps the model has taken."""

    model_id: str
    step: int


class Saved(Message, frozen=True):
    """Result of the Save operations. checkpoint is None for weights kept in memory, which sampler_id names."""

    checkpoint: CheckpointRef | None
    sampler_id: str | None = None
    size_bytes: int = 0
    num_files: int = 0


class Loaded(Message, frozen=True):
    """Result of LoadWeights."""

    model_id: str
    checkpoint: CheckpointRef
    num_steps: int = 0


# The log-probability of a cell that has no token, where an inference engine told of fewer.
NO_LOGPROB = -99999.0


class TopLogprobs(Message, frozen=True):
    """The K most likely tokens at each of N positions: token_ids int32 [N, K], logprobs float32 [N, K]."""

    token_ids: Array
    logprobs: Array


class SampledSequence(Message, frozen=True):
    """One sample: tokens int32 [N], logprobs float32 [N], the versions of the weights at its first and last token."""

    tokens: Array
    logprobs: Array
    stop_reason: Literal["stop", "length"]
    top_logprobs: TopLogprobs | None = None
    versions: tuple[int, int] = (0, 0)


class SampleResult(Message, frozen=True):
    """Result of Sample: sequences in the order of their seeds. P tokens of the prompt.

    prompt_logprobs: float32 [P], NaN at the first. topk_prompt_logprobs: of the P - 1 positions after the first.
    target_prompt_logprobs: float32 [P - 1, K], NaN where none was asked for.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: Array | None = None
    topk_prompt_logprobs: TopLogprobs | None = None
    target_prompt_logprobs: Array | None = None
    num_cached_tokens: int = 0


class EndpointSynced(Message, frozen=True):
    """How a sync ended for one endpoint. weights: what it holds now; with mixed weights it stays paused."""

    host: str
    port: int
    success: bool
    weights: Literal["old", "new", "mixed"]
    message: str = ""


class SyncResult(Message, frozen=True):
    """Result of SyncWeights."""

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
