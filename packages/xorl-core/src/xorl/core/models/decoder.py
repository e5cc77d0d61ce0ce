"""The decoder shared by all model families: embedding, attention and feed-forward layers, norm, head.

Shapes: T tokens, D model width, V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeVar, overload

import torch
from torch import Tensor, nn

from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.decoder_layer import DecoderLayer
from xorl.core.models.image_config import ImageInput
from xorl.core.models.image_encoder import ImageEncoder, PlacedFeatures
from xorl.core.models.initial import fill_drawn_, fill_normal_, key_of
from xorl.core.models.recipes import ENCODER, LogicalModule, RowTarget
from xorl.core.models.router_losses import RouterLosses, RouterLossOptions, RouterSums, check_recorded
from xorl.core.models.stacks import ExpertStack
from xorl.core.models.stages import Stage
from xorl.core.nn import Attention, Embedding, GatedMLP, LayerKernels, LayerNorm, RMSNorm, Rotary
from xorl.core.nn.gated_delta_net import GatedDeltaNet
from xorl.core.nn.head import Head, apply_head
from xorl.core.nn.moe import Experts, LayerRoutes, MixtureOfExperts
from xorl.core.nn.norms import make_norm
from xorl.core.nn.roles import (
    DeclaresRoles,
    InitialValue,
    Role,
    StacksMatrices,
    StatesInitialValues,
    StoresWeight,
    declared,
)
from xorl.core.nn.share import pieces, shares_of
from xorl.core.nn.short_conv import ShortConv
from xorl.core.nn.state_space import StateSpace
from xorl.core.shards import local
from xorl.kernels.fused.reference import capped
from xorl.kernels.head import HeadWeight, LogitOptions
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.vocabulary import Vocabulary

ResultT = TypeVar("ResultT")


class Decoder(nn.Module):
    """A causal language model over packed rows.

    For generation, pass a `CachedLayout`: the row then holds only new tokens, and a cache holds the keys and values of
    earlier tokens. Gradients are not supported then.

    The embedding's output is cast to `compute_dtype`, and every layer computes in the dtype of its input, so parameters
    may have any dtype. There is no dropout, except in adapters.

    Attributes:
        config: the configuration, of the whole model.
        stage: what this module has of the model. In a pipeline, layers keep their numbers.
        logical: for each module with a weight, the checkpoint modules that it stacks, in the order of their rows.
        stack: how checkpoints stack what all experts of a layer have; None: they do not.
        compute_dtype: the dtype of activations; set it before the first forward pass.
        logits: how losses compute logits, which `HeadWeight` tells them.
        routers: losses and statistics of a mixture of experts; None for a dense model.
    """

    compute_dtype: torch.dtype

    def __init__(
        self,
        config: DecoderConfig,
        *,
        merge_qkv: bool,
        kernels: LayerKernels,
        logical: Mapping[str, Sequence[LogicalModule]] = MappingProxyType({}),
        stack: ExpertStack | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.stage = Stage((range(config.num_layers),))
        self.logical = logical
        self.stack = stack
        self.compute_dtype = torch.float32
        self.encoder = None if config.images is None else ImageEncoder(config.images, kernels.image_attention)
        self.model = DecoderTrunk(config, merge_qkv=merge_qkv, kernels=kernels)
        mixtures = [layer.ffn for layer in config.layers if isinstance(layer.ffn, ExpertsConfig)]
        options = RouterLossOptions(balance_coef=config.balance_coef)
        self.routers = RouterLosses(len(mixtures), mixtures[0].num_experts, options) if mixtures else None
        self._mixtures = mixtures
        self.ranks = kernels.tensor
        vocab = Vocabulary(config.vocab_size, self.ranks.group) if self.ranks.size > 1 else None
        self.logits = LogitOptions(softcap=config.logit_softcap, vocab=vocab)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Head.column_parallel(config.hidden_size, [config.vocab_size], bias=False, ranks=self.ranks)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: the units of sharding and of recomputation."""
        return self.model.layers

    @property
    def encoder_layers(self) -> nn.ModuleList:
        """The blocks of the image encoder, which are units of sharding and recomputation too; maybe none."""
        return nn.ModuleList() if self.encoder is None else self.encoder.blocks

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding's weight if tied. Does not include an adapter on the head. Of a last stage only."""
        if self.lm_head is not None:
            return self.lm_head.weight
        if self.model.embed_tokens is None:
            raise AttributeError("head_weight: this stage of a pipeline has no head")
        return self.model.embed_tokens.weight

    def keep(self, stage: Stage) -> None:
        """Drop what other stages of a pipeline have. Call it before parameters get memory."""
        self.stage = stage
        kept = nn.ModuleList()
        for name, layer in self.layers.named_children():
            if any(int(name) in chunk for chunk in stage.chunks):
                kept.add_module(name, layer)
        self.model.layers = kept
        trunk = self.model
        if not stage.is_last:
            self.lm_head = trunk.norm = None
        is_end = stage.is_first or stage.is_last
        if trunk.embed_tokens is not None and is_end and self.config.tie_word_embeddings and not stage.is_whole:
            trunk.embed_tokens.share_between_ends()
            if not stage.is_first:
                trunk.embed_tokens.adapter = None  # the head has none
        elif not stage.is_first:
            trunk.embed_tokens = None
        if not stage.is_first:
            trunk.embed_positions = self.encoder = None

    def received(self, num_tokens: int, num_documents: int, chunk: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of what `forward` takes from the stage before for a chunk: in compute_dtype, then in fp32.

        num_tokens: of this rank between the matrices that ranks share. num_documents: of the row.
        """
        if self.stage.begins(chunk):
            return ()
        hidden = (num_tokens, self.config.hidden_size)
        if self.routers is None or not self.training:
            return (hidden,)
        return hidden, self.routers.shape_of_sums(num_documents)

    def layer_matrices(self) -> dict[str, tuple[int, ...]]:
        """The layers' weight matrices by name, each with the rows of the logical matrices that it stacks."""
        stacked = {
            f"{path}.{name}.weight": tuple(rows)
            for path, module in self.named_modules()
            if isinstance(module, (Attention, GatedDeltaNet, GatedMLP, Experts, ShortConv, StateSpace))
            for name, rows in module.stacked_rows.items()
        }
        stacked |= {
            f"{path}.{name}": tuple(rows)
            for path, module in self.named_modules()
            if (stacking := declared(module, StacksMatrices)) is not None
            for name, rows in stacking.matrix_rows.items()
        }
        matrices = {name for name, role in self.parameter_roles().items() if role in ("dense", "expert", "adapter")}
        return {
            name: stacked.get(name, (parameter.shape[0],))
            for name, parameter in self.named_parameters()
            if name in matrices and name.startswith("model.layers.") and parameter.ndim == 2
        }

    def parameter_roles(self) -> dict[str, Role]:
        """The role of every parameter by name. A module with parameters that declares no roles is an error."""
        roles: dict[str, Role] = {}
        for path, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                declaring, storing = declared(module, DeclaresRoles), declared(module, StoresWeight)
                assert declaring is not None, f"{path}: {type(module).__name__} declares no roles"
                is_stored = storing is not None and name in storing.stored
                role = declaring.roles.get("weight" if is_stored else name)
                assert role is not None, f"{path}: {type(module).__name__} declares no role for {name}"
                roles[f"{path}.{name}"] = role
        return roles

    @overload
    def forward(
        self,
        input_ids: Tensor,
        layout: SequenceLayout,
        loss: None = None,
        *,
        recorded: Tensor | None = None,
        coordinates: Tensor | None = None,
        images: ImageInput | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        input_ids: Tensor,
        layout: SequenceLayout,
        loss: Callable[[Tensor, HeadWeight], ResultT],
        *,
        recorded: Tensor | None = None,
        coordinates: Tensor | None = None,
        images: ImageInput | None = None,
        received: tuple[Tensor, ...] = (),
        chunk: int = 0,
    ) -> ResultT: ...

    def forward(
        self,
        input_ids: Tensor,
        layout: SequenceLayout,
        loss: Callable[[Tensor, HeadWeight], ResultT] | None = None,
        *,
        recorded: Tensor | None = None,
        coordinates: Tensor | None = None,
        images: ImageInput | None = None,
        received: tuple[Tensor, ...] = (),
        chunk: int = 0,
    ) -> ResultT | Tensor | tuple[Tensor, ...]:
        """Logits [T, V] of input_ids [T], or the result of `loss(hidden [T, D], head)` if given.

        The loss is called inside `forward`, because FSDP2 gathers the head's weight only there. With an adapter on the
        head, the hidden states and the weight of the loss are wider than D.

        received, chunk: of a stage of a pipeline, what the stage before returned, and which of its chunks to compute. A
        chunk that does not end with the head returns what the next stage receives.

        recorded: [T, L, K] integers, the experts to send tokens to in each of the L layers with experts, all of a token
        different; -1 for tokens that choose themselves. Raises ValueError for others, and for those of a dense model;
        on devices that the host would wait for, only the shape and dtype are checked.

        coordinates: [T, 3] integers, of tokens on the axes of time, height and width, for models whose rotations have
        axes; None: all are the position. images: of the row, for models with an image encoder; without, the encoder
        is not used.
        """
        if input_ids.device != layout.cu_seqlens.device:
            raise ValueError(
                f"input_ids: on {input_ids.device}, but the layout is on {layout.cu_seqlens.device}; both must be on "
                "the model's device"
            )
        by_layer, mixtures = None, self._mixtures_of(chunk)
        if recorded is not None:
            check_recorded(recorded, input_ids, self._mixtures)
            by_layer = self.ranks.local(recorded)[:, mixtures].transpose(0, 1).contiguous()
        before, *sums = received or (None,)
        layers, is_end = self.stage.chunks[chunk], self.stage.ends(chunk)
        placed = None
        if images is not None and self.stage.begins(chunk):
            if self.encoder is None:
                raise ValueError("images: the model has no image encoder; leave them out")
            placed = self.encoder.placed(images, self.compute_dtype)
        hidden, routes = self.model(
            input_ids, layout, self.compute_dtype, by_layer, before, layers, coordinates=coordinates, placed=placed
        )
        if is_end:
            assert self.model.norm is not None, "the last stage has the norm"
            _, hidden = self.model.norm(hidden)
            if self.config.logit_scale != 1.0:
                hidden = hidden * self.config.logit_scale
        if self.routers is not None:
            self.routers.record(routes)
            if self.training:
                earlier = sums[0] if sums else None
                hidden, *sums = self.routers.add(hidden, routes, layout, place=mixtures, before=earlier, is_last=is_end)
        if not is_end:
            return (hidden, *sums)
        hidden = self.ranks.gather(hidden)
        apply = partial(apply_head, weight=self.head_weight) if self.lm_head is None else self.lm_head
        if loss is None:
            logits = self.ranks.join_columns(apply(hidden, loss=None), self.config.vocab_size)
            return capped(logits, self.logits.softcap).to(logits.dtype) if self.logits.softcap else logits
        return apply(hidden, loss=lambda hidden, weight: loss(hidden, HeadWeight(weight, self.logits)))

    def _mixtures_of(self, chunk: int) -> slice:
        """The layers with experts of a chunk, among all layers with experts."""
        layers, held = self.config.layers, self.stage.chunks[chunk]
        before, own = (
            sum(isinstance(layer.ffn, ExpertsConfig) for layer in part)
            for part in (layers[: held.start], layers[held.start : held.stop])
        )
        return slice(before, before + own)

    @torch.no_grad()
    def init_weights(
        self,
        seed: int,
        *,
        device: torch.device | None = None,
        targets: Mapping[str, RowTarget] = MappingProxyType({}),
        only: Collection[str] | None = None,
    ) -> None:
        """Initialise every parameter, except those of adapters, in place and on its device; each rank its own shards.

        Weights are normal with standard deviation `initializer_range`, norms multiply by one, biases and corrections
        are zero, and modules state the values of scalars and constants. If the config sets scale_residual_init, weights
        of projections into the residual stream are divided by sqrt(2 * num_layers). A value depends only on the seed,
        the parameter's name and global shape, and the element's index: not on other parameters, the ranks, or (up to
        fp32 rounding) the device.

        Args:
            seed: any integer.
            device: where values are computed; None means on each parameter's device.
            targets: by name of each weight that is stored in another format (`StoresWeight`), such as a quantised one:
                the target that receives its values. With targets, the call is collective.
            only: the names of the parameters to initialise; None: all.
        """
        for name, target in targets.items():
            key = key_of(seed, name, target.shape)
            for first, last in target.ranges:
                part = torch.empty((last - first, *target.shape[1:]), device=target.device)
                fill_normal_(part, std=self._std(name), key=key, shape=target.shape, offset=(first, 0), device=device)
                target.put(first, part)
            target.finish()
        stored = {
            f"{path}.{name}"
            for path, module in self.named_modules()
            if (storing := declared(module, StoresWeight)) is not None
            for name in storing.stored
        }
        parameters, shares, stated = dict(self.named_parameters()), shares_of(self), self._stated_values()
        for name, role in self.parameter_roles().items():
            if role == "adapter" or name in stored or (only is not None and name not in only):
                continue
            parameter, share = parameters[name], shares.get(name)
            value = stated.get(name)
            if isinstance(value, (int, float)):
                local(parameter).fill_(value)
                continue
            shape = tuple(parameter.shape) if share is None else share.whole(parameter.shape)
            place = {"key": key_of(seed, name, shape), "shape": shape, "device": device}
            for box, part in pieces(parameter, share):
                if value is None:
                    fill_normal_(part, std=self._std(name), offset=box.offset, **place)
                else:
                    fill_drawn_(part, value, offset=box.offset, **place)

    @torch.no_grad()
    def correct_routers(self, sums: RouterSums, *, skipped: Tensor) -> None:
        """Change the corrections of routers as `RouterLossOptions.correction_rate` says, unless `skipped` is 1.

        sums: of a step, over all ranks.
        """
        assert self.routers is not None, "a dense model has no sums"
        rate = self.routers.options.correction_rate * (1 - skipped)
        for name, layer in self.layers.named_children():
            assert isinstance(layer, DecoderLayer)
            correction = layer.mlp.correction if isinstance(layer.mlp, MixtureOfExperts) else None
            if correction is None:
                continue
            before = self.config.layers[: int(name)]
            load = sums.counts[sum(isinstance(each.ffn, ExpertsConfig) for each in before)]
            change = rate * (load.mean() - load).sign().float()  # [E]
            for box, part in pieces(correction, None):
                part += box.cut(change).to(part.device)

    def _stated_values(self) -> dict[str, InitialValue]:
        """The initial values of parameters that are not normal, by name."""
        by_role: dict[Role, InitialValue] = {"bias": 0.0, "correction": 0.0, "norm": 1.0 - self.config.norm.offset}
        stated = {name: by_role[role] for name, role in self.parameter_roles().items() if role in by_role}
        stated |= {name: 1.0 for name in stated if name.startswith(ENCODER) and name.endswith(".weight")}
        for path, module in self.named_modules():
            if (stating := declared(module, StatesInitialValues)) is not None:
                stated |= {f"{path}.{name}": value for name, value in stating.initial_values.items()}
        return stated

    def _std(self, name: str) -> float:
        std = self.config.initializer_range
        if (
            self.config.scale_residual_init
            and name.startswith("model.layers.")
            and name.endswith((".o_proj.weight", ".out_proj.weight", ".down_proj.weight"))
        ):
            std /= math.sqrt(2 * self.config.num_layers)
        return std


class DecoderTrunk(nn.Module):
    """The decoder without its head: token ids [T] -> normed hidden states [T, D], and routes of layers with experts."""

    def __init__(self, config: DecoderConfig, *, merge_qkv: bool, kernels: LayerKernels) -> None:
        super().__init__()
        self.ranks = kernels.tensor
        self.embed_tokens: Embedding | None = Embedding(
            config.vocab_size, config.hidden_size, config.padding_idx, self.ranks
        )
        self.embed_scale = config.embed_scale
        self.rotaries = {key: Rotary(*key) for each in config.attentions if (key := each.rotary) is not None}
        self.embed_positions = (
            Embedding(config.max_position_embeddings, config.hidden_size) if config.learned_positions else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, merge_qkv=merge_qkv, kernels=kernels.of_layer(index))
            for index in range(config.num_layers)
        )
        self.norm: RMSNorm | LayerNorm | None = make_norm(config.hidden_size, config.norm, kernels)

    def forward(
        self,
        input_ids: Tensor,
        layout: SequenceLayout,
        compute_dtype: torch.dtype,
        recorded: Tensor | None,
        received: Tensor | None,
        layers: range,
        *,
        coordinates: Tensor | None = None,
        placed: PlacedFeatures | None = None,
    ) -> tuple[Tensor, list[LayerRoutes]]:
        """Compute some of the layers.

        recorded: [L, T, K] of these, as for `Decoder.forward`. received: the hidden states [T, D] before the layers;
            None: those of the embedding. placed: of images, in place of the embedding of their tokens.
        """
        if not isinstance(layout, SequenceLayout):
            raise ValueError(
                f"layout must be a SequenceLayout, such as SequenceLayout.from_lengths([5, 3]), got {layout!r}"
            )
        if input_ids.shape != (layout.num_tokens,):
            raise ValueError(
                f"input_ids must be one packed row of the layout's {layout.num_tokens} tokens, "
                f"got shape {list(input_ids.shape)}"
            )
        hidden = self._embed(input_ids, layout, compute_dtype) if received is None else received
        if placed is not None:
            hidden = hidden.index_copy(0, placed.places, placed.features)
        tables = {key: rotary.tables(layout, input_ids.device, coordinates) for key, rotary in self.rotaries.items()}
        routes: list[LayerRoutes] = []
        for index in layers:
            layer = self.layers.get_submodule(str(index))
            assert isinstance(layer, DecoderLayer)
            rope = None if layer.rotary is None else tables[layer.rotary]
            if torch.is_grad_enabled() and not hidden.requires_grad:
                # This may be the first trained layer above frozen ones. Its input must require a gradient like those of
                # later layers: they share compiled code, and reentrant recomputation gives no gradients otherwise.
                hidden.requires_grad_(any(parameter.requires_grad for parameter in layer.parameters()))
            if recorded is None or not layer.has_experts:
                output = layer(hidden, layout.of_layer(index), rope)
            else:
                output = layer(hidden, layout.of_layer(index), rope, recorded[len(routes)])
            if isinstance(output, tuple):
                hidden, layer_routes = output
                routes.append(layer_routes)
            else:
                hidden = output
            if placed is not None and index < len(placed.taps):
                hidden = hidden.index_add(0, placed.places, placed.taps[index])
        return hidden, routes

    def _embed(self, input_ids: Tensor, layout: SequenceLayout, compute_dtype: torch.dtype) -> Tensor:
        assert self.embed_tokens is not None, "this stage begins with what another one computes"
        hidden = self.ranks.scatter(self.embed_tokens(input_ids).to(compute_dtype))  # [T, D]
        if self.embed_scale != 1.0:
            hidden = hidden * torch.tensor(self.embed_scale, dtype=compute_dtype).item()
        if self.embed_positions is None:
            return hidden
        limit = self.embed_positions.num_rows
        if layout.max_seqlen > limit:
            raise ValueError(
                f"a document of {layout.max_seqlen} tokens exceeds the model's {limit} learned positions; "
                f"truncate documents with max_seq_len: {limit} or less"
            )
        return hidden + self.embed_positions(self.ranks.local(layout.positions)).to(compute_dtype)
