"""Training: runs built from a configuration, the engine they use, and trainers for modules of your own."""

from xorl.core.runtime import init as setup_distributed
from xorl.core.runtime import local_rank as get_local_rank
from xorl.core.runtime import shutdown as cleanup_distributed
from xorl.train.build import build_run
from xorl.train.engine import Engine
from xorl.train.evaluate import evaluate
from xorl.train.loop import train
from xorl.train.module.distributed import DDPTrainer, FSDPTrainer
from xorl.train.module.loader import DataLoader
from xorl.train.module.models import load_model
from xorl.train.module.text import TextStream, load_tokenizer
from xorl.train.module.trainer import StepMetrics, Trainer, next_token_loss
from xorl.train.observe.observer import DivergedError
from xorl.train.run import run_training
from xorl.train.startup import RunComplete

__all__ = [
    "DDPTrainer",
    "DataLoader",
    "DivergedError",
    "Engine",
    "FSDPTrainer",
    "RunComplete",
    "StepMetrics",
    "TextStream",
    "Trainer",
    "build_run",
    "cleanup_distributed",
    "evaluate",
    "get_local_rank",
    "load_model",
    "load_tokenizer",
    "next_token_loss",
    "run_training",
    "setup_distributed",
    "train",
]
