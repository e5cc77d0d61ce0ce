"""Operations on models and samplers, and their results, in the form that is sent and stored in the journal.

When one of them changes its fields or its meaning, raise PROTOCOL_VERSION in `messages` and JOURNAL_VERSION in
`orchestrator.journal`, which stores them on disk. If the only change is a new field whose default keeps the meaning of
older messages, raise PROTOCOL_VERSION alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from xorl.server.datum import Array, Datum
from xorl.server.identifiers import CheckpointKind, CheckpointRef


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages: immutable, tagged with the class name, and strict about unknown fields.

    Subclasses repeat `frozen` because type checkers need it.
    """


class LoraSpec(Message, frozen=True):
    """The adapter that a client requests. None means the service's setting; train_* select among the target modules."""

    rank: int | None = None
    alpha: float | None = None
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    target_modules: tuple[str, ...] | None = None


class CreateModel(Message, frozen=True):
    """Create a model over the base: the adapter `lora`, or the single full model if the service trains full weights.

    The API sends what the client requested; the orchestrator sets `lora` to None if the service trains full weights.
    With a `checkpoint`, the model starts from its weights, and with_optimizer also from its optimizer state and step
    count; `lora` None then means the adapter in the checkpoint.
    """

    model_id: str
    base_model: str | None = None
    lora: LoraSpec | None = None
    checkpoint: CheckpointRef | None = None
    with_optimizer: bool = False
    user_metadata: dict[str, str] = {}


class UnloadModel(Message, frozen=True):
    """Remove a model and free its memory; its checkpoints are kept."""

    model_id: str


class ForwardBackward(Message, frozen=True):
    """Accumulate the gradient of the SUM of a loss over the data; with forward_only, compute only the loss."""

    model_id: str
    data: list[Datum]
    loss_fn: str
    loss_params: dict[str, float | str | bool | None] = {}
    forward_only: bool = False


class OptimStep(Message, frozen=True):
    """Take one optimizer step with the accumulated gradient, then clear the gradient.

    The optimizer is AdamW, or for full weights the service's. Weight decay is decoupled. grad_clip_norm: the global
    norm to clip to; 0 disables clipping.
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
    """Save weights, optimizer state and step count, to continue training later.

    ttl_s: delete the checkpoint after this many seconds; None keeps it.
    """

    model_id: str
    name: str
    overwrite: bool = False
    user_metadata: dict[str, str] = {}
    ttl_s: float | None = None


class LoadWeights(Message, frozen=True):
    """Load a checkpoint of this or another model: its weights, and with `optimizer` also its optimizer state."""

    model_id: str
    checkpoint: CheckpointRef
    optimizer: bool


class SaveWeightsForSampler(Message, frozen=True):
    """Save a model's weights to sample from, in a checkpoint of this name.

    sampler_id: the sampling session that will use them, if the client requested one instead of a name. The API then
    sends name None, and the orchestrator names the checkpoint.
    """

    model_id: str
    name: str | None
    sampler_id: str | None = None
    user_metadata: dict[str, str] = {}
    ttl_s: float | None = None


class SaveFullWeights(Message, frozen=True):
    """Export a model for Hugging Face libraries (kind external_weights).

    is_merged: merge the adapter into the base; otherwise export only the adapter, as PEFT's two files in fp32. Ignored
    for full weights. dtype: the dtype of an exported whole model.
    """

    model_id: str
    name: str
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    is_merged: bool = True
    ttl_s: float | None = None


class BaseSampler(Message, frozen=True):
    """Sample from the base model."""


class SessionSampler(Message, frozen=True):
    """Sample from the weights of a sampling session. The orchestrator resolves it before it reaches the workers."""

    sampling_session_id: str


class NamedSampler(Message, frozen=True):
    """Sample from the newest sampler checkpoint of this name. The orchestrator resolves it, like SessionSampler."""

    name: str


class CheckpointSampler(Message, frozen=True):
    """Sample from a checkpoint of the kinds sampler_weights or weights."""

    checkpoint: CheckpointRef


SamplerRef = BaseSampler | SessionSampler | NamedSampler | CheckpointSampler


class JsonAnswer(Message, frozen=True):
    """A sample is JSON that the schema, itself JSON, allows. field: the request's name for it, for error messages."""

    schema: str
    field: str = "schema"


class CallTag(Message, frozen=True):
    """A tool call's text: `begin`, then JSON that `schema` allows, then `end`. field: as in JsonAnswer."""

    begin: str
    schema: str
    end: str
    field: str = "schema"


class ToolCalls(Message, frozen=True):
    """A sample has tool calls: `opening`, calls with `separator` between them, `closing`.

    trigger: the text that begins calls; any text may come before it, and the sample need not have any calls. None: the
    sample has nothing but calls. most: the maximum number of calls; None: any. instead: without a trigger, a sample may
    also be JSON that this schema allows, instead of calls, and `instead_field` is the request's name for the schema.
    """

    calls: tuple[CallTag, ...]
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str | None = None
    most: int | None = None
    instead: str | None = None
    instead_field: str = "schema"


AnswerForm = JsonAnswer | ToolCalls


class Sample(Message, frozen=True):
    """Continue a prompt num_samples times, and return log-probabilities. P: number of prompt tokens.

    prompt: int32 [P]. num_continued: how many of the prompt's last tokens are the beginning of the same sample, drawn
    with the same seed; it continues as if sampled in one call. max_tokens: None fills the context. top_k: None
    considers all tokens. seed: the seed of the first sample; sample i uses seed + i; None draws a seed. stop_ids:
    single tokens. ignore_end: do not stop at the model's end token. topk_*: the number of most likely tokens to return
    at each position. num_prompt_scored: prompt_logprobs and topk_prompt_logprobs cover this many of the prompt's last
    tokens; None: all. prompt_draws: the number of alternatives to draw for each token of the prompt except the first.
    target_prompt_tokens: int64 [P - 1, K], further tokens whose log-probabilities to return at positions 1, 2, ... of
    the prompt; -1 marks an empty cell. routed_experts: return the experts of each token. logit_bias, pairs of a token
    and its bias, and the penalties change the logits before a token is drawn, as in OpenAI's API. form: a constraint on
    each sample; None: any text. The log-probabilities are of the unchanged logits.
    """

    sampler: SamplerRef
    prompt: Array
    num_samples: int = 1
    num_continued: int = 0
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
    num_prompt_scored: int | None = None
    prompt_draws: int = 0
    target_prompt_tokens: Array | None = None
    routed_experts: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    form: AnswerForm | None = None


class Endpoint(Message, frozen=True):
    """An inference server: its address, its number of GPUs, and whether to send weights to it after each step."""

    host: str
    port: int
    world_size: int = 1
    sync_weights: bool = False


class BlockFp8(Message, frozen=True):
    """Linear layers in E4M3 with one scale for each 128 x 128 block, except the modules in `exclude`."""

    exclude: tuple[str, ...] = ()


class SyncWeights(Message, frozen=True):
    """Send a model's weights to inference endpoints.

    The orchestrator fills in `endpoints`, `weight_version` and `quantization` if they are None. Without quantization,
    weights are sent in the model's compute dtype. master_address, master_port: the rendezvous of the process group of
    senders and receivers; "" and 0 choose one.
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
    """The operation failed and changed nothing. status: the HTTP status, 4xx for the category `user`.

    model_given_up: the workers no longer hold the operation's model, for example because the operation failed after it
    had begun to change the model. The orchestrator restores it. code: the kind of the failure for OpenAI's clients.
    """

    category: Literal["user", "server"]
    status: int
    message: str
    model_given_up: bool = False
    code: str | None = None


class ModelCreated(Message, frozen=True):
    """Result of CreateModel. lora_rank is None for full weights. num_steps: optimizer steps in the loaded checkpoint.

    checkpoint_bytes: the approximate size of a checkpoint of the model, by kind.
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
    """Result of ForwardBackward: fields by name (logprobs, elementwise_loss), each with one array per datum, in order.

    Arrays are float32, with the shape of the datum's target_tokens. With the loss parameter return_routed_experts there
    is also routed_experts, int32 [T, layers, experts per token], 0 in layers without experts. metrics: named
    `name:reduction`, where reduction is sum, mean, min or max; always includes `loss:sum`.
    """

    loss_fn_output_type: str
    fields: dict[str, list[Array]]
    metrics: dict[str, float]


class OptimResult(Message, frozen=True):
    """Result of OptimStep: grad_norm, learning_rate, step, skipped and others, by name."""

    metrics: dict[str, float]


class GradientsAborted(Message, frozen=True):
    """Result of AbortGradients. step: the number of optimizer steps that the model has taken."""

    model_id: str
    step: int


class Saved(Message, frozen=True):
    """Result of the Save operations. sampler_id: the sampling session that uses the weights, if they have no name."""

    checkpoint: CheckpointRef
    sampler_id: str | None = None
    size_bytes: int = 0
    num_files: int = 0


class Loaded(Message, frozen=True):
    """Result of LoadWeights."""

    model_id: str
    checkpoint: CheckpointRef
    num_steps: int = 0


# The log-probability of an empty cell, if an inference engine returned fewer tokens.
NO_LOGPROB = -99999.0


class TopLogprobs(Message, frozen=True):
    """The K most likely tokens at each of N positions: token_ids int32 [N, K], logprobs float32 [N, K]."""

    token_ids: Array
    logprobs: Array


class SampledSequence(Message, frozen=True):
    """One sample: tokens int32 [N], logprobs float32 [N]. versions: of the weights at its first and last token.

    routed_experts: int16 [N, layers, experts per token], of the token before each of these; 0 in dense layers.
    """

    tokens: Array
    logprobs: Array
    stop_reason: Literal["stop", "length"]
    top_logprobs: TopLogprobs | None = None
    versions: tuple[int, int] = (0, 0)
    routed_experts: Array | None = None


class SampleResult(Message, frozen=True):
    """Result of Sample: sequences in the order of their seeds. P: number of prompt tokens.

    prompt_logprobs: float32 [P], NaN where nothing was scored. topk_prompt_logprobs: for the P - 1 tokens after the
    first. prompt_draws: alternatives drawn for these tokens, with their log-probabilities at temperature 1.
    target_prompt_logprobs: float32 [P - 1, K], NaN in empty cells. prompt_routed_experts: int16, of the prompt's first
    P - 1 tokens, as in the sequences.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: Array | None = None
    topk_prompt_logprobs: TopLogprobs | None = None
    prompt_draws: TopLogprobs | None = None
    target_prompt_logprobs: Array | None = None
    num_cached_tokens: int = 0
    prompt_routed_experts: Array | None = None


class EndpointSynced(Message, frozen=True):
    """The outcome of a sync for one endpoint. weights: those it holds now; with mixed weights it stays paused."""

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
