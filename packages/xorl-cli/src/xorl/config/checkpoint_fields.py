"""The options of checkpoints, and of when a run of local training ends."""

from typing import Literal

from pydantic import Field

from xorl.config.fields import AtLeastOne, AtLeastZero, CheckpointFields, NonNegative, Positive

OnSaveFailure = Literal["stop", "continue"]


class LocalCheckpointFields(CheckpointFields):
    """Checkpointing"""

    output_dir: str = Field(
        min_length=1,
        description="Folder for checkpoints, exported models and metrics. All nodes must see the same folder.",
    )
    save_steps: AtLeastZero = Field(
        default=0, description="Number of optimizer steps between checkpoints. 0 disables saving by steps."
    )
    save_epochs: NonNegative = Field(
        default=1.0,
        description="Number of epochs between checkpoints; 0.25 saves four per epoch. 0 disables saving by epochs.",
    )
    save_async: bool = Field(
        default=False,
        description="Write checkpoints in the background while training continues, from a copy of this rank's part of "
        "the state in host memory. The copies run beside the next forward and backward pass. One save is written at a "
        "time; the run waits for the last one before it ends.",
    )
    on_save_failure: OnSaveFailure = Field(
        default="stop",
        description="What happens when a save fails, for example on a full disk. stop ends the run at the next step; "
        "continue logs the error, and the next save tries again. If the last save fails, the run fails in either case.",
    )
    max_time: Positive | None = Field(
        default=None,
        description="Time limit in seconds, counted from the start of the process, such as that of a batch job. The "
        "run ends early enough for two more steps and a save, and exits with code 142; the same command continues it. "
        "null means no limit.",
    )
    keep_last: AtLeastOne | None = Field(
        default=None, description="Number of newest checkpoints to keep; each save removes older ones. null keeps all."
    )
    keep_every: AtLeastOne | None = Field(
        default=None,
        description="Also keep the checkpoints whose step is a multiple of this number. null keeps no others.",
    )
    keep_best: AtLeastOne | None = Field(
        default=None,
        description="Also keep this many checkpoints with the lowest loss on held-out data, among those whose step was "
        "evaluated (eval_steps). null keeps no others.",
    )
    save_hf_weights: bool = Field(
        default=True,
        description="At the end of training, export the model to Hugging Face safetensors, beside the last checkpoint: "
        "in bf16 with enable_mixed_precision, else in the dtype of the parameters. xorl export writes any dtype later.",
    )
    load_checkpoint_path: str | None = Field(
        default=None,
        description="Checkpoint folder to resume from; auto resumes from the newest checkpoint in output_dir, if "
        "there is one. A checkpoint of output_dir that is not the newest goes back: later ones are moved to the folder "
        "checkpoints/set_aside_N. If the command is repeated, the run continues from the newest checkpoint that it has "
        "saved since. null or empty starts from scratch, and fails if output_dir already contains checkpoints.",
    )
