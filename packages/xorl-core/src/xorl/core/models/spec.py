"""`ModelSpec`: the definition of a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from xorl.core.models.decoder import Decoder
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.recipes import CheckpointNames, CheckpointView, WeightRecipe, WeightSource, logical_modules
from xorl.core.nn import LayerKernels
from xorl.kernels.arguments import check_type

PLAIN_KERNELS = LayerKernels()


@dataclass(frozen=True)
class ModelSpec:
    """A family of models, keyed by the `architectures` entry of its config.json.

    Attributes:
        architecture: that entry.
        model_type: the matching `model_type`.
        config_from_hf: reads config.json's mapping; raises ValueError, naming the key and value, if unsupported.
        hf_keys: the config.json keys and values that describe a config.
        make_recipes: (config, merge_qkv) -> the recipe of each native parameter.
        checkpoint_names: how names in a checkpoint may differ from those in the recipes.
        adapter_targets: the checkpoint modules that adapters target by default, by the last part of their names.
        norm, has_experts: the kind of norms of this family, and whether its layers may be mixtures of experts.
    """

    architecture: str
    model_type: str
    config_from_hf: Callable[[Mapping[str, object]], DecoderConfig]
    hf_keys: Callable[[DecoderConfig], dict[str, object]]
    make_recipes: Callable[[DecoderConfig, bool], dict[str, WeightRecipe]]
    checkpoint_names: CheckpointNames
    adapter_targets: tuple[str, ...]
    norm: Literal["rms", "layer"] = "rms"
    has_experts: bool = False

    def config_to_hf(self, config: DecoderConfig, hf: Mapping[str, object] | None = None) -> dict[str, object]:
        """The mapping for a config.json of this model.

        `hf` is the mapping that `config` was read from. It is kept unchanged if it still describes `config`; otherwise
        the keys that describe `config` override it. Raises ValueError for a config that this family cannot have.
        """
        self._check(config)
        identity = {"architectures": [self.architecture], "model_type": self.model_type}
        if hf is not None and self.config_from_hf(hf) == config:
            return {**hf, **identity}
        # Dense families with RMS norms look alike, but the keys of one do not describe the models of another.
        described = {**(hf or {}), **self.hf_keys(config), **identity}
        found = self.config_from_hf(described)
        if found != config:
            differing = [
                field.name for field in fields(config) if getattr(found, field.name) != getattr(config, field.name)
            ]
            raise ValueError(
                f"config: a config.json of {self.architecture} cannot describe its {', '.join(differing)}; use the "
                "spec whose config_from_hf returned it"
            )
        return described

    def build(self, config: DecoderConfig, *, merge_qkv: bool = True, kernels: LayerKernels = PLAIN_KERNELS) -> Decoder:
        """Build the model with uninitialised parameters, on the device of the surrounding `torch.device` context.

        Raises ValueError for a config that this family cannot have.
        """
        logical = logical_modules(self.recipes(config, merge_qkv=merge_qkv))
        return Decoder(config, merge_qkv=merge_qkv, kernels=kernels, logical=logical)

    def recipes(self, config: DecoderConfig, *, merge_qkv: bool) -> dict[str, WeightRecipe]:
        """The recipe of each native parameter, by name. Raises ValueError for a config that this family cannot have."""
        self._check(config)
        check_type("merge_qkv", merge_qkv, bool, "True")
        return self.make_recipes(config, merge_qkv)

    def checkpoint_view(self, config: DecoderConfig, source: WeightSource) -> WeightSource:
        """`source` under the recipes' names, without old buffers and without the head of a tied model."""
        return CheckpointView(source, self.checkpoint_names, tied=config.tie_word_embeddings)

    def _check(self, config: DecoderConfig) -> None:
        """Raise ValueError for a config that is visibly of another family. Dense families with RMS norms look alike."""
        if not isinstance(config, DecoderConfig):
            raise ValueError(
                f"config: must be a DecoderConfig, which config_from_hf returns, got {type(config).__name__}"
            )
        if config.norm != self.norm or (config.rope is None) != (self.norm == "layer"):
            positions = "learned" if config.rope is None else "rotary"
            raise ValueError(
                f"config: has {config.norm} norms and {positions} positions, so it is not of {self.architecture}, "
                f"which has {self.norm} norms; use the spec whose config_from_hf returned it"
            )
        if config.has_experts and not self.has_experts:
            raise ValueError(
                f"config: has experts, so it is not of {self.architecture}, which has none; use the spec whose "
                "config_from_hf returned it"
            )
