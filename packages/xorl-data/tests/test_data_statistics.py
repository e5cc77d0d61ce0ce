"""What statistics say of data whose answers are known."""

from html.parser import HTMLParser

import numpy as np

from data_files import make_rows, write_jsonl, write_tokenizer
from xorl.data import DatasetEntry, pack, prepare
from xorl.data.formats import load_tokenizer
from xorl.data.report import html_report, text_report
from xorl.data.statistics import NearDuplicates, dataset_statistics, fill_histogram


def test_duplicates_beginnings_and_ends_are_counted(prepare_rows, tmp_path, text_options):
    """Catches an audit that says all is well of data without ends, or in which every tenth document is a copy."""
    folder = write_tokenizer(tmp_path / "bos", adds_bos=True)
    words = [" ".join(str(number * step) for number in range(40)) for step in range(1, 9)]
    rows = [{"text": text} for text in [*words, words[0], words[1], words[2][:-1] + "!"]]
    options = type(text_options)(bin_len=512, tokenizer_folder=folder, prepared_path=text_options.prepared_path)
    documents = prepare_rows(rows, options, type="text")
    (found,) = dataset_statistics(documents, load_tokenizer(folder))
    assert (found.num_examined, found.exact_duplicates, found.near_duplicates) == (11, 2, 1)
    assert (found.begins_with_bos, found.begins_with_two_bos) == (1.0, 0.0)
    assert (found.ends_with_eos, found.trains_eos) == (1.0, 1.0)
    assert sum(found.lengths.counts) == sum(found.trained_fraction.counts) == 11
    assert found.percentiles[100] == documents.lengths.max()


def test_a_near_duplicate_is_found_by_its_shingles_and_others_are_not():
    """Catches signatures that depend on position, or that take any two texts of one kind for alike."""
    generator = np.random.default_rng(0)
    near = NearDuplicates()
    originals = [generator.integers(0, 5000, 400) for _ in range(50)]
    assert not any(near.seen_before(ids) for ids in originals)
    for ids in originals:
        assert near.seen_before(np.concatenate([generator.integers(0, 5000, 7), ids]))
    assert not any(near.seen_before(np.concatenate([ids[:150], generator.integers(0, 5000, 250)])) for ids in originals)
    assert not near.seen_before(originals[0][:4])


def test_the_page_holds_everything_and_needs_nothing_else(tmp_path, options):
    """Catches a page that loads something from elsewhere, tags left open, names that become markup, and a label beyond
    the longest document."""
    path = write_jsonl(tmp_path / "<b>rows.jsonl", make_rows(30))
    documents = prepare([DatasetEntry(str(path))], options)
    bins = pack(documents.lengths, bin_len=64)
    receipt = documents.receipt.with_bins(num_bins=len(bins), fill=bins.fill, plan_hash=None, packed={})
    statistics = dataset_statistics(documents, None)
    fill = fill_histogram(bins.fills(documents.lengths))
    assert sum(fill.counts) == len(bins)
    page = html_report("a & b", statistics, receipt, fill)
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.count("svg") == 3
    assert not {"script", "link", "img", "b"} & set(tags.seen)
    assert "http" not in page
    lines = text_report(statistics, receipt, fill)
    assert any("30 in, 30 kept" in line for line in lines)
    label, *_ = lines[lines.index("  fraction of a document's tokens that is trained") - 1].split()
    assert label.split("-")[-1] == str(documents.lengths.max())


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
