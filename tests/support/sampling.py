"""A sampler over a tiny model on the CPU, for the tests of the sampler."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tiny_models import hf_config
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.core.parallel import ParallelModel, ParallelPolicy, parallelize
from xorl.kernels.attention import KeyValueCache, MixedLayout
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import wide_logits
from xorl.server.sampler import Sampler, sampler

CPU = torch.device("cpu")
VOCAB = 61
HF_CONFIG = hf_config(vocab_size=VOCAB, max_position_embeddings=256, initializer_range=0.3)
CAPPED = hf_config("gemma3_text", vocab_size=VOCAB, max_position_embeddings=256, final_logit_softcapping=0.8)
MIXTURE = hf_config("qwen3_moe", vocab_size=VOCAB, max_position_embeddings=256, initializer_range=0.3)


def logits_of(model: ParallelModel, tokens: Sequence[int]) -> Tensor:
    """[T, V]: of what follows each token, computed without a cache."""
    with torch.no_grad():
        return model.module(torch.as_tensor(tokens), SequenceLayout.from_lengths([len(tokens)]))


def decode_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, the tokens of running samples have passes of their own, as on GPUs."""
    monkeypatch.setattr(sampler, "decode_refusal", lambda request: None)
    monkeypatch.setattr(sampler, "DecodePass", PlainDecodePass)


class PlainDecodePass:
    """`DecodePass` by the layout that a CPU has, with a padding row as in a recorded pass."""

    def __init__(self, model: ParallelModel, cache: KeyValueCache, **_: object) -> None:
        self._model = model
        self._cache = cache

    def num_rows(self, num_samples: int) -> int:
        return num_samples + 1

    def logits(
        self,
        tokens: list[int],
        tables: list[list[int]],
        totals: list[int],
        slots: list[int],
        choice: object,
        *,
        records: bool,
    ) -> tuple[Tensor, Tensor | None]:
        spare = self._cache.num_blocks - 1
        tables, totals, slots = [*tables, [spare]], [*totals, 1], [*slots, self._cache.num_slots - 1]
        layout = MixedLayout(self._cache, tables, [1] * len(tables), totals, CPU, slots)
        decoder = self._model.module
        assert isinstance(decoder, Decoder)
        routers = decoder.routers if records else None
        with self._model.generation(keep_gathered=False), nullcontext() if routers is None else routers.recording():
            logits = self._model.forward(torch.tensor([*tokens, 0]), layout, loss=wide_logits)
            return logits[: len(tokens)], None if routers is None else routers.take_routes()


def place(hf_config: dict[str, object] = HF_CONFIG, **policy: object) -> ParallelModel:
    spec = spec_for(hf_config)
    decoder = spec.build(spec.config_from_hf(hf_config), merge_qkv=True, kernels=LayerKernels())
    decoder.init_weights(0)
    mesh = Mesh(ParallelDims.resolve("none", 1, shard_size=-1, replicate_size=-1), "cpu")
    whole = ParallelPolicy(data_parallel_mode="none", **policy)
    return parallelize(decoder, mesh, whole, device=CPU)


def make_sampler(model: ParallelModel, **options: object) -> Sampler:
    return Sampler(model, device=CPU, **{"cache_tokens": 1024, **options})
