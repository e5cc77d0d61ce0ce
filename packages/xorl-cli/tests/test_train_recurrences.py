"""Models with recurrences: what their options may be, and how they start."""

from pathlib import Path

import pytest
import torch

from local_options import local_config
from tiny_models import hf_config, write_config
from xorl.core.models import Decoder
from xorl.train.layer_kernels import check_kernels
from xorl.train.model import sketch_model
from xorl.train.model_source import read_architecture
from xorl.train.verify import Verification

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ringattn_parallel_size": 2}, r"^train\.ringattn_parallel_size: 2, .*\.ulysses_parallel_size: 1 or 2 or 4"),
        ({"ulysses_parallel_size": 8}, "ulysses: 8 ranks cannot share 8 heads with 2 key/value heads|the 4 heads"),
        ({"ulysses_parallel_size": 3}, "ulysses: 3 ranks cannot share"),
        (
            {"tensor_parallel_size": 8},
            r"^train\.tensor_parallel_size: 8 ranks .* 4 key heads, groups or channels of recurrences .* works is 4$",
        ),
        (
            {"tensor_parallel_size": 2, "ulysses_parallel_size": 4},
            "ulysses: 4 ranks cannot share the 2 heads or channels of recurrences; .* works is 2",
        ),
    ],
)
def test_sizes_that_recurrences_cannot_be_shared_by_are_refused(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    # Catches a run that fails in its first step, or computes heads of other ranks.
    config = local_config(write_config(tmp_path, hf_config("qwen3_5_text", num_attention_heads=8)), **options)
    with pytest.raises(ValueError, match=message):
        sketch_model(read_architecture(config.model), config.model, config.train, config.lora)


@pytest.mark.parametrize(
    ("family", "backend", "message"),
    [
        ("qwen3_5_text", "fla", r"^model\.recurrence_implementation: .*'fla' cannot run here: .*these can: plain"),
        (
            "nemotron_h",
            "batched",
            r"^model\.recurrence_implementation: .*'batched' cannot run here: .*these can: plain",
        ),
        ("qwen3", "plain", r"^model\.recurrence_implementation: plain, but the model has no layers with a recurrence"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_by_name(family: str, backend: str, message: str, tmp_path: Path) -> None:
    # Catches a silent fallback, and an option that is ignored.
    folder = write_config(tmp_path, hf_config(family))
    config = local_config({"config_path": str(folder), "recurrence_implementation": backend})
    with pytest.raises(ValueError, match=message):
        check_kernels(read_architecture(config.model).config, config.model, config.train, CPU)


def test_a_model_without_a_padding_id_is_cut_down_for_verification(tmp_path: Path) -> None:
    # Catches a padding id that is removed from a config.json without one, which is refused as having no effect.
    large = hf_config("qwen3_5_text", vocab_size=248_320, linear_num_value_heads=32, linear_num_key_heads=16)
    folder = write_config(tmp_path, {key: value for key, value in large.items() if key != "pad_token_id"})
    config = local_config(folder, ulysses_parallel_size=2)
    cut = Verification.of(config, is_full=False).config.model.foundation
    assert cut["vocab_size"] == 384
    assert (cut["linear_num_key_heads"], cut["linear_num_value_heads"]) == (8, 16)
    assert "pad_token_id" not in cut


def started(folder: Path, family: str) -> Decoder:
    """A model with the weights that it starts with."""
    model = read_architecture(local_config(write_config(folder, hf_config(family))).model)
    decoder = model.spec.build(model.config)
    decoder.init_weights(seed=0)
    return decoder


def test_a_model_starts_with_the_decays_of_its_authors(tmp_path: Path) -> None:
    # Catches decays drawn like weights, and a norm that starts at 0 because others of the model do.
    decoder = started(tmp_path, "qwen3_5_text")
    layer = decoder.layers[0].linear_attn
    decays = layer.decay.A_log.exp()
    assert 0.01 <= decays.min() < decays.max() <= 16
    assert torch.equal(layer.decay.dt_bias, torch.ones(8))
    assert torch.equal(layer.norm.weight, torch.ones(8))
    assert torch.equal(decoder.layers[0].input_layernorm.weight, torch.zeros(32))


def test_a_state_space_starts_with_the_step_sizes_of_its_authors(tmp_path: Path) -> None:
    # Catches states that forget everything within a token, or never.
    decoder = started(tmp_path, "nemotron_h")
    sizes = decoder.layers[0].linear_attn.decay
    assert 1 <= sizes.A_log.exp().min() < sizes.A_log.exp().max() <= 16
    steps = torch.nn.functional.softplus(sizes.dt_bias)
    assert 1e-3 * (1 - 1e-5) <= steps.min() < steps.max() <= 1e-1 * (1 + 1e-5)
    assert torch.equal(sizes.D, torch.ones(8))


def test_a_model_with_one_group_shares_rows_by_heads_alone(tmp_path: Path) -> None:
    # Catches a group whose norm is computed from some of its channels.
    folder = write_config(tmp_path, hf_config("nemotron_h", n_groups=1))
    config = local_config(folder, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 2 ranks .* 1 key heads, groups or channels .* is 1$"):
        sketch_model(read_architecture(config.model), config.model, config.train, config.lora)
    config = local_config(folder, ulysses_parallel_size=4)
    sketch_model(read_architecture(config.model), config.model, config.train, config.lora)
