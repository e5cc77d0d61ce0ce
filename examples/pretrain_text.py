"""Pretrain a small GPT from raw text: tokenised, packed and shared out to the processes while it trains.

torchrun --nproc-per-node=2 examples/pretrain_text.py
"""

import argparse
import logging
from pathlib import Path

import torch
from train_ddp import TinyGPT

from xorl.train import DataLoader, DDPTrainer, TextStream, cleanup_distributed, load_tokenizer, setup_distributed

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """One process of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default=str(ROOT / "configs/quickstart"), help="a folder, or of the Hub: gpt2")
    parser.add_argument("--text", default=str(ROOT / "docs"), help="a folder, a URL, or a dataset of the Hub")
    parser.add_argument("--files", default="*.md", help="which of its files, one document a line")
    parser.add_argument("--max-steps", type=int, default=40)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    job = setup_distributed()
    torch.manual_seed(0)

    tokenizer = load_tokenizer(options.tokenizer)
    dataset = TextStream(options.text, tokenizer, context_length=128, data_files=options.files, ds_type="text")
    loader = DataLoader(
        dataset,
        batch_size=8,
        num_workers=2,
        distributed=True,  # each process makes rows of its own
    )
    trainer = DDPTrainer(  # or FSDPTrainer, with the same arguments
        TinyGPT(vocabulary_size=tokenizer.core.get_vocab_size(), context_length=128),
        torch.optim.AdamW,
        loader,
        device=job.device,
        context_length=128,
        grad_accum_steps=2,
        learning_rate=3e-3,
        weight_decay=0.1,
        grad_clip_norm=1.0,
    )
    trainer.train(epochs=1, max_steps=options.max_steps, log_interval=10)
    trainer.save_checkpoint("checkpoints/model.pt", state_dict_type="FULL_STATE_DICT")

    cleanup_distributed()


if __name__ == "__main__":
    main()
