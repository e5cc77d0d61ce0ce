"""`xorl chat` on a run, its export, an adapter and a base: its answers are those of transformers, from all of them."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from saved_models import save_model
from tiny_models import hf_config
from tiny_runs import QUICKSTART, run_values, write_counting_rows
from workspace import ROOT
from xorl.cli.chat import app
from xorl.cli.signals import interactive, note_interrupt
from xorl.config import config_from_mapping
from xorl.core import runtime
from xorl.server.sampler.saved import Prompts, SamplingOptions, SavedSampler
from xorl.train.export.saved import export_saved
from xorl.train.export.source import open_model
from xorl.train.run import run_training

TOKENS = 12
GREEDY = ("--temperature", "0", "--max-tokens", str(TOKENS))


def chat(path: Path, *flags: str, said: str = "") -> Result:
    return CliRunner().invoke(app, [str(path), "--device", "cpu", *flags], input=said)


def answers(path: Path, *flags: str, said: str) -> list[str]:
    result = chat(path, *flags, said=said)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, with a tokenizer without a template; `full` and `lora`, runs that began with it and have a template."""
    root = tmp_path_factory.mktemp("chat")
    save_model(root / "base", hf_config(vocab_size=288, max_position_embeddings=256, eos_token_id=0))
    (root / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, root / "tokenizer")
        shutil.copy(QUICKSTART / name, root / "base")
    shutil.copy(ROOT / "configs" / "local" / "chat.jinja", root / "tokenizer" / "chat_template.jinja")
    write_counting_rows(root / "train.jsonl", 16)
    model = {"model_path": str(root / "base"), "tokenizer_path": str(root / "tokenizer")}
    lora = {"enable_lora": True, "lora_rank": 4, "save_lora_only": True}
    for name, adapters in (("full", {}), ("lora", lora)):
        options = {"data_parallel_mode": "none", "max_steps": 3, "lr": 0.02, "save_hf_weights": False}
        loaded = config_from_mapping(run_values(root, root / name, model=model, lora=adapters, **options))
        assert run_training(loaded) == 0
    return root


def generated(folder: Path, text: str) -> str:
    """What transformers generates greedily after a text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_run_and_its_export_answer_as_transformers_does(folders: Path, tmp_path: Path) -> None:
    # Catches another template, history or end token than the model was trained with, and weights of another model.
    exported = export_saved(str(folders / "full"), str(tmp_path / "exported"))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    turns = ["copy AB =", "sort 31 ="]
    messages = [{"role": "system", "content": "Be short."}]
    expected = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected.append(generated(exported, text))
        messages.append({"role": "assistant", "content": expected[-1]})
    said = "\n".join([*turns, "/reset", turns[0], ""])
    for path in (folders / "full", exported):
        found = chat(path, *GREEDY, "--system", "Be short.", said=said)
        assert found.exit_code == 0, found.output
        assert found.stdout == "".join(f"{text}\n" for text in [*expected, expected[0]])
    assert "at step 3; fp32 on cpu" in chat(folders / "full", *GREEDY, said="/exit\nnot said").stderr


def test_an_adapter_answers_as_its_merged_export(folders: Path, tmp_path: Path) -> None:
    # Catches an adapter that is not merged, so that the base answers.
    merged = export_saved(str(folders / "lora"), str(tmp_path / "merged"), merge=True)
    adapter = export_saved(str(folders / "lora"), str(tmp_path / "adapter"))
    flags = ("--seed", "7", "--top-k", "50", "--top-p", "0.9", "--max-tokens", "16")
    one, two, three = (answers(path, *flags, said="copy AB =\n") for path in (folders / "lora", merged, adapter))
    assert one == two == three
    base = tmp_path / "base"
    shutil.copytree(folders / "base", base)
    shutil.copy(folders / "tokenizer" / "chat_template.jinja", base)
    assert one != answers(base, *flags, said="copy AB =\n")


def test_a_base_model_continues_plain_text(folders: Path) -> None:
    result = chat(folders / "base", *GREEDY, said="copy AB =\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == generated(folders / "base", "copy AB =") + "\n"
    assert "has no chat template. Each line is continued as plain text" in result.stderr
    # Nothing is advertised that does nothing here.
    helped = chat(folders / "base", *GREEDY, said="/help\n/reset\n").stderr
    assert helped.count("/reset") == helped.count("There is no command /reset.") == 1
    refused = chat(folders / "base", "--system", "Be short.")
    assert (refused.exit_code, "--system: the model has no chat template" in refused.stderr) == (2, True)


def test_each_line_of_a_file_is_completed(folders: Path, tmp_path: Path) -> None:
    # Catches lines that are lost, change places or lose what they hold, and a text that is put into a template.
    rows = [
        {"id": 7, "messages": [{"role": "user", "content": "copy AB ="}]},
        {"prompt": "copy AB =", "completion": " AB"},
        {"prompt": [{"role": "user", "content": "sort 31 ="}]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    found = [json.loads(line) for line in answers(folders / "full", *GREEDY, "--prompt", str(file), said="")]
    assert [{key: row[key] for key in row if key not in ("generated", "finish_reason")} for row in found] == rows
    exported = export_saved(str(folders / "full"), str(tmp_path / "exported"))
    texts = ["user: copy AB =", "copy AB =", "user: sort 31 ="]
    assert [row["generated"] for row in found] == [generated(exported, text) for text in texts]
    assert {row["finish_reason"] for row in found} <= {"stop", "length"}
    # Line i of a file has the seed of answer i of a conversation.
    drawn = [answers(folders / "full", "--prompt", str(file), "--seed", seed, said="") for seed in ("3", "3", "4")]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_is_wrong_with_a_file_is_said_by_line(folders: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [
        ('{"prompt": "a"', "is not JSON"),
        ('["a"]', "is list, want a JSON object"),
        ('{"text": "a"}', "has neither 'messages' nor 'prompt'; its keys are: text"),
        ('{"prompt": 3}', "'prompt' is int, want a text or a list of messages"),
        ('{"prompt": "a", "generated": "b"}', "has the key 'generated'"),
        ('{"prompt": "a", "messages": []}', "has both 'prompt' and 'messages'"),
        (json.dumps({"messages": answered}), "the last message has role assistant"),
        (json.dumps({"messages": answered[:1], "chat_template_kwargs": {"no": 1}}), "has no variable 'no'"),
        (json.dumps({"prompt": "a" * 300}), "the prompt has 300 tokens, but there is room for 256"),
    ]
    for line, problem in lines:
        file.write_text(f'{{"prompt": "a"}}\n{line}\n')
        result = chat(folders / "full", "--prompt", str(file))
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--prompt: {file}:2: " in result.stderr
        assert problem in result.stderr
    file.write_text("\n")
    assert "has no lines" in chat(folders / "full", "--prompt", str(file)).stderr


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--temperature", "-1"), "--temperature: -1.0, want a finite number"),
        (("--top-p", "0"), "--top-p: 0.0, want a number above 0"),
        (("--base", "org/other"), "--base: .* is a whole model, not an adapter"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: tuple[str, ...], problem: str, folders: Path) -> None:
    result = chat(folders / "base", *flags)
    # The command's `main` prints an error that is raised before the process is set up.
    raised = result.stderr if isinstance(result.exception, SystemExit) else str(result.exception)
    assert re.search(problem, raised)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    result = chat(tmp_path)
    assert result.exit_code == 2
    assert f"PATH: {tmp_path} is not a model (config.json), an adapter" in result.stderr


def test_an_interrupted_answer_keeps_its_text(folders: Path) -> None:
    # Catches a request that goes on in the cache, and an answer that differs from the part of it that was shown.
    place = runtime.init("cpu")
    try:
        saved = open_model(str(folders / "full"))
        prompts = Prompts(saved.architecture)
        sampler = SavedSampler(saved, prompts, device=place.device, precision="fp32", num_contexts=1)
        request = sampler.request(prompts.of_text("copy AB ="), SamplingOptions(0.0, max_tokens=TOKENS), 0)
        shown: list[str] = []
        whole = sampler.answer(request, shown.append)
        assert "".join(shown) == whole.text
        asked = iter([False, False, True])
        part = sampler.answer(request, is_interrupted=lambda: next(asked))
        assert (part.num_tokens, part.finish_reason) == (3, "interrupted")
        assert whole.text.startswith(part.text)
        assert sampler.sampler.num_pending == 0
        assert sampler.answer(request) == whole
        # An end token ends an answer and is not shown.
        ((sample,),) = (result.samples for result in sampler.sampler.run([request]))
        number = next(
            index for index, token in enumerate(sample.tokens) if index and token not in sample.tokens[:index]
        )
        prompts.ends = (sample.tokens[number],)
        ended = sampler.answer(sampler.request(request.prompt, SamplingOptions(0.0, max_tokens=TOKENS), 0))
        assert ended == (prompts.decode(sample.tokens[:number]), number + 1, "stop")
    finally:
        runtime.shutdown()


def test_ctrl_c_stops_an_answer_and_not_the_program() -> None:
    with interactive():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with note_interrupt() as is_interrupted:
            assert not is_interrupted()
            signal.raise_signal(signal.SIGINT)
            assert is_interrupted()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
