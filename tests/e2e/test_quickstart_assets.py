"""What the quickstart ships is what its tool makes, says what it claims, and fits together."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from make_quickstart import IGNORE, OUT, SEED, TASKS, write_quickstart
from workspace import ROOT
from xorl.config import load_config
from xorl.core.models import spec_for

CONFIG = ROOT / "configs" / "quickstart.yaml"
SPLITS = ("train.jsonl", "heldout.jsonl")


@pytest.fixture(scope="module")
def datasets():
    return {name: [json.loads(line) for line in (OUT / name).read_text().splitlines()] for name in SPLITS}


def test_the_tool_makes_the_files_that_are_shipped(tmp_path):
    """Catches data or a tokenizer that was edited by hand, and a tool whose output depends on the run."""
    for made in write_quickstart(tmp_path, SEED):
        assert made.read_bytes() == (OUT / made.name).read_bytes(), f"{made.name}: run tools/make_quickstart.py"


def test_another_seed_makes_other_problems(tmp_path):
    """Catches a seed that is not used."""
    write_quickstart(tmp_path, SEED + 1)
    assert (tmp_path / "train.jsonl").read_bytes() != (OUT / "train.jsonl").read_bytes()


def test_every_answer_is_right(datasets):
    """Catches a task that trains on wrong answers; each is worked out here in another way than in the tool."""
    for row in (row for rows in datasets.values() for row in rows):
        task, *given = row["prompt"].removesuffix(" =").split()
        assert row["answer"] == ANSWERS[task](*given), row["prompt"]


ANSWERS = {
    "copy": lambda word: "".join(list(word)),
    "reverse": lambda word: "".join(word[index] for index in range(len(word) - 1, -1, -1)),
    "shift": lambda word: word.translate(str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXY", "BCDEFGHIJKLMNOPQRSTUVWXYZ")),
    "sort": lambda digits: "".join(digit * digits.count(digit) for digit in "0123456789"),
    "max": lambda first, second: first if int(first) >= int(second) else second,
    "increment": lambda number: str(1 - -int(number)),
}


def test_held_out_problems_are_not_trained_on(datasets):
    """Catches leaks, also of the same problem in another order, which would make the held-out accuracy a lie."""

    def problem(row):
        task, *given = row["prompt"].split()
        if task == "sort":
            return task, tuple(sorted(given[0]))
        return task, tuple(sorted(given)) if task == "max" else tuple(given)

    train, heldout = ({problem(row) for row in datasets[name]} for name in SPLITS)
    assert len(train) == len(datasets["train.jsonl"])
    assert len(heldout) == len(datasets["heldout.jsonl"])
    assert not train & heldout
    assert len({task for task, _ in heldout}) == len(TASKS) == len(ANSWERS)


def test_the_answer_and_the_end_are_trained_and_nothing_else(datasets):
    """Catches labels shifted against the input, trained prompts, an end token that is never learned."""
    tokenizer = AutoTokenizer.from_pretrained(OUT)
    for row in (row for rows in datasets.values() for row in rows):
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = tokenizer(row["answer"])["input_ids"] + [tokenizer.eos_token_id]
        assert row["input_ids"] == prompt + answer
        assert row["labels"] == [IGNORE] * len(prompt) + answer
        assert tokenizer.decode(row["input_ids"]) == row["prompt"] + row["answer"] + tokenizer.eos_token


def test_the_tokenizer_encodes_any_text():
    """Catches a tokenizer that knows its own tasks alone, with which the exported model would serve no one."""
    tokenizer = AutoTokenizer.from_pretrained(OUT)
    assert tokenizer.decode(tokenizer("Naïve 你好, reverse ABC!")["input_ids"]) == "Naïve 你好, reverse ABC!"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_the_model_fits_the_tokenizer(datasets):
    """Catches a vocabulary that outgrew the model, and a config.json that only one of the two libraries reads."""
    hf_config = json.loads((OUT / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(OUT)
    config = spec_for(hf_config).config_from_hf(hf_config)
    assert len(tokenizer) <= config.vocab_size < len(tokenizer) + 8
    assert hf_config["eos_token_id"] == tokenizer.eos_token_id
    assert hf_config["pad_token_id"] == tokenizer.pad_token_id
    assert AutoConfig.from_pretrained(OUT).hidden_size == config.hidden_size
    assert max(len(row["input_ids"]) for rows in datasets.values() for row in rows) <= tokenizer.model_max_length


def test_the_shipped_data_is_small():
    """Catches a dataset that makes every clone of the repository heavy."""
    assert sum(file.stat().st_size for file in OUT.iterdir()) < 1_500_000


def test_the_configuration_leaves_nothing_outside_its_output_folder():
    """Catches a first run that litters the repository, asks for an account, or starts processes for a small file."""
    config = load_config(CONFIG).config
    output = Path(config.train.output_dir)
    assert Path(config.data.dataset_prepared_path).is_relative_to(output)
    assert output.parts[0] == "outputs"  # ignored by git
    assert not config.train.use_wandb
    assert config.data.dataloader_num_workers == 0
    for entry in (*config.data.datasets, *config.data.test_datasets):
        assert (ROOT / entry.path).is_file()
