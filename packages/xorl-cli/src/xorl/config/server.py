"""The options of the service: flat, in groups that are shared with local training or specific to the service.

A default that depends on another option is null here; server_training.py fills it in, and also derives the local
configuration with which the workers build the same engine as `xorl train`.
"""

import re
from typing import Annotated, Literal

from pydantic import Field, Secret

from xorl.config.fields import (
    AtLeastOne,
    CheckpointFields,
    DegreeOrRest,
    LoadWeightsMode,
    LoraFields,
    LossFields,
    MemoryFields,
    ModelFields,
    NonNegative,
    NumericsFields,
    OptimizerFields,
    ParallelFields,
    Positive,
    Section,
    SeedFields,
)

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
SyncMethod = Literal["nccl_broadcast"]
GradNormalization = Literal["sum", "token_mean"]

# A client sends one learning rate, AdamW's; under muon, that of matrices is proportional to it. Their ratio is muon_lr
# over the default of train.lr, so that a client that uses this default gets the rates of local training.
MUON_REFERENCE_LR = 5e-5
Port = Annotated[int, Field(ge=1, le=65535)]
OneBlockOrMore = Annotated[int, Field(ge=16)]  # tokens of a block of the sampler's cache

TOKEN_PREFIX = "tml-"  # without it the tinker client refuses a key before it is sent
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[KMGTP]?B)")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


class InferenceEndpointConfig(Section):
    """Inference endpoint"""

    host: str = Field(min_length=1, description="Host name or address of the engine, SGLang or vLLM.")
    port: Port = Field(description="Port of its HTTP server.")
    world_size: AtLeastOne = Field(default=1, description="GPUs that it runs on, each a receiver of new weights.")
    sync_weights: bool = Field(
        default=True, description="Send it the weights after each optimizer step; false waits for a client's call."
    )
    master_address: str | None = Field(
        default=None,
        description="Address of this service by which the endpoint finds it for a transfer. null means that of the "
        "interface by which the endpoint is reached.",
    )
    master_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port there at which the transfer's process group meets. 0 means a free one.",
    )
    group_name: str = Field(default="weight_sync_group", min_length=1, description="Name of the transfer's group.")
    buffer_size_mb: AtLeastOne = Field(default=1024, description="Weights, in MB, that are gathered and sent at once.")


class ServerModelFields(ModelFields):
    """Model"""

    model_name: str | None = Field(
        default=None,
        description="Name of the base model, which clients give when they create a model; another name is refused. "
        "null means model_path, or config_path where there are no weights.",
    )


class ServerNumericsFields(NumericsFields):
    """Numerics"""

    router_fp32: bool = Field(
        default=True,
        description="Compute the logits of mixture-of-experts routers in fp32. A dense model has none.",
    )


class ServerParallelFields(ParallelFields):
    """Parallelism"""

    data_parallel_shard_size: DegreeOrRest = Field(
        default=1,
        description="Workers that share one sharded copy of the model under fsdp2. -1 takes all GPUs that "
        "data_parallel_replicate_size leaves. The service starts as many workers as the product of the parallel sizes.",
    )
    data_parallel_replicate_size: DegreeOrRest = Field(
        default=1,
        description="Copies of the sharded model (HSDP when above 1); shard size times this is the data-parallel "
        "size. -1 takes all GPUs that data_parallel_shard_size leaves; under ddp it is the number of workers.",
    )


class ServerMemoryFields(MemoryFields):
    """Memory and performance"""

    enable_forward_prefetch: bool = Field(
        default=False, description="Under fsdp2, gather the next unit's parameters while one computes its forward pass."
    )
    load_weights_mode: LoadWeightsMode = Field(
        default="auto",
        description="Where weights are read from, and by whom: safetensors (the Hugging Face files of model_path; rank "
        "0 reads and sends, as under broadcast; all_ranks lets each rank read its share), dcp (the checkpoint of "
        "load_checkpoint_path) or auto (that checkpoint where one is given, else safetensors).",
    )


class ServerOptimizerFields(OptimizerFields):
    """Optimizer"""

    muon_lr: NonNegative = Field(
        default=0.02,
        description="Learning rate of matrices under muon at a step for which the client gives "
        f"{MUON_REFERENCE_LR:g}; it is proportional to the client's rate. So {MUON_REFERENCE_LR:g} gives matrices the "
        "client's own rate.",
    )
    grad_normalization: GradNormalization = Field(
        default="sum",
        description="What an optimizer step divides the gradient by. sum: by nothing, as both clients expect. "
        "token_mean: by the number of trained tokens since the last step.",
    )


class ServerCheckpointFields(CheckpointFields):
    """Checkpointing"""

    output_dir: str = Field(
        default="outputs",
        min_length=1,
        description="Folder of everything that is saved, and of files through which the service's processes find each "
        "other. All nodes must see the same folder. What it contains already is kept and listed.",
    )
    load_checkpoint_path: str | None = Field(
        default="",
        description="Checkpoint folder whose weights the base model starts from in place of those of model_path. null "
        "or empty means none.",
    )
    storage_limit: str = Field(
        default="10TB",
        pattern=rf"^{SIZE.pattern}$",
        description="Most that output_dir may hold, such as 500MB or 10GB (powers of 1000); a save that would go "
        "beyond it is refused before anything is written.",
    )
    idle_session_timeout: Positive = Field(
        default=7200.0,
        description="Seconds without a call after which a training session is saved and its model released.",
    )
    skip_initial_checkpoint: bool = Field(
        default=False, description="Do not save what a model starts from as its checkpoint 000000."
    )


class ServerDataFields(Section):
    """Data processing"""

    sample_packing_sequence_len: AtLeastOne = Field(
        default=32000,
        description="Most tokens in a packed row, and in one datum: a longer one is refused.",
    )
    enable_packing: bool = Field(
        default=True,
        description="Pack the datums of a call into rows. false computes each in a pass of its own; losses are the "
        "same.",
    )


class SamplerFields(Section):
    """Sampling and inference"""

    sampler_cache_tokens: OneBlockOrMore | None = Field(
        default=None,
        description="Tokens whose keys and values each worker's sampler keeps at once, in whole blocks of 16. null "
        "means as many as fit a tenth of its memory.",
    )
    inference_endpoints: list[InferenceEndpointConfig] = Field(
        default=[],
        description="Inference engines that run beside the service: they take over sampling and are sent new weights. "
        "Clients can add more.",
    )
    sync_inference_method: SyncMethod = Field(
        default="nccl_broadcast",
        description="How inference engines are sent new weights: nccl_broadcast (SGLang's "
        "update_weights_from_distributed).",
    )


class ObservationFields(Section):
    """Logging and debugging"""

    log_level: LogLevel = Field(default="INFO", description="Least severe lines that are logged, by every process.")
    enable_self_test: bool = Field(
        default=False,
        description="Run a forward and backward pass on made-up tokens once the model is built, and stop with an error "
        "where the loss or a gradient is not finite.",
    )
    log_gradient_norms: bool = Field(
        default=True,
        description="Report the gradient norm of each kind of layer beside the other metrics of an optimizer step.",
    )
    log_router_stats: bool = Field(
        default=True,
        description="Report how routers spread tokens over experts. A dense model has no routers.",
    )


class ApiFields(Section):
    """API"""

    # Secret values are never shown: not in errors, not by `config show`, not in the repr of a configuration.
    api_token: Secret[Annotated[str, Field(pattern=rf"^{TOKEN_PREFIX}\S{{12,}}$")]] | None = Field(
        default=None,
        description=f"Key that clients must send: {TOKEN_PREFIX} and at least 12 more characters; ${{NAME}} takes it "
        "from the environment. null means no key on a loopback address; on any other address one is generated and kept "
        "in output_dir.",
    )
    max_request_mb: float = Field(
        default=256.0, gt=0, le=480, description="Largest request body, in MB after decompression; larger ones get 413."
    )
    max_sessions: AtLeastOne = Field(
        default=1024,
        description="Sessions that may be open at once; another one gets 429. A model that was created without one "
        "counts as one.",
    )
    max_queued_requests: AtLeastOne = Field(
        default=20000, description="Requests that may wait to be computed, of all clients; another one gets 429."
    )
    result_retention: Positive = Field(
        default=3600.0,
        description="Seconds that a result is kept after a client has had it, so that a retried call finds it.",
    )


class WorkerFields(Section):
    """Worker connection"""

    worker_bind_host: str = Field(
        default="0.0.0.0",
        min_length=1,
        description="Address at which the first worker listens if the workers are on several hosts, with keys that are "
        "made for it. On one host, ipc sockets are used instead.",
    )
    worker_bind_port: Port = Field(default=5556, description="Port there.")
    worker_bind_address: str = Field(
        default="auto",
        pattern=r"^(auto|tcp://[^:/\s]+:\d{1,5})$",
        description="Whole address that the first worker listens on, tcp://host:port, on one host too. auto means ipc "
        "on one host, worker_bind_host and worker_bind_port on several.",
    )
    engine_connect_host: str | None = Field(
        default=None,
        description="Host by which the first worker is reached. null means this one, or with workers on several hosts "
        "the one that the first worker writes into output_dir.",
    )
    worker_connection_timeout: Positive = Field(
        default=120.0, description="Seconds to wait for the workers to come up and be reached before giving up."
    )
    worker_max_retries: Annotated[int, Field(ge=0)] = Field(
        default=3,
        description="How often a request is computed again after the workers died while computing it, before it fails. "
        "The workers are started again each time.",
    )


class ServerLoraFields(LoraFields):
    """LoRA"""

    lora_rank: AtLeastOne = Field(default=32, description="Rank of adapters whose client gives none.")
    lora_alpha: float = Field(
        default=16.0,
        gt=0,
        description="Alpha of adapters whose client gives none: adapters are multiplied by alpha over their own rank.",
    )
    lora_target_modules: Literal["all-linear"] | list[str] | None = Field(
        default=None,
        description="Layers that adapters can be on, by the last parts of their names in the checkpoint, such as "
        "q_proj or 0.self_attn.q_proj; a client chooses among them. all-linear means every linear layer but the head. "
        "null means the linear projections that the architecture names, and the head unless it is the embedding.",
    )
    max_lora_rank: AtLeastOne | None = Field(
        default=None, description="Largest rank that a client may ask for. null means lora_rank."
    )
    lora_models_on_device: AtLeastOne = Field(
        default=16,
        description="Adapters that are kept on the device, each with its optimizer; further ones wait in host memory "
        "between their calls.",
    )
    qlora_exclude_modules: list[str] | None = Field(
        default=None,
        description="Modules that are not quantized, by the last parts of their names in the checkpoint, or patterns "
        "with * for whole names. null means those that the checkpoint's config names. Embeddings, the head and norms "
        "are never quantized.",
    )
    moe_shared_lora: bool = Field(default=False, description="Share one adapter between the experts of a layer.")
    moe_hybrid_shared_lora: bool = Field(
        default=False,
        description="Share A of gate and up projections, and B of down projections, between the experts of a layer.",
    )


class RouterFields(Section):
    """Mixture of experts"""

    freeze_router: bool = Field(
        default=True, description="Do not train the routers of a mixture-of-experts model. A dense model has none."
    )


# pydantic collects the fields of the last base first.
class ServerConfig(
    SeedFields,
    WorkerFields,
    ApiFields,
    ObservationFields,
    SamplerFields,
    ServerDataFields,
    ServerCheckpointFields,
    RouterFields,
    ServerLoraFields,
    ServerOptimizerFields,
    LossFields,
    ServerMemoryFields,
    ServerParallelFields,
    ServerNumericsFields,
    ServerModelFields,
):
    """Service"""

    @property
    def storage_limit_bytes(self) -> int:
        """`storage_limit` in bytes."""
        found = SIZE.fullmatch(self.storage_limit)
        assert found is not None, "checked by the type"
        return int(float(found["number"]) * UNITS[found["unit"]])


def num_workers(config: ServerConfig, num_gpus: int) -> int:
    """The number of workers that the parallel sizes need; a data-parallel size of -1 takes the rest of `num_gpus`, or
    1.

    Raises ValueError if a size of -1 leaves GPUs unused.
    """
    sizes = {
        "data_parallel_shard_size": config.data_parallel_shard_size,
        "data_parallel_replicate_size": config.data_parallel_replicate_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "ulysses_parallel_size": config.ulysses_parallel_size,
        "ringattn_parallel_size": config.ringattn_parallel_size,
    }
    if config.data_parallel_mode != "fsdp2":
        sizes["data_parallel_shard_size"] = 1
    if config.data_parallel_mode == "none":
        sizes["data_parallel_replicate_size"] = 1
    fixed = 1
    for size in sizes.values():
        fixed *= max(size, 1)
    if -1 not in sizes.values():
        return fixed
    if num_gpus % fixed:
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"a data-parallel size of -1 takes all {num_gpus} GPUs, which {shown} does not divide")
    return max(num_gpus, fixed)
