"""Train a model that no device holds whole: the model and the data of train_ddp.py, with parameters, gradients and
optimizer state sharded over the processes.

torchrun --nproc-per-node=2 examples/train_fsdp.py
"""

import logging
from pathlib import Path

import torch
from train_ddp import CONTEXT_LENGTH, Block, TinyGPT, additions

from xorl.train import DataLoader, FSDPTrainer, cleanup_distributed, setup_distributed

SHARDS = Path("checkpoints/sharded")


def main() -> None:
    """One process of the job."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    job = setup_distributed()
    torch.manual_seed(0)

    loader = DataLoader(additions(num_rows=4096), batch_size=16, distributed=True)
    trainer = FSDPTrainer(
        TinyGPT(),
        torch.optim.AdamW,
        loader,
        device=job.device,
        context_length=CONTEXT_LENGTH,
        grad_accum_steps=2,
        learning_rate=3e-3,
        weight_decay=0.1,
        grad_clip_norm=1.0,
        sharding_strategy="FULL_SHARD",  # or SHARD_GRAD_OP, or HYBRID_SHARD on several hosts
        auto_wrap_policy="transformer",  # or "size" with min_num_params
        transformer_layer_cls=Block,
        mixed_precision_policy="bf16",
        cpu_offload=False,
    )
    if SHARDS.exists():  # A second start goes on where the first one ended, on any number of processes.
        trainer.load_checkpoint(SHARDS)
    trainer.train(epochs=1, max_steps=40, log_interval=10)
    # Shards are quick to write, however large the model is; one file is for every other tool.
    trainer.save_checkpoint(SHARDS, state_dict_type="SHARDED_STATE_DICT")
    trainer.save_checkpoint("checkpoints/model.pt", state_dict_type="FULL_STATE_DICT")

    cleanup_distributed()


if __name__ == "__main__":
    main()
