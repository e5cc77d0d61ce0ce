"""Pretrain GPT-2 on several processes. This one is tiny, for a CPU; GPT2() has 124 million parameters.

torchrun --nproc-per-node=2 examples/train_gpt2.py
"""

import torch

from xorl.core.models import GPT2, DecoderLayer
from xorl.train import DataLoader, FSDPTrainer, TextStream, cleanup_distributed, load_tokenizer, setup_distributed

setup_distributed()
tokenizer = load_tokenizer("configs/quickstart")  # or of the Hub: openai-community/gpt2
rows = TextStream("docs", tokenizer, context_length=128, data_files="*.md", ds_type="text")
trainer = FSDPTrainer(  # or DDPTrainer, without the last two lines
    GPT2(tokenizer.core.get_vocab_size(), context_length=128, width=64, num_layers=2, num_heads=4),
    torch.optim.AdamW,
    DataLoader(rows, batch_size=8, distributed=True),
    learning_rate=3e-3,
    auto_wrap_policy="transformer",
    transformer_layer_cls=DecoderLayer,
)
trainer.train(max_steps=20, log_interval=5)
cleanup_distributed()
