"""Training: the Engine and the loop over it for a configuration; trainers for a module of one's own."""

from xorl.core.runtime import init as setup_distributed
from xorl.core.runtime import local_rank as get_local_rank
from xorl.core.runtime import shutdown as cleanup_distributed
from xorl.train.build import Run, RunComplete, build_run
from xorl.train.engine import Engine, StepLosses, Update
from xorl.train.evaluate import evaluate
from xorl.train.loop import train
from xorl.train.module.distributed import DDPTrainer, FSDPTrainer
from xorl.train.module.loader import DataLoader
from xorl.train.module.text import TextStream, load_tokenizer
from xorl.train.module.trainer import StepMetrics, Trainer, next_token_loss
from xorl.train.observe.observer import DivergedError
from xorl.train.run import run_training
from xorl.train.sweep.build import build_sweep
from xorl.train.sweep.loop import train_sweep

__all__ = [
    "DDPTrainer",
    "DataLoader",
    "DivergedError",
    "Engine",
    "FSDPTrainer",
    "Run",
    "RunComplete",
    "StepLosses",
    "StepMetrics",
    "TextStream",
    "Trainer",
    "Update",
    "build_run",
    "build_sweep",
    "cleanup_distributed",
    "evaluate",
    "get_local_rank",
    "load_tokenizer",
    "next_token_loss",
    "run_training",
    "setup_distributed",
    "train",
    "train_sweep",
]
