"""`xorl chat outputs/my_run`: talks to a saved model in the terminal, or completes the prompts in a file."""

from __future__ import annotations

import json
import math
import secrets
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xorl.cli.arguments import expand_home
from xorl.cli.exit_codes import OK, Terminated
from xorl.cli.rank import run_alone
from xorl.cli.signals import interactive, note_interrupt
from xorl.cli.train import TracebackFlag, let_idle_threads_sleep
from xorl.host.imports import import_torch

if TYPE_CHECKING:
    import torch

    from xorl.server.sampler.saved import Prompts, SamplingOptions, SavedSampler
    from xorl.train.export.source import SavedModel

RESET, EXIT, HELP = "/reset", "/exit", "/help"
ENDS = f"{EXIT} or Ctrl-D ends; Ctrl-C stops an answer."
COMMANDS = f"{RESET} starts a new conversation, {ENDS}"
# Of a model without a chat template, whose lines are no conversation.
PLAIN_COMMANDS = f"Each line is continued as plain text, whatever came before it. {ENDS}"
# The cache for a file's prompts holds at most this many full contexts.
CONTEXTS_OF_FILE = 64

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Device(StrEnum):
    """Devices that a model can be on."""

    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """Dtypes that a model can compute in."""

    fp32 = "fp32"
    bf16 = "bf16"


@dataclass(frozen=True)
class Model:
    """The flags that choose the model."""

    path: str
    base: str | None
    device: Device | None
    dtype: Precision | None


@app.command(name="chat")
def chat_command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A run's folder (for its newest checkpoint), a checkpoint, an adapter or a model: folder or Hub id.",
        ),
    ],
    prompt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=expand_home,
            help="Instead of talking, complete each line of a JSONL file: {messages: [...]}, or {prompt: text}, which "
            "is continued as it is.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of each conversation.")] = None,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 takes the most likely token.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the fewest tokens whose probabilities add up to this.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many most likely tokens. [all]")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer. [as many as the context has room for]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the first answer; each later one has the next number. [random]")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Base model of an adapter: folder or Hub id. [as given in PATH]")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Where the model computes. [a GPU, if there is one]")] = None,
    dtype: Annotated[Precision | None, typer.Option(help="Precision of the model. [bf16 on a GPU, else fp32]")] = None,
    traceback: TracebackFlag = False,
) -> None:
    """Talk to a model in the terminal, in the conversations of its chat template.

    An adapter is merged into its base. A model without a chat template continues each line as plain text. With
    --prompt, each line of the file is printed with the keys generated and finish_reason (stop, or length).
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"--temperature: {temperature}, want a finite number of 0 or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p: {top_p}, want a number above 0 and at most 1")
    model, drawn = Model(path, base, device, dtype), secrets.randbelow(2**31) if seed is None else seed
    let_idle_threads_sleep()

    def run() -> int:
        import_torch()
        from xorl.server.sampler.saved import SamplingOptions  # noqa: PLC0415

        options = SamplingOptions(temperature, top_k, top_p, max_tokens)
        with _one_rank(model.device) as place:
            if prompt is None:
                return _talk(model, place, options, drawn, system)
            return _complete(model, place, options, drawn, system, prompt)

    raise typer.Exit(run_alone(run, with_traceback=traceback))


@contextmanager
def _one_rank(device: Device | None) -> Iterator[torch.device]:
    """Makes this process the only rank of a group, as the model's code needs; yields its device."""
    import torch  # noqa: PLC0415

    from xorl.core import runtime  # noqa: PLC0415

    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("--device: cuda, but torch finds no GPU here; use cpu")
    # torch warns when a checkpoint is read without other ranks, which is intended here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    place = runtime.init("auto" if device is None else device.value)
    try:
        yield place.device
    finally:
        runtime.shutdown()


def _talk(model: Model, place: torch.device, options: SamplingOptions, seed: int, system: str | None) -> int:
    saved, prompts = _open(model)
    if system is not None and not prompts.has_template:
        raise ValueError("--system: the model has no chat template, so it has no system message; remove --system")
    sampler = _load(saved, prompts, place, model.dtype, num_contexts=1)
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415  (lets `input` edit the line, where Python has it)
    if prompts.has_template:
        _note(COMMANDS)
    else:
        _note(f"The model has no chat template. {PLAIN_COMMANDS}")
    with interactive():
        return _Talk(prompts, sampler, options, seed, system).run()


class _Talk:
    """A conversation in the terminal: questions on standard input, answers on standard output, the rest on error."""

    def __init__(
        self, prompts: Prompts, sampler: SavedSampler, options: SamplingOptions, seed: int, system: str | None
    ) -> None:
        self._prompts = prompts
        self._sampler = sampler
        self._options = options
        self._seed = seed
        self._start: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._commands = COMMANDS if prompts.has_template else PLAIN_COMMANDS

    def run(self) -> int:
        is_terminal = sys.stdin.isatty()
        while True:
            try:
                line = input("> " if is_terminal else "")
            except EOFError:
                return OK
            except Terminated:
                raise
            except KeyboardInterrupt:
                _note(f"\n{EXIT} or Ctrl-D ends.")
                continue
            command = line.strip()
            if command == EXIT:
                return OK
            if command == RESET and self._prompts.has_template:
                self._messages = list(self._start)
            elif command == HELP:
                _note(self._commands)
            elif command.startswith("/") and command[1:].isalpha():
                _note(f"There is no command {command}. {self._commands}")
            elif command:
                self._answer(line)

    def _answer(self, line: str) -> None:
        from xorl.data.formats.messages import Conversation  # noqa: PLC0415

        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            if self._prompts.has_template:
                prompt = self._prompts.of_conversation(Conversation(messages, None, ()))
            else:
                prompt = self._prompts.of_text(line)
            request = self._sampler.request(prompt, self._options, self._seed)
        except ValueError as error:
            _note(f"{error}. {RESET} starts a new conversation." if self._prompts.has_template else f"{error}.")
            return
        self._seed += 1
        with note_interrupt() as is_interrupted:
            answer = self._sampler.answer(request, lambda text: print(text, end="", flush=True), is_interrupted)
        print(flush=True)
        if answer.finish_reason == "interrupted":
            _note("[stopped]")
        elif answer.finish_reason == "length":
            is_full = answer.num_tokens != self._options.max_tokens
            _note(f"[cut off: {'the context is full' if is_full else '--max-tokens'}]")
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]


def _complete(
    model: Model, place: torch.device, options: SamplingOptions, seed: int, system: str | None, file: Path
) -> int:
    """Print each line of `file` with its completion, in the order of the file and as soon as it is there."""
    from xorl.server.sampler.prompt_file import complete, read_prompts  # noqa: PLC0415

    saved, prompts = _open(model)
    lines = read_prompts(file, prompts, system)
    sampler = _load(saved, prompts, place, model.dtype, num_contexts=CONTEXTS_OF_FILE)
    for row in complete(lines, sampler, options, seed):
        print(json.dumps(row, ensure_ascii=False), flush=True)
    return OK


def _open(model: Model) -> tuple[SavedModel, Prompts]:
    """The model without its weights, and its tokenizer."""
    from xorl.server.sampler.saved import Prompts  # noqa: PLC0415
    from xorl.train.export.source import open_model  # noqa: PLC0415
    from xorl.train.observe.progress import set_up_logging  # noqa: PLC0415

    set_up_logging("progress_bar", "WARNING", is_main=True)
    saved = open_model(model.path, model.base)
    return saved, Prompts(saved.architecture)


def _load(
    saved: SavedModel, prompts: Prompts, place: torch.device, dtype: Precision | None, *, num_contexts: int
) -> SavedSampler:
    from xorl.server.sampler.saved import SavedSampler  # noqa: PLC0415

    precision = ("bf16" if place.type == "cuda" else "fp32") if dtype is None else dtype.value
    sampler = SavedSampler(saved, prompts, device=place, precision=precision, num_contexts=num_contexts)
    step = "" if saved.step is None else f" at step {saved.step}"
    adapter = "" if saved.adapter is None else f", with its adapter merged into {saved.base_path or 'its base'}"
    _note(f"{saved.folder}{step}{adapter}; {precision} on {place}, {sampler.sampler.limit} tokens of context")
    return sampler


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
