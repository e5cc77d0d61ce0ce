"""A folder that transformers wrote is loaded, trained and exported, and transformers reads the result."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from saved_models import save_model
from tiny_models import hf_config
from tiny_runs import metrics_of, run_values
from xorl.ckpt import CheckpointError
from xorl.config import config_from_mapping
from xorl.train.export.saved import export_saved
from xorl.train.run import run_training

NUM_DOCUMENTS = 64


def write_data(path: Path) -> None:
    """Documents in which each token is the one before plus one, so that there is something to learn."""
    with path.open("w") as file:
        for index in range(NUM_DOCUMENTS):
            ids = [(index + offset) % 50 for offset in range(6 + index % 7)]
            file.write(json.dumps({"input_ids": ids, "labels": [-100, -100, *ids[2:]]}) + "\n")


def mean_loss(model: PreTrainedModel, data: Path) -> float:
    """The loss that transformers gives, document by document, over all trained tokens."""
    total, trained = 0.0, 0
    for line in data.read_text().splitlines():
        row = json.loads(line)
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        labels = torch.tensor(row["labels"][1:])
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        trained += int((labels != -100).sum())
    return total / trained


@pytest.mark.multi
@pytest.mark.parametrize(
    ("model_type", "world_size", "mode", "load_weights_mode", "init_device"),
    [
        ("llama", 1, "none", "broadcast", "auto"),
        ("llama", 2, "fsdp2", "all_ranks", "meta"),
        ("llama", 2, "ddp", "broadcast", "cpu"),
        ("glm4_moe", 2, "fsdp2", "broadcast", "auto"),
    ],
)
def test_folder_is_loaded_trained_and_exported(
    model_type: str, world_size: int, mode: str, load_weights_mode: str, init_device: str, tmp_path: Path, run_ranks
) -> None:
    # Catches weights that are loaded into the wrong place, exports that other tools read as another model, and entries
    # of model.foundation that the model, or what is exported, knows nothing of.
    model = save_model(tmp_path / "base", hf_config(model_type)).eval()
    foundation: dict[str, object] = {}
    if mode == "ddp":
        foundation = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 1e-2}
        changed = AutoConfig.from_pretrained(tmp_path / "base", **foundation)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=changed).eval()
    data = tmp_path / "data.jsonl"
    write_data(data)
    output = tmp_path / "output"
    rows = [{"path": str(data)}]
    values = run_values(
        tmp_path,
        output,
        model={"model_path": str(tmp_path / "base"), "foundation": foundation},
        data={"datasets": rows, "test_datasets": rows},
        data_parallel_mode=mode,
        init_device=init_device,
        load_weights_mode=load_weights_mode,
        max_steps=12,
        lr_warmup_ratio=0.25,
    )
    loaded = config_from_mapping(values)
    assert run_ranks(lambda: run_training(loaded), world_size) == [0] * world_size

    records = metrics_of(output)
    evaluations = {record["step"]: record for record in records if "eval_loss" in record}
    assert set(evaluations) == {0, 12}
    with torch.no_grad():
        assert evaluations[0]["eval_loss"] == pytest.approx(mean_loss(model, data), rel=1e-5)
        exported = AutoModelForCausalLM.from_pretrained(output / "checkpoints" / "global_step_12-export").eval()
        assert type(exported) is type(model)
        assert evaluations[12]["eval_loss"] == pytest.approx(mean_loss(exported, data), rel=1e-5)
    assert evaluations[12]["eval_loss"] < evaluations[0]["eval_loss"] / 2
    # Catches a schedule that is a step early or late.
    rates = [record["lr"] for record in records if "lr" in record]
    assert rates == pytest.approx([0.01 * min(step / 3, 1) for step in range(1, 13)])
    assert evaluations[12]["eval_token_accuracy"] > evaluations[0]["eval_token_accuracy"]

    # Catches a checkpoint that does not say what it takes to export it, or is exported as another model.
    again = export_saved(str(output), str(tmp_path / "again"), verify=True)
    hf = output / "checkpoints" / "global_step_12-export"
    written, wanted = (load_file(folder / "model.safetensors") for folder in (again, hf))
    torch.testing.assert_close(written, wanted, rtol=0, atol=0)
    assert json.loads((again / "config.json").read_text()) == json.loads((hf / "config.json").read_text())
    shard = next((output / "checkpoints" / "global_step_12").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=rf"{shard.name} has changed"):
        export_saved(str(output), str(tmp_path / "damaged"))
