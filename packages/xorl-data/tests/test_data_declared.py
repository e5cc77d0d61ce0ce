"""Folders whose README.md declares their files: `datasets` decides what a config and a split have."""

import datasets
import pytest

from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.declared import declared_names, local_cards
from xorl.data.formats import load_tokenizer
from xorl.data.stream import read_sample


def clone(folder, files, configs):
    """A clone of a Hub dataset: each file has one row, its own name."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text\tother\n{name}\t1\n" if name.endswith(".tsv") else f'{{"text": "{name}"}}\n')
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n# A dataset\n")
    return folder


@pytest.fixture
def names_in(texts, text_options, text_stream):
    """Returns a function that lists the files of a folder whose rows are read, by preparing and by streaming."""

    def found(folder, **entry):
        entry = {"type": "text", **entry}
        names = sorted(text.removesuffix("<|end|>") for text, _ in texts(folder, **entry))
        sample = read_sample(text_stream(folder, shuffle=False, **entry), 100)
        core = load_tokenizer(text_options.tokenizer_folder).core
        assert sorted(core.decode(sample.document(index)[0].tolist()) for index in range(len(sample))) == names
        return names

    return found


SPLITS = """\
- config_name: default
  data_files:
  - {split: train, path: a.jsonl}
  - {split: test, path: [b.jsonl, "c/*.jsonl"]}
"""
LANGUAGES = """\
- config_name: en
  default: true
  data_files: en/*
- config_name: de
  data_files: ["de/*.jsonl"]
"""
CASES = {
    "splits": (["a.jsonl", "b.jsonl", "c/d.jsonl"], SPLITS, {}, ["a.jsonl"]),
    "another split": (["a.jsonl", "b.jsonl", "c/d.jsonl"], SPLITS, {"split": "test"}, ["b.jsonl", "c/d.jsonl"]),
    "default config": (["en/a.jsonl", "de/a.jsonl"], LANGUAGES, {}, ["en/a.jsonl"]),
    "named config": (["en/a.jsonl", "de/a.jsonl"], LANGUAGES, {"name": "de"}, ["de/a.jsonl"]),
    "part of the files": (
        ["clean/a.jsonl", "raw/a.jsonl"],
        "- config_name: default\n  data_files: clean/*\n",
        {},
        ["clean/a.jsonl"],
    ),
    "folder": (
        ["sub/train.jsonl", "sub/test.jsonl", "train.jsonl"],
        "- config_name: default\n  data_dir: sub\n",
        {},
        ["sub/train.jsonl"],
    ),
    "tabs": (["a.tsv", "b.jsonl"], "- config_name: default\n  data_files: a.tsv\n", {}, ["a.tsv"]),
}


@pytest.mark.parametrize(("files", "configs", "entry", "expected"), CASES.values(), ids=CASES)
def test_a_clone_is_read_as_datasets_reads_it(names_in, tmp_path, files, configs, entry, expected, monkeypatch):
    """Catches test rows, other configs and raw files that are trained on, although the README leaves them out."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = clone(tmp_path / "clone", files, configs)
    assert names_in(folder, **entry) == expected
    theirs = datasets.load_dataset(str(folder), entry.get("name"), split=entry.get("split", "train"))
    assert sorted(theirs["text"]) == expected
    # A bucket has the same files, which can only be listed.
    below = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    own = DatasetEntry(str(folder), type="text", **entry)
    assert sorted(declared_names(below, local_cards(folder), own, "entries[0]")) == expected


REFUSED = {
    "config": (LANGUAGES, {"name": "fr"}, r"entries\[0\].*'fr' not found. Available: \['en', 'de'\]"),
    "no default": (LANGUAGES.replace("  default: true\n", ""), {}, r"Please pick one .*\['en', 'de'\]"),
    "split": (SPLITS, {"split": "dev"}, r"entries\[0\].split: .* no split 'dev'; it has train, test"),
    "mapping": ("- config_name: default\n  data_files: {train: a.jsonl}\n", {}, r"Expected data_files in YAML"),
    "delimiter": (
        "- config_name: default\n  data_files: a.csv\n  sep: ';'\n",
        {},
        r"sets sep: ';' for its config default",
    ),
    "revision": (SPLITS, {"revision": "main"}, r"revision: 'main' applies only to Hub datasets"),
    "files": (SPLITS, {"name": "en", "data_files": "a.jsonl"}, r"name: 'en' applies only to .* with data_files"),
    "missing": ("- config_name: default\n  data_files: x.jsonl\n", {}, r"entries\[0\].*x.jsonl"),
}


@pytest.mark.parametrize(("configs", "entry", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_readme_does_not_declare_is_refused(text_options, tmp_path, configs, entry, message):
    """Catches a config, split or delimiter that is ignored, and errors that do not name the option."""
    folder = clone(tmp_path / "clone", ["a.jsonl", "b.jsonl", "c/d.jsonl", "en/a.jsonl", "de/a.jsonl"], configs)
    (folder / "a.csv").write_text("text;other\nx;1\n")
    with pytest.raises(DataError, match=message):
        prepare([DatasetEntry(str(folder), type="text", **entry)], text_options)


def test_other_readmes_change_nothing(names_in, tmp_path):
    """Catches a folder with any README that is taken for a clone, and files that are named in spite of one."""
    folder = clone(tmp_path / "clone", ["a.jsonl", "b.jsonl"], SPLITS)
    assert names_in(folder, data_files="b.jsonl", ds_type="json") == ["b.jsonl"]
    for text in ("configs:\n- mine\n", "---\nlicense: mit\n---\nconfigs: none\n", "---\nunclosed: [\n"):
        (folder / "README.md").write_text(text)
        assert names_in(folder) == ["a.jsonl", "b.jsonl"]
