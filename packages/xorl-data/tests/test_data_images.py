"""Images in conversations: sizes, patches, placeholders, coordinates, and what makes a row unusable."""

import base64
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from data_files import write_jsonl, write_tokenizer
from pictures import PLACEHOLDER, SETTINGS, picture
from xorl.data import DataError, DataPlan, DatasetEntry, StepLoader, pack, prepare
from xorl.data.batch import COORDINATES, IGNORE
from xorl.data.formats import load_tokenizer
from xorl.data.images.coordinates import document_coordinates
from xorl.data.images.pixels import read_patches
from xorl.data.images.size import Size
from xorl.data.inspect import text_segments, trained_texts
from xorl.data.packing import Bins, PackingMethod

Image = pytest.importorskip("PIL.Image")  # an extra

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|begin|><|pad|><|tool|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LISTS_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'image' %}<|pad|>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def ask(*images, text="What is it?", answer="A cat.") -> list[dict]:
    parts = [*({"type": "image", **image} for image in images), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


def asked(*images, **words) -> dict[str, list[dict]]:
    """The row of such a conversation."""
    return {"messages": ask(*images, **words)}


def in_row(content: bytes) -> dict[str, str]:
    """The part of a message that holds a file."""
    return {"base64": base64.b64encode(content).decode()}


@pytest.fixture
def image_options(text_options, tmp_path):
    folder = write_tokenizer(tmp_path / "images_tokenizer", template=TEMPLATE)
    return replace(text_options, tokenizer_folder=folder, images=SETTINGS)


@pytest.fixture
def prepared(image_options, tmp_path):
    """Prepares rows of a file in a folder with the files a.png (24 x 16) and b.png (16 x 32)."""

    def prepared_with(rows, options=image_options, **entry):
        folder = tmp_path / "rows"
        write_jsonl(folder / "rows.jsonl", rows)
        (folder / "a.png").write_bytes(picture(24, 16))
        (folder / "b.png").write_bytes(picture(16, 32, seed=1))
        return prepare([DatasetEntry(str(folder / "rows.jsonl"), type="chat", **entry)], options)

    return prepared_with


DATA_URI = "data:image/png;base64," + in_row(picture())["base64"]
SPELLINGS = {
    "part with a path": asked({"path": "a.png"}),
    "part with an image": asked({"image": "a.png"}),
    "column": {"messages": ask({}), "images": ["a.png"]},
    "one image in the column": {"messages": ask({}), "images": "a.png"},
    "object in the column": {"messages": ask({}), "images": [{"path": "a.png", "bytes": None}]},
    "data URI": asked({"url": DATA_URI}),
    "base64": asked(in_row(picture())),
    "part of OpenAI": asked({"type": "image_url", "image_url": {"url": DATA_URI}}),
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}],
        "images": ["a.png"],
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_document(prepared, spelling):
    """Catches a way to write an image that is read as text, or as another document."""
    documents = prepared([SPELLINGS[spelling]])
    ids, labels = documents.document(0)
    [image] = documents.images(0)
    # 24 x 16 pixels are 6 x 4 patches, and 3 x 2 tokens.
    assert (image.size, image.grid, image.num_tokens) == ((16, 24), (4, 6), 6)
    # <|user|>, <|begin|>, the image and <|tool|>
    assert ids[:9].tolist() == [259, 256, *[PLACEHOLDER] * 6, 261]
    assert (image.start, image.stop) == (2, 8)
    trained = bytes(int(token) for token in ids[labels != IGNORE] if token < 256)
    assert len(trained) == len("A cat.")
    assert (labels[: image.stop] == IGNORE).all()
    assert image.read() == picture()


def test_bytes_in_parquet_are_read(prepare_rows, image_options):
    """Catches an image struct, as `datasets` stores it, whose path is preferred to its bytes."""
    answer = [{"type": "text", "text": "A cat."}]  # a column has one type
    rows = [{"messages": ask({}, answer=answer), "images": [{"bytes": picture(), "path": "gone.png"}]}]
    documents = prepare_rows(rows, image_options, file="parquet", type="chat")
    assert documents.images(0)[0].read() == picture()


@pytest.mark.parametrize("train_on", ["assistant", "last_turn", "all"])
def test_no_token_of_an_image_is_ever_trained(prepared, train_on):
    """Catches labels at the tokens of images, whose prediction has no meaning, and shifted ones."""
    answer = [{"type": "text", "text": "Like "}, {"type": "image", "path": "b.png"}, {"type": "text", "text": "."}]
    row = {"messages": [*ask({"path": "a.png"}, {"path": "b.png"}), *ask({"path": "a.png"}, answer=answer)]}
    documents = prepared([row], train_on=train_on)
    ids, labels = documents.document(0)
    assert len(documents.images(0)) == 4
    assert (labels[ids == PLACEHOLDER] == IGNORE).all()
    for method in get_args(PackingMethod):
        [[_, [batch]]] = loader_of(documents, method=method).steps()
        is_image = batch.input_ids == PLACEHOLDER
        assert not (batch.labels == PLACEHOLDER).any()
        assert (batch.labels[:-1][is_image[1:]] == IGNORE).all()
    if train_on == "all":
        # The token behind an image is trained, as in text.
        ends = [image.stop for image in documents.images(0)]
        assert (labels[ends] != IGNORE).all()


def loader_of(documents, images=SETTINGS, method="sequential", **options):
    bins = pack(documents.lengths, bin_len=512, method=method)
    plan = DataPlan.over(documents, bins, bins_per_step=1, num_epochs=1, seed=0)
    return StepLoader(documents, bins, plan, micro_batch_size=1, images=images, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_has_the_patches_and_coordinates_of_its_documents(prepared, num_workers):
    """Catches images in another order than their tokens, and coordinates that go on from the document before."""
    rows = [
        asked({"path": "b.png"}, {"path": "a.png"}),
        asked(text="No image."),
        asked({"path": "a.png"}, answer="A dog."),
    ]
    documents = prepared(rows)
    [[_, [batch]]] = loader_of(documents, num_workers=num_workers).steps()
    images = batch.images
    parts = {name: read_patches(picture(*size), SETTINGS) for name, size in (("a", (24, 16)), ("b", (16, 32, 1)))}
    order = [documents.lengths.tolist().index(length) for length in batch.document_lengths]
    names = [name for index in order for name in ("ba", "", "a")[index]]
    assert torch.equal(images.patches, torch.cat([parts[name] for name in names]))
    assert images.grids == tuple({"a": (4, 6), "b": (8, 4)}[name] for name in names)
    assert torch.equal(images.features >= 0, batch.input_ids == PLACEHOLDER)
    assert images.features[images.features >= 0].tolist() == list(range(sum(parts[n].shape[0] // 4 for n in names)))
    first = 0
    for index, length in zip(order, batch.document_lengths, strict=True):
        grids = [(image.start, image.grid.divided(2)) for image in documents.images(index)]
        found = batch.inputs[COORDINATES][first : first + length]
        assert found.tolist() == document_coordinates(length, grids).tolist()
        assert found[0].tolist() == [0, 0, 0]
        first += length
    assert images.num_images == 3


def test_a_batch_without_images_has_one_that_no_token_stands_for(prepared):
    """Catches a rank that does not encode while others do."""
    documents = prepared([asked(text="No image.")])
    [[_, [batch]]] = loader_of(documents).steps()
    assert batch.images.num_images == 0
    assert batch.images.grids == ((2, 2),)
    assert (batch.images.features == -1).all()
    assert batch.inputs[COORDINATES].tolist() == batch.positions[:, None].expand(-1, 3).tolist()


def test_coordinates_go_on_behind_the_longest_side():
    """Catches rows and columns exchanged, and two images without text between them that are taken for one."""
    found = document_coordinates(13, [(1, Size(2, 3)), (7, Size(1, 2)), (10, Size(2, 1))])
    assert found.tolist() == [
        [0, 0, 0],
        *([1, 1 + row, 1 + column] for row in range(2) for column in range(3)),
        *([4, 4, 4], [4, 4, 5]),
        [6, 6, 6],
        *([7, 7, 7], [7, 8, 7]),
        [9, 9, 9],
    ]


@pytest.mark.parametrize("limit", range(8, 64))
def test_no_image_is_cut(prepared, image_options, limit):
    """Catches a truncated image, and coordinates or counts of images that are no longer there."""
    row = {"messages": [*ask({"path": "a.png"}, answer="B"), *ask({"path": "b.png"}, answer="C")]}
    options = replace(image_options, strict=False)
    documents = prepared([row], options, max_seq_len=limit, overflow="truncate")
    ids, _ = documents.document(0)
    images = documents.images(0)
    assert len(ids) <= limit
    assert sum(image.num_tokens for image in images) == (ids == PLACEHOLDER).sum()
    counts = documents.receipt.total
    assert counts.images - counts.cut_images == len(images)
    assert (documents.document(0)[1][ids == PLACEHOLDER] == IGNORE).all()
    uncut = prepared([row], options)
    whole = uncut.document(0)[0]
    assert ids.tolist() == whole[: len(ids)].tolist()
    assert len(ids) in (limit, len(whole)) or whole[len(ids)] == PLACEHOLDER
    if documents.num_trained[0]:
        cut, of_whole = (next(loader_of(each).steps())[1][0] for each in (documents, uncut))
        assert torch.equal(cut.inputs[COORDINATES], of_whole.inputs[COORDINATES][: len(ids)])
        assert cut.images.num_images == len(images)


def test_a_document_whose_images_are_all_cut_is_text(prepared, image_options):
    """Catches a row that has to be encoded for images that are no longer there, or that counts as one with images."""
    options = replace(image_options, strict=False)
    row = {"messages": [{"role": "user", "content": "Hi"}, ask()[1], *ask({"path": "a.png"}, {"path": "b.png"})]}
    documents = prepared([row, asked(text="Why?")], options, max_seq_len=20, overflow="truncate")
    total = documents.receipt.total
    assert (total.images, total.cut_images, total.image_tokens) == (2, 2, 14)
    assert documents.images(0) == []
    assert documents.image_patches() is None
    [[_, [batch]]] = loader_of(documents).steps()
    assert batch.images.num_images == 0
    assert not (batch.input_ids == PLACEHOLDER).any()


def test_long_samples_with_images_are_not_split(prepared):
    """Catches the second part of a conversation whose image is in the first."""
    with pytest.raises(DataError, match=r"line 1: 6\d tokens with images, more than .* set overflow to truncate"):
        prepared([asked({"path": "a.png"}, text="x" * 40)], max_seq_len=32, overflow="split")


def test_an_image_is_shown_as_one_segment(prepared, image_options):
    """Catches a wall of placeholders where an image is, and text behind it that is lost."""
    documents = prepared([asked({"path": "a.png"})])
    tokenizer = load_tokenizer(image_options.tokenizer_folder)
    parts = text_segments(*documents.document(0), tokenizer, documents.images(0))
    [shown] = [part.text for part in parts if part.text.startswith("[image")]
    assert shown.startswith("[image 24 x 16 pixels, 6 x 4 patches, 6 tokens: ")
    assert "".join(part.text for part in parts).replace(shown, "I") == (
        "<|user|><|begin|>I<|tool|>What is it?<|end|>\n<|assistant|>A cat.<|end|>\n"
    )
    assert list(trained_texts(parts)) == ["A cat.<|end|>"]


def test_a_receipt_counts_images(prepared, image_options):
    """Catches counts that leave out a row, or count an image that was cut as trained on."""
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [
        picture(24, 16),
        picture(16, 32, seed=1),
        picture(8, 16, mode="L"),
        picture(100, 50, mode="RGBA"),  # reduced, transparent
        picture(24, 16, mode="LA"),  # transparent
        picture(4, 4),  # enlarged
        picture(24, 16, kind="JPEG", exif=turned),  # rotated
        picture(16, 24, kind="JPEG", exif=turned),  # rotated
        picture(24, 16, kind="WEBP"),
        picture(24, 16, kind="BMP"),
    ]
    parts = list(map(in_row, files))
    rows = [asked(*parts[:7]), asked(text="No image."), asked(*parts[7:])]
    documents = prepared(rows, replace(image_options, strict=False), max_seq_len=47, overflow="truncate")
    total = documents.receipt.total
    kept = [image for index in range(len(documents)) for image in documents.images(index)]
    grids = [(4, 6), (8, 4), (4, 2), (4, 10), (4, 6), (4, 4), (6, 4), (4, 6), (4, 6), (4, 6)]
    assert [tuple(image.grid) for image in kept] == [*grids[:5], *grids[7:]]
    patches = sum(height * width for height, width in grids)
    assert (total.images, total.image_tokens, total.image_patches) == (10, patches // 4, patches)
    assert (total.image_bytes, total.cut_images) == (sum(map(len, files)), 2)
    changed = total.enlarged_images, total.reduced_images, total.rotated_images, total.transparent_images
    assert changed == (1, 1, 2, 2)


BAD = {
    "missing": (asked({"path": "gone.png"}), r"gone\.png.*No such file"),
    "outside": (asked({"path": "../../secret.png"}), r"outside of .* set images\.root"),
    "URL": (asked({"url": "https://example.com/a.png"}), r"example\.com.* is not downloaded"),
    "not an image": (asked(in_row(b"hello")), r"bytes in the row: the image is not a file that can"),
    "cut file": (asked(in_row(picture(100, 80)[:40])), "not a file that can be read|cannot be decoded"),
    "cut pixels": (
        asked(in_row(picture(100, 80)[:-2000])),
        "bytes in the row: the image cannot be decoded: image file is truncated",
    ),
    "too long": (asked(in_row(picture(402, 2))), "402 x 2 pixels, and one side may be at most 200 times"),
    "16 bits": (
        asked(in_row(picture(8, 8)), {"path": "deep.png"}),
        r"deep\.png: the image has values of the kind 'I;16'",
    ),
    "too few": ({"messages": ask({}, {}), "images": ["a.png"]}, "2 places for images, and the column of images 1"),
    "too many": ({"messages": ask(), "images": ["a.png"]}, "0 places for images, and the column of images 1"),
    "literal placeholder": (
        asked({"path": "a.png"}, text="I see <|pad|>"),
        "the text has 2 placeholders of images, and the row 1 images",
    ),
    "literal placeholder alone": (
        asked(text="I see <|pad|>"),
        "the text has 1 placeholders of images, and the row 0 images",
    ),
    "video": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "B"}]},
        "a part that is of the type 'video', which xorl does not support",
    ),
    "no base64": (asked({"base64": "%%%"}), "not valid base64"),
    "number": ({"messages": ask({}), "images": [3]}, "an image is int, want a path, bytes or a data URI"),
}


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_an_unusable_image_names_row_and_file(prepared, image_options, tmp_path, row, message):
    """Catches an image that is replaced, left out, or named without its row."""
    (tmp_path / "rows").mkdir(exist_ok=True)
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "rows" / "deep.png")
    good = asked({"path": "a.png"})
    with pytest.raises(DataError, match=rf"(?s)rows\.jsonl, line 2: .*{message}"):
        prepared([good, row])
    documents = prepared([good, row], skip_bad_rows=0.5)
    assert len(documents) == 1
    assert documents.receipt.total.skipped == 1


def test_a_text_model_refuses_images(prepared, image_options):
    """Catches images that are silently left out, in parts or in a column."""
    options = replace(image_options, images=None)
    for row in (SPELLINGS["part with a path"], SPELLINGS["column"], SPELLINGS["ShareGPT"]):
        with pytest.raises(DataError, match="line 1: the conversation has images, which only a model with an image"):
            prepared([row], options)
    assert prepared([SPELLINGS["ShareGPT"]], options, ignore_columns=("images",)).images(0) == []


def test_a_template_that_reads_lists_alone_gets_lists(prepared, image_options, tmp_path):
    """Catches messages of text that such a template leaves out."""
    folder = write_tokenizer(tmp_path / "lists", template=LISTS_ONLY)
    rows = [asked({"path": "a.png"}), {"messages": [{"role": "user", "content": "Hi"}, ask()[1]]}]
    documents = prepared(rows, replace(image_options, tokenizer_folder=folder))
    assert documents.num_trained.tolist() == [7, 7]
    ids, labels = documents.document(0)
    assert (labels != IGNORE).sum() == len("A cat.") + 1
    assert (ids == PLACEHOLDER).sum() == 6


LATER = {
    "changed": (picture(24, 16, seed=5), "the image has changed since the data was prepared"),
    "cut": (picture(24, 16)[:400], "the image has changed since the data was prepared"),
    "gone": (None, "the image cannot be read: No such file"),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("content", "message"), LATER.values(), ids=LATER)
def test_a_file_that_is_another_one_later_stops_the_run(prepared, tmp_path, num_workers, content, message):
    """Catches training on another image than the one that was counted, and an error that does not say where it is."""
    documents = prepared([asked({"path": "a.png"})])
    path = tmp_path / "rows" / "a.png"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"document 0: .*a\.png: {message}"):
        next(loader_of(documents, num_workers=num_workers).steps())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_whose_pixels_are_cut_stops_the_run(prepared, num_workers):
    """Catches an image that is grey from where its file ends."""
    content = picture(24, 16, kind="JPEG")  # whose header stands before its pixels
    documents = prepared([asked(text="Hi"), asked(in_row(content[:-200]))])
    with pytest.raises(DataError, match="document 1: bytes in the row: the image cannot be decoded"):
        next(loader_of(documents, num_workers=num_workers).steps())


def test_images_are_read_with_the_settings_they_were_prepared_with(prepared):
    """Catches features of another number of tokens than stand for an image."""
    documents = prepared([asked({"path": "a.png"})])
    with pytest.raises(DataError, match=r"a\.png has 8 patches, but the prepared data has 24"):
        next(loader_of(documents, replace(SETTINGS, max_pixels=200)).steps())


def test_ranks_encode_large_images_at_the_same_time(prepared):
    """Catches bins that are dealt to ranks by their tokens alone: three ranks then wait for the one that encodes."""
    pictures = [in_row(picture(64, 16, seed=seed)) for seed in range(4)]
    # By their tokens, the others are more expensive than some of those with images, and cheaper than others.
    rows = [asked(each, text="What?" + "?" * (9 * index)) for index, each in enumerate(pictures)]
    rows += [asked(text="What?" + "?" * (18 + index)) for index in range(28)]
    documents = prepared(rows)
    bins = Bins(np.arange(32), np.arange(33), int(documents.lengths.sum()), int(documents.lengths.max()))
    patches = documents.image_patches()
    with_images = np.flatnonzero(patches[:, 0])
    assert len(bins) == 32
    assert len(with_images) == 4
    assert set(map(tuple, patches[with_images])) == {(64.0, 64.0**2)}
    plan = DataPlan.one_pass(documents, bins, bins_per_step=32)
    costly = {number for number in range(32) if bins.indices[bins.offsets[number]] in with_images}

    def places(image_cost):
        options = {"micro_batch_size": 1, "dp_size": 4, "images": SETTINGS, "image_cost": image_cost}
        loaders = [StepLoader(documents, bins, plan, dp_rank=rank, **options) for rank in range(4)]
        split = [loader.bins_of_micro_batches(0) for loader in loaders]
        return {index for each in split for index, members in enumerate(each) if costly & set(members.tolist())}

    assert len(places((0.0, 0.0))) > 1
    assert places((1.0, 0.0)) == {0}
    assert places((0.0, 0.1)) == {0}


def test_documents_without_images_count_no_patches(prepared):
    """Catches a cost of images for text, and patches of another document after a selection."""
    text = prepared([asked(), asked(text="And now?")])
    assert text.image_patches() is None
    mixed = prepared([asked(), asked({"path": "a.png"}, {"path": "b.png"})])
    found = mixed.select(np.array([1, 0, 1]), "another order").image_patches()
    areas = [image.grid.area for image in mixed.images(int(np.flatnonzero(mixed.image_patches()[:, 0])[0]))]
    assert sorted(found[:, 0]) == [0, *[sum(areas)] * 2]
    assert max(found[:, 1]) == sum(area**2 for area in areas)
