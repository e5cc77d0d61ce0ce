"""The supported families as models of the trainers: by folder, from scratch, and on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from examples import EXAMPLES, run_example
from tiny_models import ARCHITECTURES, hf_config, write_config
from xorl.core.models import GPT2, DecoderLayer
from xorl.train import DataLoader, DDPTrainer, FSDPTrainer, Trainer, load_model

LENGTH = 12
PLACEMENTS = {
    "ddp": (DDPTrainer, {}),
    "whole": (FSDPTrainer, {}),
    "layers": (FSDPTrainer, {"auto_wrap_policy": "transformer", "transformer_layer_cls": DecoderLayer}),
}


def tiny_gpt2() -> GPT2:
    return GPT2(50, context_length=LENGTH, width=32, num_layers=2, num_heads=4)


def losses(trainer_class: type[Trainer], **options) -> list[float]:
    """The losses of a few steps on rows of LENGTH + 1 token ids."""
    rows = torch.randint(0, 50, (32, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    is_distributed = trainer_class is not Trainer
    loader = DataLoader(rows, batch_size=4 if is_distributed else 8, distributed=is_distributed, shuffle=False)
    trainer = trainer_class(
        tiny_gpt2(),
        torch.optim.AdamW,
        loader,
        device="cpu",
        context_length=LENGTH,
        learning_rate=1e-2,
        grad_clip_norm=0,
        **options,
    )
    records = trainer.train(epochs=3, max_steps=8, log_interval=1)
    assert {record.num_trained_tokens for record in records} == {8 * LENGTH}
    return [record.loss for record in records]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_gpt2_from_scratch_trains_alike_on_any_ranks(name: str, run_ranks) -> None:
    # Catches a tied head that is not gathered, a row of context_length + 1 ids that is refused or loses its last label.
    trainer_class, options = PLACEMENTS[name]
    alone = losses(Trainer)
    assert alone[-1] < alone[0]
    for found in run_ranks(lambda: losses(trainer_class, **options), 2):
        assert found == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3", "mixtral"])
def test_a_model_by_folder_computes_what_transformers_computes(model_type: str, tmp_path: Path) -> None:
    # Catches rows that see each other, and weights that are read into another place.
    config = AutoConfig.for_model(**hf_config(model_type))
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(load_model(tmp_path)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_model_from_scratch_needs_only_its_config(tmp_path: Path) -> None:
    # Catches weights that are looked for, a seed without effect, and a precision that autocast does not decide.
    for model_type in ARCHITECTURES:
        folder = write_config(tmp_path / model_type, hf_config(model_type))
        model, other = (load_model(folder, from_scratch=True, seed=seed) for seed in (0, 1))
        ids = torch.arange(8).view(2, 4)
        assert model(ids).shape == (2, 4, 64)
        assert not torch.equal(model(ids), other(ids))
        with torch.autocast("cpu", torch.bfloat16):
            assert model(ids).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"model: .*nowhere"):
        load_model(tmp_path / "nowhere")


def test_the_example_is_short_and_shows_its_losses_in_a_file(run_ranks, tmp_path: Path) -> None:
    # Catches an example that no longer runs, and a program without logging that shows nothing when it is redirected.
    script = EXAMPLES / "train_gpt2.py"
    source = script.read_text()
    assert f"torchrun --nproc-per-node=2 examples/{script.name}\n" in source
    for name in ("configs", "docs"):
        (tmp_path / name).symlink_to(EXAMPLES.parent / name)

    lines = "".join(shown for shown, _ in run_ranks(lambda: run_example(script, tmp_path), 2)).splitlines()
    steps = [line.split()[0] for line in lines if line.startswith("step=")]
    assert steps == ["step=5", "step=10", "step=15", "step=20"]
