"""A layer of the decoder: attention or a recurrence, a feed-forward block, or both, with norms and residuals.

Shapes: T tokens, D model width.
"""

from types import MappingProxyType

import torch
from torch import Tensor, nn

from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig, Recurrence
from xorl.core.nn import Attention, AttentionConfig, GatedMLP, LayerKernels, LayerNorm, PlainMLP, RMSNorm
from xorl.core.nn.gated_delta_net import GatedDeltaConfig, GatedDeltaNet
from xorl.core.nn.latent import LatentAttention
from xorl.core.nn.moe import LayerRoutes, MixtureOfExperts
from xorl.core.nn.norms import NormConfig, make_norm
from xorl.core.nn.short_conv import ShortConv, ShortConvConfig
from xorl.core.nn.state_space import StateSpace
from xorl.kernels.fused import RopeTables
from xorl.kernels.layout import SequenceLayout


class DecoderLayer(nn.Module):
    """Attention or a recurrence, then feed-forward, or one of these, with norms and residual connections.

    [T, D] -> [T, D]. A layer with experts returns its routes too.

    Attributes:
        layer_scalar: a factor on the output, which is not trained; None without one.
        has_experts: whether this is a layer with experts.
        rotary: the rotary embedding of its attention.
        self_attn, linear_attn: its attention, or its recurrence; both are None in a layer of feed-forward alone.
        mlp: its feed-forward block; None in a layer of a mixer alone.
        input_layernorm: of the input of the layer's first block.
    """

    roles = MappingProxyType({"layer_scalar": "scalar"})
    initial_values = MappingProxyType({"layer_scalar": 1.0})

    def __init__(self, config: DecoderConfig, index: int, *, merge_qkv: bool, kernels: LayerKernels) -> None:
        super().__init__()
        width, layer = config.hidden_size, config.layers[index]
        mixer, norms = layer.mixer, layer.norms

        def norm(*, exists: bool) -> RMSNorm | LayerNorm | None:
            return make_norm(width, config.norm, kernels) if exists else None

        self.add = kernels.add
        self.residual_scale = config.residual_scale
        self.is_parallel = norms == "parallel"
        self.input_layernorm = norm(exists=norms != "post")
        self.self_attn = self.linear_attn = None
        if isinstance(mixer, AttentionConfig):
            self.self_attn = (
                Attention(width, mixer, config.norm, merge_qkv=merge_qkv, kernels=kernels)
                if mixer.latent is None
                else LatentAttention(width, mixer, kernels=kernels)
            )
        elif mixer is not None:
            self.linear_attn = _recurrence(width, mixer, config.norm.eps, kernels)
        self.attention_output_norm = norm(exists=norms in ("post", "sandwich"))
        has_both = mixer is not None and layer.ffn is not None
        self.post_attention_layernorm = norm(exists=norms in ("pre", "sandwich") and has_both)
        self.mlp = None if layer.ffn is None else _feed_forward(width, layer.ffn, config.norm, kernels)
        self.mlp_output_norm = norm(exists=norms in ("post", "sandwich"))
        self.has_experts = isinstance(self.mlp, MixtureOfExperts)
        self.rotary = None if mixer is None else mixer.rotary
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False) if layer.output_scale else None

    def forward(
        self, hidden: Tensor, layout: SequenceLayout, rope: RopeTables | None, recorded: Tensor | None = None
    ) -> Tensor | tuple[Tensor, LayerRoutes]:
        """recorded: of a layer with experts, as for `MixtureOfExperts.forward`."""
        hidden, normed = (hidden, hidden) if self.input_layernorm is None else self.input_layernorm(hidden)
        mixer = self.linear_attn if self.self_attn is None else self.self_attn
        if mixer is not None:
            attended = self._scaled(mixer(normed, layout, rope), self.attention_output_norm)
            if self.mlp is None:
                return self.add(hidden, attended)
            if self.post_attention_layernorm is not None:
                hidden, normed = self.post_attention_layernorm(attended, residual=hidden)
            else:
                hidden = self.add(hidden, attended)
                normed = normed if self.is_parallel else hidden
        assert self.mlp is not None, "each layer has a block"
        routes = None
        if isinstance(self.mlp, MixtureOfExperts):
            out, routes = self.mlp(normed, layout.rows, recorded, hidden)
        else:
            out = self.mlp(normed)
        hidden = self.add(hidden, self._scaled(out, self.mlp_output_norm))
        if self.layer_scalar is not None:
            hidden = hidden * self.layer_scalar.to(hidden.dtype)
        return hidden if routes is None else (hidden, routes)

    def _scaled(self, out: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """The output of a block, as it is added to the residual stream."""
        if norm is not None:
            _, out = norm(out)
        return out if self.residual_scale == 1.0 else out * self.residual_scale


def _recurrence(
    width: int, mixer: Recurrence, eps: float, kernels: LayerKernels
) -> GatedDeltaNet | ShortConv | StateSpace:
    if isinstance(mixer, GatedDeltaConfig):
        return GatedDeltaNet(width, mixer, eps, kernels=kernels)
    if isinstance(mixer, ShortConvConfig):
        return ShortConv(width, mixer, kernels=kernels)
    return StateSpace(width, mixer, eps, kernels=kernels)


def _feed_forward(
    width: int, ffn: DenseConfig | ExpertsConfig, norm: NormConfig, kernels: LayerKernels
) -> GatedMLP | PlainMLP | MixtureOfExperts:
    if isinstance(ffn, ExpertsConfig):
        return MixtureOfExperts(
            width,
            ffn.width,
            num_experts=ffn.num_experts,
            num_active=ffn.num_active,
            router=ffn.router,
            kernels=kernels,
            gate=ffn.gate,
            bias=ffn.bias,
            shared=None if ffn.shared is None else _feed_forward(width, ffn.shared, norm, kernels),
            shared_gate=ffn.shared_gate,
            own_norm=norm if ffn.own_norms else None,
            latent_width=ffn.latent,
            latent_bias=ffn.latent_bias,
        )
    if ffn.kind == "gated":
        return GatedMLP(width, ffn.width, activation=ffn.activation, bias=ffn.bias, kernels=kernels)
    return PlainMLP(width, ffn.width, activation=ffn.activation, bias=ffn.bias, ranks=kernels.tensor)
