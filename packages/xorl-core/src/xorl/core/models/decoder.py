"""The one decoder that all families are: embedding, layers of attention and feed-forward, norm, head.

Shapes: T tokens, D model width, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.nn import (
    Attention,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    PlainMLP,
    RMSNorm,
    RopeTables,
    Rotary,
)
from xorl.kernels.attention import AttentionFn
from xorl.kernels.layout import SequenceLayout

ResultT = TypeVar("ResultT")


class Decoder(nn.Module):
    """A causal language model over packed rows.

    The embedding's output is cast to `compute_dtype` and every layer follows the dtype of its input, so the dtype of
    the parameters is free. There is no dropout anywhere.

    Attributes:
        config: what was built.
        compute_dtype: dtype of activations; set it before the first forward pass.
    """

    compute_dtype: torch.dtype

    def __init__(self, config: DecoderConfig, *, merge_qkv: bool, attention: AttentionFn) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.model = DecoderTrunk(config, merge_qkv=merge_qkv, attention=attention)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: the units of sharding and of recomputation."""
        return self.model.layers

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding's own weight when tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @overload
    def forward(self, input_ids: Tensor, layout: SequenceLayout, loss: None = None) -> Tensor: ...

    @overload
    def forward(
        self, input_ids: Tensor, layout: SequenceLayout, loss: Callable[[Tensor, Tensor], ResultT]
    ) -> ResultT: ...

    def forward(
        self,
        input_ids: Tensor,
        layout: SequenceLayout,
        loss: Callable[[Tensor, Tensor], ResultT] | None = None,
    ) -> ResultT | Tensor:
        """Logits [T, V] of input_ids [T], or what `loss(hidden [T, D], head_weight [V, D])` returns.

        The loss is called in here so that whoever gathers parameters around `forward` has the head's gathered too.
        """
        hidden = self.model(input_ids, layout, self.compute_dtype)
        if loss is not None:
            return loss(hidden, self.head_weight)
        return F.linear(hidden, self.head_weight.to(hidden.dtype))

    @torch.no_grad()
    def init_weights(self, seed: int, *, copy_: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Give every parameter its initial value, in place, on whatever device it is.

        Weights are normal with standard deviation `initializer_range` (smaller by sqrt(2 * num_layers) for the
        projections into the residual stream where the config says so), norms one, biases zero. A parameter's values
        depend only on the seed, its name and its global shape: not on the device, the other parameters or the ranks.

        Args:
            seed: any integer.
            copy_: (parameter, full CPU tensor of the parameter's global shape) -> writes it into the parameter. The
                default is for whole parameters; for shards, pass a function that copies the rows the shard holds.
        """
        for module_name, module in self.named_modules():
            for leaf_name, parameter in module.named_parameters(recurse=False):
                name = f"{module_name}.{leaf_name}"
                copy_(parameter, self._initial_value(name, module, parameter.shape, seed))

    def _initial_value(self, name: str, module: nn.Module, shape: torch.Size, seed: int) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, device="cpu")
        if isinstance(module, (RMSNorm, LayerNorm)):
            return torch.ones(shape, device="cpu")
        std = self.config.initializer_range
        if self.config.scale_residual_init and name.endswith((".o_proj.weight", ".down_proj.weight")):
            std /= math.sqrt(2 * self.config.num_layers)
        generator = torch.Generator("cpu").manual_seed(_seed_of(seed, name, shape))
        return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, std, generator=generator)


class DecoderTrunk(nn.Module):
    """Everything but the head: token ids [T] -> normed hidden states [T, D]."""

    def __init__(self, config: DecoderConfig, *, merge_qkv: bool, attention: AttentionFn) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = None if config.rope is None else Rotary(config.rope, config.head_dim)
        self.embed_positions = (
            Embedding(config.max_position_embeddings, config.hidden_size) if config.rope is None else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, merge_qkv=merge_qkv, attention=attention) for index in range(config.num_layers)
        )
        self.norm = _norm(config)

    def forward(self, input_ids: Tensor, layout: SequenceLayout, compute_dtype: torch.dtype) -> Tensor:
        if input_ids.shape != (layout.num_tokens,):
            raise ValueError(
                f"input_ids must be one packed row of the layout's {layout.num_tokens} tokens, "
                f"got shape {list(input_ids.shape)}"
            )
        hidden = self.embed_tokens(input_ids).to(compute_dtype)  # [T, D]
        if self.embed_positions is not None:
            limit = self.embed_positions.num_rows
            if layout.max_seqlen > limit:
                raise ValueError(
                    f"a document of {layout.max_seqlen} tokens does not fit the model's {limit} learned positions; "
                    f"cut documents to max_seq_len: {limit} or less"
                )
            hidden = hidden + self.embed_positions(layout.positions).to(compute_dtype)
        rope = None if self.rotary is None else self.rotary.tables(layout, input_ids.device)
        for layer in self.layers:
            hidden = layer(hidden, layout, rope)
        return self.norm(hidden)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed residual stream and added to it, [T, D] -> [T, D]."""

    def __init__(self, config: DecoderConfig, index: int, *, merge_qkv: bool, attention: AttentionFn) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scales[index],
            window=config.windows[index],
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            merge_qkv=merge_qkv,
            attention=attention,
        )
        self.post_attention_layernorm = _norm(config)
        mlp_class = GatedMLP if config.mlp == "gated" else PlainMLP
        self.mlp = mlp_class(
            config.hidden_size, config.intermediate_size, activation=config.activation, bias=config.mlp_bias
        )

    def forward(self, hidden: Tensor, layout: SequenceLayout, rope: RopeTables | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), layout, rope)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    norm_class = RMSNorm if config.norm == "rms" else LayerNorm
    return norm_class(config.hidden_size, config.norm_eps)


def _seed_of(seed: int, name: str, shape: torch.Size) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{tuple(shape)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
