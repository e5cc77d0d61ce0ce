"""The options of the service: one flat list, in groups shared with local training or specific to the service.

A default that depends on another option is null here; server_training.py fills it in. It also derives the local
configuration from which the workers build the same engine as `xorl train`.
"""

import math
import re
from typing import Annotated, Literal

from pydantic import Field, Secret

from xorl.config.fields import (
    AtLeastOne,
    CheckpointFields,
    DegreeOrRest,
    LoadWeightsMode,
    LogLevel,
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

SyncMethod = Literal["nccl_broadcast"]
GradNormalization = Literal["sum", "token_mean"]

# A client sends a single learning rate, AdamW's; under muon, the rate of matrices is proportional to it. The ratio is
# muon_lr over the default of train.lr, so a client that uses this default gets the same rates as local training.
MUON_REFERENCE_LR = 5e-5
Port = Annotated[int, Field(ge=1, le=65535)]
OneBlockOrMore = Annotated[int, Field(ge=16)]  # a block of the sampler's cache is 16 tokens

TOKEN_PREFIX = "tml-"  # the tinker client rejects keys without it before sending them
# A host name needs a letter: an incomplete address such as 10.0 is not a name.
HOST_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[KMGTP]?B)")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


class InferenceEndpointConfig(Section):
    """Inference endpoint"""

    host: str = Field(min_length=1, description="Host name or address of the inference engine (SGLang or vLLM).")
    port: Port = Field(description="Port of the engine's HTTP server.")
    world_size: AtLeastOne = Field(
        default=1, description="Number of GPUs that the engine runs on; each receives new weights."
    )
    sync_weights: bool = Field(
        default=True,
        description="Send the engine new weights after each optimizer step. false sends them only when a client "
        "requests it.",
    )
    master_address: str | None = Field(
        default=None,
        description="Address at which the engine reaches this service for a weight transfer. null means the address "
        "of the network interface that leads to the engine.",
    )
    master_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port at master_address where the process group of the transfer meets. 0 means a free one.",
    )
    group_name: str = Field(
        default="weight_sync_group", min_length=1, description="Name of the process group of the transfer."
    )
    buffer_size_mb: AtLeastOne = Field(
        default=1024, description="Weights, in MB, that are gathered and sent at a time."
    )


class ServerModelFields(ModelFields):
    """Model"""

    model_name: str | None = Field(
        default=None,
        description="Name of the base model. Clients give it when they create a model; other names are refused. null "
        "means model_path, or config_path if there are no weights.",
    )


class ServerNumericsFields(NumericsFields):
    """Numerics"""

    router_fp32: bool = Field(
        default=True,
        description="Compute the logits of mixture-of-experts routers in fp32. false multiplies in the compute dtype, "
        "as transformers does in some families.",
    )


class ServerParallelFields(ParallelFields):
    """Parallelism"""

    data_parallel_shard_size: DegreeOrRest = Field(
        default=1,
        description="Number of workers that share one sharded copy of the model under fsdp2. -1 uses all GPUs left "
        "over by data_parallel_replicate_size. The service starts as many workers as the product of the parallel "
        "sizes.",
    )
    data_parallel_replicate_size: DegreeOrRest = Field(
        default=1,
        description="Number of copies of the sharded model (HSDP if above 1); the data-parallel size is this times "
        "data_parallel_shard_size. -1 uses all GPUs left over by data_parallel_shard_size. Under ddp it is the number "
        "of workers.",
    )


class ServerMemoryFields(MemoryFields):
    """Memory and performance"""

    enable_forward_prefetch: bool = Field(
        default=False,
        description="Under fsdp2, gather the parameters of the next unit during the forward pass of the current one.",
    )
    load_weights_mode: LoadWeightsMode = Field(
        default="auto",
        description="Where weights are read from, and by which workers. safetensors or broadcast: rank 0 reads the "
        "Hugging Face files of model_path and sends them. all_ranks: each rank reads its share of these files. dcp: "
        "the checkpoint of load_checkpoint_path. auto: that checkpoint if one is given, otherwise safetensors.",
    )


class ServerOptimizerFields(OptimizerFields):
    """Optimizer"""

    muon_lr: NonNegative = Field(
        default=0.02,
        description=f"Learning rate of matrices under muon in a step for which the client sends {MUON_REFERENCE_LR:g}; "
        "it is proportional to the client's rate. With muon_lr at the same value, matrices get the client's rate.",
    )
    grad_normalization: GradNormalization = Field(
        default="sum",
        description="What an optimizer step divides the gradient by. sum: nothing, as the tinker client and "
        "xorl-client expect. token_mean: the number of tokens trained on since the last step.",
    )


class ServerCheckpointFields(CheckpointFields):
    """Checkpointing"""

    output_dir: str = Field(
        default="outputs",
        min_length=1,
        description="Folder for everything that is saved, and for the files through which the service's processes "
        "find each other. All nodes must see the same folder. Existing contents are kept and listed.",
    )
    load_checkpoint_path: str | None = Field(
        default="",
        description="Checkpoint folder from which the base model's weights are loaded instead of model_path. null or "
        "empty means none.",
    )
    storage_limit: str = Field(
        default="10TB",
        pattern=rf"^{SIZE.pattern}$",
        description="Maximum size of output_dir, such as 500MB or 10GB (powers of 1000). A save that would exceed it "
        "is refused before anything is written.",
    )
    idle_session_timeout: Positive = Field(
        default=7200.0,
        description="Seconds without a call after which a training session is saved and its model unloaded.",
    )
    finished_session_retention: NonNegative = Field(
        default=86400.0,
        description="Seconds for which a model can still be called after its session was finished. Then it ends, and "
        "its hidden recovery checkpoint and its initial checkpoint 000000 are deleted; earlier if a save needs the "
        "storage.",
    )
    save_async: bool = Field(
        default=False,
        description="Write checkpoints in the background while the workers run calls of other models. The call that "
        "saves still ends once the checkpoint is complete. A save that replaces a checkpoint is not affected.",
    )
    skip_initial_checkpoint: bool = Field(
        default=False, description="Do not save the initial state of a model as its checkpoint 000000."
    )


class ServerDataFields(Section):
    """Data processing"""

    sample_packing_sequence_len: AtLeastOne = Field(
        default=32000,
        description="Maximum number of tokens in a packed row, and in one datum; a longer datum is refused.",
    )
    enable_packing: bool = Field(
        default=True,
        description="Pack the datums of a call into rows. false runs each datum in a separate pass; the losses are "
        "the same.",
    )


class SamplerFields(Section):
    """Sampling and inference"""

    sampler_cache_tokens: OneBlockOrMore | None = Field(
        default=None,
        description="Number of tokens whose keys and values each worker's sampler caches, in whole blocks of 16. null "
        "means as many as fit into a tenth of its memory.",
    )
    inference_endpoints: list[InferenceEndpointConfig] = Field(
        default=[],
        description="Inference engines that run beside the service; they take over sampling and receive new weights. "
        "Clients can add more.",
    )
    allowed_inference_hosts: list[str] | None = Field(
        default=None,
        description="Hosts at which clients may register inference engines: names, addresses, or networks such as "
        "10.0.0.0/8. null means loopback and private addresses; an empty list allows only the engines of "
        "inference_endpoints. Link-local addresses, where clouds keep credentials, are never allowed.",
    )
    sync_inference_method: SyncMethod = Field(
        default="nccl_broadcast",
        description="How new weights are sent to inference engines: nccl_broadcast (SGLang's "
        "update_weights_from_distributed).",
    )


class ObservationFields(Section):
    """Logging and debugging"""

    log_level: LogLevel = Field(default="INFO", description="Minimum level of logged lines, in every process.")
    enable_self_test: bool = Field(
        default=False,
        description="Run a forward and backward pass on synthetic tokens after the model is built, and stop with an "
        "error if the loss or a gradient is not finite.",
    )
    log_gradient_norms: bool = Field(
        default=True,
        description="Report the gradient norm of each kind of layer with the other metrics of an optimizer step.",
    )
    log_router_stats: bool = Field(
        default=True,
        description="Report how the routers of a mixture of experts distributed the tokens since the last optimizer "
        "step, with the other metrics of the step.",
    )


class ApiFields(Section):
    """API"""

    # Secret values are never shown: not in errors, in `config show` or in the repr of a configuration.
    api_token: Secret[Annotated[str, Field(pattern=rf"^{TOKEN_PREFIX}\S{{12,}}$")]] | None = Field(
        default=None,
        description=f"Key that clients must send: {TOKEN_PREFIX} followed by at least 12 characters. ${{NAME}} reads "
        "it from the environment. null means no key on a loopback address; on any other address a key is generated and "
        "stored in output_dir.",
    )
    max_request_mb: float = Field(
        default=256.0,
        gt=0,
        le=480,
        description="Maximum size of a request body, in MB after decompression; larger ones get status 413.",
    )
    max_sessions: AtLeastOne = Field(
        default=1024,
        description="Maximum number of open sessions; further ones get status 429. A model created without a session "
        "counts as one.",
    )
    max_queued_requests: AtLeastOne = Field(
        default=20000,
        description="Maximum number of requests waiting to be computed, over all clients; further ones get status 429.",
    )
    max_queued_mb: Positive = Field(
        default=8000.0,
        description="Maximum size of the bodies of all requests waiting to be computed, in MB; further requests get "
        "status 429.",
    )
    max_client_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="The share of max_queued_requests and of max_queued_mb that the waiting requests of one client (a "
        "session or, without one, a model) may take, so that there is room for others; further ones get status 429.",
    )
    result_retention: Positive = Field(
        default=3600.0,
        description="Seconds that a result is kept after a client has received it, so that a retried call finds it.",
    )


class WorkerFields(Section):
    """Worker connection"""

    worker_bind_host: str = Field(
        default="0.0.0.0",
        min_length=1,
        description="Address at which the first worker listens if the workers are on several hosts; the connection is "
        "secured with generated keys. On one host, ipc sockets are used instead.",
    )
    worker_bind_port: Port = Field(default=5556, description="Port at worker_bind_host.")
    worker_bind_address: str = Field(
        default="auto",
        pattern=r"^(auto|tcp://[^:/\s]+:\d{1,5})$",
        description="Complete address at which the first worker listens, tcp://host:port, also on one host. auto "
        "means ipc on one host, and worker_bind_host and worker_bind_port on several.",
    )
    engine_connect_host: str | None = Field(
        default=None,
        description="Host at which the first worker is reached. null means this host, or with workers on several "
        "hosts the one that the first worker writes to output_dir.",
    )
    worker_connection_timeout: Positive = Field(
        default=120.0, description="Seconds to wait for the workers to start and become reachable before giving up."
    )
    worker_max_retries: Annotated[int, Field(ge=0)] = Field(
        default=3,
        description="Number of times that a request is retried after the workers died while computing it, before it "
        "fails. The workers are restarted each time.",
    )
    worker_stall_timeout: Positive | None = Field(
        default=1200.0,
        description="Seconds without progress after which workers are hung: no rank has run a micro-batch, a step of "
        "sampling or a collective, or has read or written files. They are replaced, and their calls run again. A "
        "process of the service that gives no sign of life, for example because it got SIGSTOP, is replaced after "
        "half of worker_connection_timeout (at least 10 s), or after this time if it is shorter. Must be longer than "
        "a compilation of the model. null turns this off, for example to use a debugger.",
    )


class ServerLoraFields(LoraFields):
    """LoRA"""

    lora_rank: AtLeastOne = Field(default=32, description="Rank of adapters for which the client gives none.")
    lora_alpha: float = Field(
        default=16.0,
        gt=0,
        description="Alpha of adapters for which the client gives none. The output of an adapter is multiplied by "
        "alpha over its own rank.",
    )
    lora_target_modules: Literal["all-linear"] | list[str] | None = Field(
        default=None,
        description="Layers that can have adapters, by the last parts of their names in the checkpoint, such as "
        "q_proj or 0.self_attn.q_proj; clients choose among them. all-linear means every linear layer except the "
        "head. null means the linear projections that the architecture defines as targets, and the head unless it is "
        "tied to the embedding.",
    )
    max_lora_rank: AtLeastOne | None = Field(
        default=None, description="Maximum rank that a client may request. null means lora_rank."
    )
    lora_models_on_device: AtLeastOne = Field(
        default=16,
        description="Number of adapters, each with its optimizer state, that are kept on the device; further ones "
        "stay in host memory between their calls.",
    )
    qlora_exclude_modules: list[str] | None = Field(
        default=None,
        description="Modules that are not quantized, by parts of their names in the checkpoint, such as experts or "
        "0.self_attn.o_proj, or by patterns with * for whole names. null means those listed in the checkpoint's "
        "config. Routers, embeddings, the head and norms are never quantized.",
    )


class RouterFields(Section):
    """Mixture of experts"""

    freeze_router: bool = Field(
        default=True,
        description="Do not train the routers of a mixture-of-experts model, nor the gates of shared experts; false "
        "trains them with full weights.",
    )


# Pydantic collects fields from the last base class first.
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
        assert found is not None, "the pattern of the field guarantees it"
        return int(float(found["number"]) * UNITS[found["unit"]])


def num_workers(config: ServerConfig, num_gpus: int) -> int:
    """The number of workers that the parallel sizes need.

    A data-parallel size of -1 uses the rest of `num_gpus`, at least 1. Raises ValueError, starting with an option, if
    that leaves GPUs unused.
    """
    sizes = {
        "data_parallel_shard_size": config.data_parallel_shard_size,
        "data_parallel_replicate_size": config.data_parallel_replicate_size,
        **config.model_parallel_sizes,
    }
    if config.data_parallel_mode != "fsdp2":
        sizes["data_parallel_shard_size"] = 1
    if config.data_parallel_mode == "none":
        sizes["data_parallel_replicate_size"] = 1
    fixed = math.prod(max(size, 1) for size in sizes.values())
    if -1 not in sizes.values():
        return fixed
    if num_gpus % fixed:
        named = {name: size for name, size in sizes.items() if size > 1}
        shown = " x ".join(f"{name} {size}" for name, size in named.items())
        option, size = next(reversed(named.items()))
        works = [other for other in range(1, num_gpus + 1) if num_gpus % (fixed // size * other) == 0]
        nearest = min(works, key=lambda other: (abs(other - size), other), default=None)
        raise ValueError(
            f"{option}: a data-parallel size of -1 uses all {num_gpus} GPUs, but {shown} does not divide {num_gpus}: "
            + ("change one of the sizes" if nearest is None else f"the nearest {option} that does is {nearest}")
        )
    return max(num_gpus, fixed)
