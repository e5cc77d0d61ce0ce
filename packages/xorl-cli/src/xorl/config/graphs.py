"""What `train.enable_cuda_graphs` needs: layers that can be captured, and for which it pays."""

from xorl.config.local import TrainConfig
from xorl.config.requirement import Requirement


def _recomputes_layers(train: TrainConfig) -> bool:
    """Whether the backward pass computes all layers again as a whole; a graph would copy all else that is saved."""
    is_whole = train.recompute_modules is None and train.moe_checkpoint_method is None
    is_all = train.recompute_policy == "module" and train.recompute_num_layers is None
    return train.enable_gradient_checkpointing and is_whole and is_all


GRAPH_REQUIREMENTS = tuple(
    Requirement(("train.enable_cuda_graphs",), switch, wanted, is_met)
    for switch, wanted, is_met in (
        (
            "train.data_parallel_mode",
            "ddp or none (fsdp2 gathers parameters into new memory)",
            lambda config: config.train.data_parallel_mode != "fsdp2",
        ),
        ("train.enable_compile", "true", lambda config: config.train.enable_compile),
        (
            "train.enable_gradient_checkpointing",
            "true, for whole layers and for all of them",
            lambda config: _recomputes_layers(config.train),
        ),
        ("train.enable_activation_offload", "false", lambda config: not config.train.enable_activation_offload),
        ("train.fp8", "none", lambda config: config.train.fp8 == "none"),
        ("train.ringattn_parallel_size", "1", lambda config: config.train.ringattn_parallel_size == 1),
        ("train.pipeline_parallel_size", "1", lambda config: config.train.pipeline_parallel_size == 1),
        ("train.enable_mixed_precision", "true", lambda config: config.train.enable_mixed_precision),
        ("lora.enable_lora", "false", lambda config: not config.lora.enable_lora),
        ("lora.enable_qlora", "false", lambda config: not config.lora.enable_qlora),
        (
            "model.attn_implementation",
            "auto, flash_attention_2, flash_attention_3 or flash_attention_4",
            lambda config: config.model.attn_implementation.startswith(("auto", "flash_attention")),
        ),
        (
            "model.moe_implementation",
            "null, quack, native or triton (eager reads sizes on the host)",
            lambda config: config.model.moe_implementation != "eager",
        ),
    )
)
