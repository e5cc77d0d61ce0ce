"""The architecture of a model, read from config.json before any weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xorl.ckpt import CheckpointError, CheckpointFailure, WeightRecipe, resolve_folder
from xorl.ckpt.export import GENERATION_FILE, IMAGE_PROCESSOR_FILE, PROCESSOR_FILE, json_bytes, tokenizer_files
from xorl.ckpt.layout import is_complete
from xorl.core.models import DecoderConfig, ModelSpec, processor_config, spec_for
from xorl.core.models.composite import special_tokens, text_values, with_entries
from xorl.data.images import ImageSettings
from xorl.lora.prequantized import MODELOPT_FILE, with_modelopt_file
from xorl.train.adapters.folder import is_adapter

# The files of a model's folder without its weights.
CONFIG_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class EncoderParts:
    """The image encoder of a model that is composed of two folders.

    origin: the folder or Hub id of its weights; None: random weights. processor: the settings of its image processor.
    token: the text of the token that stands for images.
    """

    origin: str | None
    processor: Mapping[str, object]
    token: str


@dataclass(frozen=True)
class Architecture:
    """A model's family, its shape and its Hugging Face configuration.

    `chat_template` is the template used in training, if it is not the tokenizer's own. `generation` is the content of
    its generation_config.json; empty without one. `own_tokenizer` and `own_generation`: the tokenizer, or `generation`,
    is not that of the base weights. `origin` is the folder or Hub id of the Hugging Face weights that training started
    from, even if it continued from checkpoints; None for random weights. `images`: how the images of the data are read;
    None if it has none. `encoder`: None unless the model is composed of two folders.
    """

    spec: ModelSpec
    config: DecoderConfig
    hf_config: Mapping[str, object]
    tokenizer_folder: Path | None
    chat_template: str | None = None
    generation: Mapping[str, object] = field(default_factory=dict)
    own_tokenizer: bool = False
    own_generation: bool = False
    origin: str | None = None
    images: ImageSettings | None = None
    encoder: EncoderParts | None = None

    @property
    def special_tokens(self) -> Mapping[str, object]:
        """The ids of special tokens in config.json, by key."""
        return special_tokens(self.hf_config)

    @property
    def text_values(self) -> Mapping[str, object]:
        """The keys of the text model in config.json."""
        return text_values(self.hf_config)

    def processor_files(self) -> dict[str, bytes]:
        """The files of the processor, by name, if they are not in the folder of the tokenizer."""
        if self.encoder is None:
            return {}
        processor = processor_config(self.hf_config, self.encoder.token)
        return {IMAGE_PROCESSOR_FILE: json_bytes(self.encoder.processor), PROCESSOR_FILE: json_bytes(processor)}

    def files_beside_adapter(self) -> dict[str, bytes]:
        """The files, by name, that an adapter needs because they differ from its base's.

        These are the tokenizer's, its template and generation_config.json.
        """
        files = tokenizer_files(self.tokenizer_folder if self.own_tokenizer else None, self.chat_template)
        return files | ({GENERATION_FILE: json_bytes(self.generation)} if self.own_generation else {})

    def recipes(self, *, merge_qkv: bool) -> Mapping[str, WeightRecipe]:
        """The names and layouts of the parameters in Hugging Face files."""
        return self.spec.recipes(self.config, merge_qkv=merge_qkv)


def read_config(option: str, file: Path, tokenizer_folder: Path, nulls: Collection[str] = ()) -> Architecture:
    """The architecture in a config.json, with the quantisation that ModelOpt describes in a file beside it.

    nulls: keys that are read as null.
    Raises ValueError, beginning with `option`, if the file is missing, invalid or of an unknown model.
    """
    if not file.is_file():
        hint = ""
        if option == "model.model_path" and is_complete(file.parent):
            hint = "; it is an xorl checkpoint: set train.load_weights_mode: dcp to start from it"
        elif is_adapter(file.parent):
            hint = "; it is an adapter: give the folder or Hub id of its base model here, and the adapter's in "
            hint += "lora.adapter_path"
        raise ValueError(f"{option}: {file.parent} holds no config.json{hint}")
    hf_config = read_object(option, file)
    modelopt_file = file.parent / MODELOPT_FILE
    if modelopt_file.is_file():
        try:
            hf_config = with_modelopt_file(hf_config, json.loads(modelopt_file.read_text()))
        except ValueError as error:
            raise ValueError(f"{option}: {modelopt_file}: {error}") from error
    present = {**hf_config, **text_values(hf_config)}
    hf_config = with_entries(hf_config, {key: None for key in nulls if key in present})
    try:
        spec = spec_for(hf_config)
        config = spec.config_from_hf(hf_config)
    except ValueError as error:
        raise ValueError(f"{option}: {file}: {error}") from error
    return Architecture(spec, config, hf_config, tokenizer_folder, generation=read_generation(option, file.parent))


def read_generation(option: str, folder: Path) -> Mapping[str, object]:
    """The content of generation_config.json in a model's folder; empty if it has none.

    Raises ValueError, beginning with `option`, if the file is not valid.
    """
    file = folder / GENERATION_FILE
    return read_object(option, file) if file.is_file() else {}


def read_object(option: str, file: Path) -> dict[str, object]:
    """The JSON object in a file. Raises ValueError, beginning with `option`, if it is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: {file}:{error.lineno} is not JSON: {error.msg}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{option}: {file} is not a JSON object")
    return content


def folder_of(option: str, path: str, patterns: Sequence[str] | None = None) -> Path:
    """The local folder of `path`, downloaded from the Hub if needed. Error messages begin with `option`."""
    try:
        return resolve_folder(path) if patterns is None else resolve_folder(path, patterns=patterns)
    except (CheckpointError, CheckpointFailure) as error:
        raise type(error)(f"{option}: {error}") from error
