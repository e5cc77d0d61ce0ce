"""Samples text from a saved model in this process: its prompts, its weights on one device, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import nn

from xorl.ckpt import load_weights
from xorl.config.local import LoraConfig, ModelConfig, TrainConfig
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder
from xorl.data.errors import DataError
from xorl.data.formats import TextTokenizer, load_tokenizer
from xorl.data.formats.messages import Conversation
from xorl.data.formats.pictures import has_images
from xorl.data.formats.template import ChatTemplate, TemplateRefusal, load_template
from xorl.server.sample_text import TextStream
from xorl.server.sampler.cache_size import default_cache_tokens
from xorl.server.sampler.request import DIVERGED, GenerationRequest, GenerationResult
from xorl.server.sampler.sampler import Sampler
from xorl.train.architecture import Architecture
from xorl.train.end_tokens import end_tokens_of
from xorl.train.export.source import SavedModel
from xorl.train.model import build_model

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class SamplingOptions:
    """How to draw answers; see `GenerationRequest`. max_tokens: None fills the context."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    max_tokens: int | None = None


class Answer(NamedTuple):
    """A sampled text, without the token that ended it, and why it ended; length: by max_tokens or a full context."""

    text: str
    num_tokens: int
    finish_reason: Literal["stop", "length", "interrupted"]


class Prompts:
    """Encodes prompts for a saved model and decodes its answers.

    Raises ValueError if the model has no tokenizer.
    """

    def __init__(self, architecture: Architecture) -> None:
        folder = architecture.tokenizer_folder
        if folder is None:
            raise ValueError(
                "PATH: the model has no tokenizer, which text needs: train with model.tokenizer_path, or add the "
                "tokenizer's files to an export"
            )
        try:
            self.tokenizer: TextTokenizer = load_tokenizer(folder)
        except DataError as error:
            raise ValueError(f"PATH: {error}") from error
        self.ends = end_tokens_of(architecture)
        self._trained_template = architecture.chat_template

    @cached_property
    def has_template(self) -> bool:
        """Whether the model can continue conversations: it was trained with a template, or its tokenizer has one."""
        return self._trained_template is not None or "default" in self.tokenizer.templates

    def of_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that the model is to continue as it is."""
        return tuple(self.tokenizer.core.encode(self.tokenizer.begin_of(text) + text, add_special_tokens=False).ids)

    def of_conversation(self, conversation: Conversation) -> tuple[int, ...]:
        """Token ids of a conversation, ending with the template's prompt for an answer.

        Raises ValueError if there is no template, if it rejects the messages, or if they have more than text.
        """
        if not self.has_template:
            raise ValueError("the model has no chat template, so it can only continue plain text")
        if has_images(conversation, ()):
            raise ValueError("a message has an image, but the embedded sampler reads only text")
        template = self._template(with_tools=conversation.tools is not None, kwargs=conversation.template_kwargs)
        if unknown := sorted(conversation.template_kwargs.keys() - template.variables):
            raise ValueError(f"chat_template_kwargs: the model's chat template has no variable {unknown[0]!r}")
        try:
            text = template.render(conversation.messages, conversation.tools, add_generation_prompt=True)
        except TemplateRefusal as refusal:
            raise ValueError(f"the model's chat template refuses the messages: {refusal}") from refusal
        return tuple(self.tokenizer.core.encode(text, add_special_tokens=False).ids)

    def _template(self, *, with_tools: bool, kwargs: Mapping[str, object]) -> ChatTemplate:
        if self._trained_template is None:
            return load_template("PATH", None, self.tokenizer, with_tools=with_tools, kwargs=kwargs)
        return ChatTemplate(self._trained_template, self.tokenizer.special, "the model's chat template", kwargs)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return self.tokenizer.core.decode(list(tokens), skip_special_tokens=True)


class SavedSampler:
    """A saved model on one device, with an adapter merged into it, and its sampler. Needs a process group of one rank.

    num_contexts: of how many full contexts the cache holds the keys and values, if they fit (`default_cache_tokens`).
    """

    def __init__(
        self, saved: SavedModel, prompts: Prompts, *, device: torch.device, precision: Precision, num_contexts: int
    ) -> None:
        self._prompts = prompts
        recipes = saved.architecture.recipes(merge_qkv=True)

        def fill(module: nn.Module) -> None:
            load_weights(dict(module.named_parameters()), recipes, saved.weights)

        mesh = Mesh(ParallelDims(), device.type)
        train = TrainConfig(
            output_dir=str(saved.folder),  # required; nothing is written
            data_parallel_mode="none",
            enable_gradient_checkpointing=False,
            enable_mixed_precision=precision == "bf16",
            param_dtype=precision,
        )
        model = build_model(saved.architecture, ModelConfig(), train, LoraConfig(), mesh, device, fill)
        assert isinstance(model.module, Decoder)
        model.module.eval()
        cache_tokens = default_cache_tokens(model.module, device, num_contexts)
        self.sampler = Sampler(model, device=device, cache_tokens=cache_tokens)

    def request(self, prompt: tuple[int, ...], options: SamplingOptions, seed: int) -> GenerationRequest:
        """The request for one answer, of at most as many tokens as the context has room for.

        Raises ValueError if there is no room for any, or if the prompt is empty.
        """
        room = self.sampler.limit - len(prompt) + 1
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} tokens, but there is room for {self.sampler.limit}")
        return GenerationRequest(
            prompt,
            room if options.max_tokens is None else min(options.max_tokens, room),
            seed=seed,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop=tuple((token,) for token in self._prompts.ends),
        )

    def answer(
        self,
        request: GenerationRequest,
        show: Callable[[str], object] = lambda text: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Sample an answer, passing its text to `show` as it grows; `is_interrupted` is asked after each token.

        Raises ValueError if the model computes NaN.
        """
        stream, text, num_tokens = TextStream(self._prompts.decode, ()), "", 0
        request_id = self.sampler.submit(request)
        try:
            while not (finished := self.sampler.step()):
                tokens, is_last = self.sampler.sampled(request_id)[0], is_interrupted()
                show(new := stream.add(tokens[num_tokens:], is_last=is_last))
                text, num_tokens = text + new, len(tokens)
                if is_last:
                    return Answer(text, num_tokens, "interrupted")
        finally:
            self.sampler.cancel(request_id)
        answer = self.answer_of(request, finished[0])
        show(answer.text[len(text) :])
        return answer

    def answer_of(self, request: GenerationRequest, result: GenerationResult) -> Answer:
        """The answer in the sampler's result for a request. Raises ValueError if the model computes NaN."""
        if result.has_diverged(request):
            raise ValueError(DIVERGED)
        (sample,) = result.samples
        is_stopped = sample.finish_reason == "stop"
        text = TextStream(self._prompts.decode, ()).add(sample.tokens, is_last=True, is_stopped=is_stopped)
        return Answer(text, len(sample.tokens), sample.finish_reason)
