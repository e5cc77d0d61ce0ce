"""`ModelSpec`: the definition of a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from xorl.core.models.decoder import Decoder
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.derived import recipes_of
from xorl.core.models.mxfp4 import Mxfp4Source
from xorl.core.models.recipes import CheckpointNames, CheckpointView, WeightRecipe, WeightSource, logical_modules
from xorl.core.nn import LayerKernels
from xorl.kernels.arguments import check_type
from xorl.kernels.attention.reference import eager_attention

PLAIN_KERNELS = LayerKernels()


@dataclass(frozen=True)
class ModelSpec:
    """A family of models, keyed by the `architectures` entry of its config.json.

    Attributes:
        architecture: that entry.
        model_type: the matching `model_type`.
        config_from_hf: reads config.json's mapping; raises ValueError, naming the key and value, if unsupported.
        checkpoint_names: how names in a checkpoint may differ from those in the recipes.
        adapter_targets: the checkpoint modules that adapters target by default, by the last parts of their names; a
            model may lack some of them.
        composites: the architectures of composite models of which this may be the text model.
        make_recipes: (config, merge_qkv) -> the recipe of each native parameter, for a family whose checkpoints store
            matrices in another way; None: recipes follow from the modules and their names.
    """

    architecture: str
    model_type: str
    config_from_hf: Callable[[Mapping[str, object]], DecoderConfig]
    checkpoint_names: CheckpointNames
    adapter_targets: tuple[str, ...]
    composites: tuple[str, ...] = ()
    make_recipes: Callable[[DecoderConfig, bool], dict[str, WeightRecipe]] | None = None

    def build(self, config: DecoderConfig, *, merge_qkv: bool = True, kernels: LayerKernels | None = None) -> Decoder:
        """Build the model with uninitialised parameters, on the device of the surrounding `torch.device` context.

        kernels: plain torch by default.
        """
        recipes = self.recipes(config, merge_qkv=merge_qkv)
        if kernels is None:
            is_capped = any(each.softcap is not None for each in config.attentions)
            kernels = LayerKernels(attention=eager_attention) if is_capped else PLAIN_KERNELS
        names, logical = self.checkpoint_names.experts, logical_modules(recipes)
        stack = None if names is None or not config.has_experts else names.stack
        return Decoder(config, merge_qkv=merge_qkv, kernels=kernels, logical=logical, stack=stack)

    def recipes(self, config: DecoderConfig, *, merge_qkv: bool) -> dict[str, WeightRecipe]:
        """The recipe of each native parameter, by name, in the order of the decoder's parameters."""
        if not isinstance(config, DecoderConfig):
            raise ValueError(
                f"config: must be a DecoderConfig, which config_from_hf returns, got {type(config).__name__}"
            )
        check_type("merge_qkv", merge_qkv, bool, "True")
        if self.make_recipes is not None:
            return self.make_recipes(config, merge_qkv)
        return dict(_recipes(config, merge_qkv, self.checkpoint_names))

    def default_targets(self, config: DecoderConfig) -> tuple[str, ...]:
        """Those of `adapter_targets` that a model with this configuration has."""
        recipes = self.recipes(config, merge_qkv=True).values()
        modules = [f".{source.rpartition('.')[0]}" for recipe in recipes for source in recipe.sources]
        return tuple(
            target for target in self.adapter_targets if any(module.endswith(f".{target}") for module in modules)
        )

    def checkpoint_view(self, config: DecoderConfig, source: WeightSource) -> CheckpointView:
        """`source` under the recipes' names, without tensors that are not used and without the head of a tied model."""
        tied, num_layers = config.tie_word_embeddings, config.num_layers
        experts = self.checkpoint_names.experts
        if experts is not None and experts.stack is not None:
            source = Mxfp4Source(source, experts)
        num_blocks = 0 if config.images is None else config.images.num_blocks
        return CheckpointView(source, self.checkpoint_names, tied=tied, num_layers=num_layers, num_blocks=num_blocks)


@cache
def _recipes(config: DecoderConfig, merge_qkv: bool, names: CheckpointNames) -> Mapping[str, WeightRecipe]:
    with torch.device("meta"):
        return recipes_of(Decoder(config, merge_qkv=merge_qkv, kernels=PLAIN_KERNELS), names)
