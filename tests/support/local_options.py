"""Configurations of local training with what a test sets, beside what each must have."""

from collections.abc import Mapping
from pathlib import Path

from xorl.config import Config, config_from_mapping

Options = Mapping[str, object]


def local_config(model: str | Path | Options = "c", data: Options = {}, lora: Options = {}, **train: object) -> Config:  # noqa: B006 - not changed
    """model: the section, or its config_path. Data are in the file `a`, and output in the folder `o`, unless set."""
    sections = {
        "model": model if isinstance(model, Mapping) else {"config_path": str(model)},
        "data": {"datasets": [{"path": "a"}], **data},
        "train": {"output_dir": "o", **train},
        "lora": lora,
    }
    return config_from_mapping({name: dict(section) for name, section in sections.items()}).config
