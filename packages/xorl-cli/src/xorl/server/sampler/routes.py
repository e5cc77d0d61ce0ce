"""The experts of a sample's tokens, collected over the passes that compute them.

Shapes: T tokens of a pass, P tokens of a prompt, N tokens of a sample, L layers with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xorl.server.sampler.edits import LogitEdits
from xorl.server.sampler.request import GenerationRequest
from xorl.server.sampler.scheduler import Continuation, TokenSpan


def continuation_of(request_id: int, index: int, request: GenerationRequest) -> Continuation:
    """A sample of a request that has computed nothing. The first one scores and routes the prompt."""
    one = Continuation(request_id, index, request, list(request.prompt), None if index else request.first_scored)
    if request.prompt_routes and index == 0:
        one.routes = []
    elif request.sample_routes and request.max_tokens:
        one.routes, one.first_routed = [], len(request.prompt) - 1
    if request.edits is not None and request.max_tokens:
        first = len(request.prompt) - request.num_continued
        one.edits = LogitEdits(request.edits, request.prompt[:first], request.prompt[first:])
    return one


def need_routes(spans: Sequence[TokenSpan]) -> bool:
    """Whether a pass must record the routes of its tokens."""
    return any(span.continuation.routes is not None for span in spans)


def add_routes(spans: Sequence[TokenSpan], routes: Tensor | None) -> None:
    """Give each span its rows of the routes of a pass, [T, L, K], if it recorded them."""
    if routes is None:
        return
    on_host, first = routes.to(torch.int16).cpu().numpy(), 0
    for span in spans:
        end = first + span.stop - span.start
        span.continuation.add_routes(on_host[first:end], span.start)
        first = end


def prompt_routes(continuation: Continuation) -> NDArray[np.int16] | None:
    """`GenerationResult.prompt_routes`, from the first sample of a finished request."""
    if not continuation.request.prompt_routes or continuation.routes is None:
        return None
    return np.concatenate(continuation.routes)[: len(continuation.request.prompt) - 1]


def sample_routes(continuation: Continuation) -> NDArray[np.int16] | None:
    """`GeneratedSample.routes` of a finished sample."""
    if not continuation.request.sample_routes or continuation.routes is None:
        return None
    first = len(continuation.request.prompt) - 1 - continuation.first_routed
    return np.concatenate(continuation.routes)[first:]
