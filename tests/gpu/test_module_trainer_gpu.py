"""The trainers of a user's own module on all GPUs of the host: NCCL, bf16 parameters on the wire, offloaded shards.

The file is also the program that torchrun starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xorl.core import runtime
from xorl.train.module.distributed import DDPTrainer, FSDPTrainer
from xorl.train.module.loader import DataLoader
from xorl.train.module.trainer import Trainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_STEPS = 6
PLACEMENTS = {
    "ddp": {},
    "full": {"sharding_strategy": "FULL_SHARD"},
    "kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 1},
    "offloaded": {"cpu_offload": True},
}


def build(name: str, device: torch.device, precision: str | None) -> Trainer:
    sys.path.insert(0, str(EXAMPLES))
    from train_ddp import Block, TinyGPT, additions  # noqa: PLC0415

    torch.manual_seed(0)
    loader = DataLoader(additions(512), 16 // dist.get_world_size(), distributed=True)
    kind = DDPTrainer if name == "ddp" else FSDPTrainer
    wrapping = {} if name == "ddp" else {"auto_wrap_policy": "transformer", "transformer_layer_cls": Block}
    options = {"learning_rate": 1e-2, "grad_accum_steps": 2, "grad_clip_norm": 0.2, "mixed_precision_policy": precision}
    return kind(TinyGPT(), torch.optim.AdamW, loader, device=device, **wrapping, **PLACEMENTS[name], **options)


def measure(name: str, device: torch.device, precision: str | None, folder: Path) -> dict[str, object]:
    straight = [record.loss for record in build(name, device, precision).train(max_steps=NUM_STEPS, log_interval=1)]
    trainer = build(name, device, precision)
    trainer.train(max_steps=NUM_STEPS // 2)
    dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    resumed = []
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        trainer.save_checkpoint(folder / f"{name}_{precision}_{kind}", state_dict_type=kind)
        second = build(name, device, precision)
        second.load_checkpoint(folder / f"{name}_{precision}_{kind}")
        resumed.append([record.loss for record in second.train(max_steps=NUM_STEPS, log_interval=1)])
    place = next(trainer.model.parameters()).device.type
    return {"losses": straight, "resumed": resumed, "dtypes": sorted(dtypes), "place": place}


def main() -> None:
    job = runtime.init()
    folder = Path(sys.argv[1])
    results = {
        f"{name} {precision}": measure(name, job.device, precision, folder)
        for precision in (None, "bf16")
        for name in PLACEMENTS
    }
    if job.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    runtime.shutdown()


@pytest.mark.gpu
def test_every_placement_trains_and_goes_on(tmp_path: Path) -> None:
    # Catches what gloo and the CPU cannot show: offloaded gradients that NCCL cannot sum, and weights gathered in bf16.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run([*launcher, __file__, str(tmp_path)], check=True, timeout=280)
    results = json.loads((tmp_path / "results.json").read_text())
    reference = results["ddp None"]["losses"]
    for name, result in results.items():
        tolerance = 0.02 if name.endswith("bf16") else 1e-4
        assert result["losses"] == pytest.approx(reference, rel=tolerance), name
        for resumed in result["resumed"]:
            assert resumed == pytest.approx(result["losses"][NUM_STEPS // 2 :], rel=tolerance / 10), name
        assert result["dtypes"] == ["torch.float32"]
        assert result["place"] == ("cpu" if name.startswith("offloaded") or not torch.cuda.is_available() else "cuda")


if __name__ == "__main__":
    main()
