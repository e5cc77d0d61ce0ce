"""Training on GPUs: the command, NCCL, mixed precision, and resuming to the bit."""

import pytest

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "adamw": [],
    "muon": ["--train.optimizer", "muon"],
    "half": ["--train.optimizer", "anyprecision_adamw", "--train.param_dtype", "bf16", "--train.lr", "1e-3"],
}


def test_gpu_agrees_with_the_cpu_in_fp32(train) -> None:
    # Catches an operation that computes something else, or with less precision, on a GPU.
    fp32 = ["--train.enable_mixed_precision", "false", "--train.max_steps", "4"]
    assert train("fp32_gpu", *fp32) == pytest.approx(train("fp32_cpu", *fp32, gpus=0), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "anyprecision_adamw", "muon"])
def test_resumed_run_is_the_same_to_the_bit(optimizer: str, resumed_alike) -> None:
    # Catches state that a checkpoint forgets, and kernels that are not deterministic when they were asked to be.
    options = ["--train.optimizer", optimizer, "--train.param_dtype", "bf16"] if optimizer != "adamw" else []
    losses = resumed_alike(optimizer, *options)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_gpus_agree_with_one(mode: str, train, two_gpus) -> None:
    # Catches gradients that are averaged, or reduced in half precision, by NCCL.
    for name, options in OPTIMIZERS.items():
        options = [*options, "--train.data_parallel_mode", mode]
        one = train(f"{mode}_{name}_one", "--train.gradient_accumulation_steps", "4", *options)
        two = train(f"{mode}_{name}_two", *options, gpus=2)
        assert two == pytest.approx(one, rel=1e-2), name


def test_a_stage_may_have_nothing_to_train(train, two_gpus) -> None:
    # Catches norms that one stage adds up on its host and the other on its GPU, so that both wait for each other.
    options = ["--lora.enable_lora", "true", "--lora.lora_target_modules", "[0.self_attn.q_proj]"]
    options += ["--train.gradient_accumulation_steps", "4"]
    one = train("first_layer_one", *options)
    two = train("first_layer_two", *options, "--train.pipeline_parallel_size", "2", gpus=2)
    assert two == pytest.approx(one, rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        ["--train.recompute_modules", "[self_attn, mlp]"],
        ["--train.recompute_policy", "operation"],
        ["--train.recompute_policy", "auto"],
        ["--train.enable_reentrant", "true"],
        ["--train.enable_cpu_offload", "true"],
        ["--train.enable_activation_offload", "true"],
        ["--train.enable_compile", "true", "--train.recompute_policy", "operation"],
        ["--train.enable_compile", "true", "--train.enable_activation_offload", "true"],
        ["--train.enable_gradient_checkpointing", "false", "--train.enable_full_shard", "false"],
        ["--train.init_device", "cpu", "--model.attn_implementation", "sdpa"],
        ["--train.ce_mode", "eager", "--model.lm_head_fp32", "false"],
        ["--model.rmsnorm_native", "true", "--model.rope_native", "true", "--model.activation_native", "true"],
        ["--model.rmsnorm_native", "true"],
        ["--model.rope_native", "true", "--model.merge_qkv", "false"],
        ["--train.init_device", "cuda", "--model.basic_modules", "[mlp]", "--train.ckpt_manager", "torch"],
    ],
    ids=" ".join,
)
def test_options_do_not_change_what_is_trained(options: list[str], train) -> None:
    # Catches a setting of memory or placement that changes the numbers beyond the rounding of bf16.
    reference = train("reference", "--train.load_checkpoint_path", "auto")
    name = "_".join(options).replace("/", "_")
    assert train(name, *options) == pytest.approx(reference, rel=1e-2)


@pytest.mark.parametrize("option", ["enable_compile", "enable_cpu_offload", "enable_activation_offload"])
def test_resumed_run_is_the_same_whatever_saves_memory(option: str, resumed_alike) -> None:
    # Catches kernels that compiled code picks by timing, and tensors that sharding to the host replaces.
    resumed_alike(option, f"--train.{option}", "true")
