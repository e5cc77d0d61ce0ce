"""Train a model of your own with a copy of it on every process: additions, written as text.

torchrun --nproc-per-node=2 examples/train_ddp.py
"""

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.train import DataLoader, DDPTrainer, cleanup_distributed, setup_distributed

VOCABULARY = "0123456789+=\n"
CONTEXT_LENGTH = 48


class Block(nn.Module):
    """Causal attention and an MLP, each added to what it reads [B, S, D]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """Token ids [B, S] to logits [B, S, V]."""

    def __init__(
        self,
        vocabulary_size: int = len(VOCABULARY),
        context_length: int = CONTEXT_LENGTH,
        width: int = 64,
        num_layers: int = 2,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=4) for _ in range(num_layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary_size))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def additions(num_rows: int) -> Tensor:
    """Rows of token ids [num_rows, CONTEXT_LENGTH], cut from one long text of sums."""
    pairs = torch.randint(0, 20, (num_rows * CONTEXT_LENGTH // 6 + 8, 2), generator=torch.Generator().manual_seed(0))
    text = "".join(f"{a}+{b}={a + b}\n" for a, b in pairs.tolist())
    ids = [VOCABULARY.index(character) for character in text]
    return torch.tensor(ids[: num_rows * CONTEXT_LENGTH]).view(num_rows, CONTEXT_LENGTH)


def main() -> None:
    """One process of the job."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    job = setup_distributed()
    torch.manual_seed(0)

    loader = DataLoader(additions(num_rows=4096), batch_size=16, distributed=True)
    trainer = DDPTrainer(
        TinyGPT(),
        torch.optim.AdamW,
        loader,
        device=job.device,
        context_length=CONTEXT_LENGTH,
        grad_accum_steps=2,
        learning_rate=3e-3,
        weight_decay=0.1,
        grad_clip_norm=1.0,
    )
    trainer.train(epochs=1, max_steps=40, log_interval=10)
    trainer.save_checkpoint("checkpoints/model.pt", state_dict_type="FULL_STATE_DICT")

    cleanup_distributed()


if __name__ == "__main__":
    main()
