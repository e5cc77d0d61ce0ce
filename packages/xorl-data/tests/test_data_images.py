"""Images in conversations: sizes, patches, placeholders, coordinates, and what makes a row unusable."""

import base64
import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from xorl.data import DataError, DataPlan, DatasetEntry, StepLoader, pack, prepare
from xorl.data.batch import COORDINATES, IGNORE
from xorl.data.formats import load_tokenizer
from xorl.data.images import ImageSettings
from xorl.data.images.coordinates import document_coordinates
from xorl.data.images.pixels import decoder_digest, read_header, read_patches
from xorl.data.images.size import Size, grid_of, num_tokens
from xorl.data.inspect import text_segments, trained_texts
from xorl.data.packing import Bins

Image = pytest.importorskip("PIL.Image")  # an extra

PLACEHOLDER = 262  # <|pad|> of the tests' tokenizer
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
SETTINGS = ImageSettings(
    placeholder=PLACEHOLDER,
    patch_size=4,
    merge_size=2,
    min_pixels=128,
    max_pixels=1024,
    fixed_size=None,
    crops=False,
    resample="bicubic",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    has_axes=True,
)


def picture(width=24, height=16, seed=0, mode="RGB", kind="PNG", **options) -> bytes:
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width) if channels == 1 else (height, width, channels)
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(values, mode).save(file, kind, **options)
    return file.getvalue()


def ask(*images, text="What is it?", answer="A cat.") -> list[dict]:
    return [
        {
            "role": "user",
            "content": [*({"type": "image", **image} for image in images), {"type": "text", "text": text}],
        },
        {"role": "assistant", "content": answer},
    ]


@pytest.fixture
def image_options(text_options, tmp_path, write_tokenizer):
    folder = write_tokenizer(tmp_path / "images_tokenizer", template=TEMPLATE)
    return replace(text_options, tokenizer_folder=folder, images=SETTINGS)


@pytest.fixture
def prepared(image_options, tmp_path, write_jsonl):
    """Prepares rows of a file in a folder with the files a.png (24 x 16) and b.png (16 x 32)."""

    def prepare_rows(rows, options=image_options, **entry):
        folder = tmp_path / "rows"
        write_jsonl(folder / "rows.jsonl", rows)
        (folder / "a.png").write_bytes(picture(24, 16))
        (folder / "b.png").write_bytes(picture(16, 32, seed=1))
        return prepare([DatasetEntry(str(folder / "rows.jsonl"), type="chat", **entry)], options)

    return prepare_rows


SPELLINGS = {
    "part with a path": {"messages": ask({"path": "a.png"})},
    "part with an image": {"messages": ask({"image": "a.png"})},
    "column": {"messages": ask({}), "images": ["a.png"]},
    "one image in the column": {"messages": ask({}), "images": "a.png"},
    "object in the column": {"messages": ask({}), "images": [{"path": "a.png", "bytes": None}]},
    "data URI": {"messages": ask({"url": "data:image/png;base64," + base64.b64encode(picture()).decode()})},
    "base64": {"messages": ask({"base64": base64.b64encode(picture()).decode()})},
    "part of OpenAI": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture()).decode()},
                    },
                    {"type": "text", "text": "What is it?"},
                ],
            },
            {"role": "assistant", "content": "A cat."},
        ]
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "<image>What is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
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
    text = "<|user|>", "<|begin|>", *["<|pad|>"] * 6, "<|tool|>"
    assert ids[:9].tolist() == [259, 256, *[PLACEHOLDER] * 6, 261], text
    assert (image.start, image.stop) == (2, 8)
    trained = bytes(int(token) for token in ids[labels != IGNORE] if token < 256)
    assert len(trained) == len("A cat.")
    assert (labels[: image.stop] == IGNORE).all()
    assert image.read() == picture()


def test_bytes_in_parquet_are_read(image_options, tmp_path):
    """Catches an image struct, as `datasets` stores it, whose path is preferred to its bytes."""
    answer = [{"type": "text", "text": "A cat."}]  # a column has one type
    rows = [{"messages": ask({}, answer=answer), "images": [{"bytes": picture(), "path": "gone.png"}]}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    documents = prepare([DatasetEntry(str(tmp_path / "rows.parquet"), type="chat")], image_options)
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
    batch = loader_of(documents).steps().__next__()[1][0]
    is_image = batch.input_ids == PLACEHOLDER
    assert not (batch.labels == PLACEHOLDER).any()
    assert (batch.labels[:-1][is_image[1:]] == IGNORE).all()
    if train_on == "all":
        # The token behind an image is trained, as in text.
        ends = [image.stop for image in documents.images(0)]
        assert (labels[ends] != IGNORE).all()


def loader_of(documents, images=SETTINGS, bin_len=512, **options):
    bins = pack(documents.lengths, bin_len=bin_len)
    plan = DataPlan.over(documents, bins, bins_per_step=1, num_epochs=1, seed=0)
    return StepLoader(documents, bins, plan, micro_batch_size=1, images=images, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_has_the_patches_and_coordinates_of_its_documents(prepared, num_workers):
    """Catches images in another order than their tokens, and coordinates that go on from the document before."""
    rows = [
        {"messages": ask({"path": "b.png"}, {"path": "a.png"})},
        {"messages": ask(text="No image.")},
        {"messages": ask({"path": "a.png"}, answer="A dog.")},
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
    documents = prepared([{"messages": ask(text="No image.")}])
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
    whole = prepared([row], options).document(0)[0]
    assert ids.tolist() == whole[: len(ids)].tolist()
    assert len(ids) in (limit, len(whole)) or whole[len(ids)] == PLACEHOLDER


def test_long_samples_with_images_are_not_split(prepared):
    """Catches the second part of a conversation whose image is in the first."""
    with pytest.raises(DataError, match=r"line 1: 6\d tokens with images, more than .* set overflow to truncate"):
        prepared([{"messages": ask({"path": "a.png"}, text="x" * 40)}], max_seq_len=32, overflow="split")


def test_an_image_is_shown_as_one_segment(prepared, image_options):
    """Catches a wall of placeholders where an image is, and text behind it that is lost."""
    documents = prepared([{"messages": ask({"path": "a.png"})}])
    tokenizer = load_tokenizer(image_options.tokenizer_folder)
    parts = text_segments(*documents.document(0), tokenizer, documents.images(0))
    [shown] = [part.text for part in parts if part.text.startswith("[image")]
    assert shown.startswith("[image 24 x 16 pixels, 6 x 4 patches, 6 tokens: ")
    assert "".join(part.text for part in parts).replace(shown, "I") == (
        "<|user|><|begin|>I<|tool|>What is it?<|end|>\n<|assistant|>A cat.<|end|>\n"
    )
    assert list(trained_texts(parts)) == ["A cat.<|end|>"]


def test_a_receipt_counts_images(prepared):
    """Catches counts that leave out a row, or count an image that was cut as trained on."""
    rows = [{"messages": ask({"path": "a.png"}, {"path": "b.png"})}, {"messages": ask(text="No image.")}]
    total = prepared(rows).receipt.total
    sizes = [len(picture(24, 16)), len(picture(16, 32, seed=1))]
    assert (total.images, total.image_tokens, total.image_patches, total.image_bytes) == (2, 14, 56, sum(sizes))
    assert (total.enlarged_images, total.reduced_images, total.cut_images) == (0, 0, 0)
    large = base64.b64encode(picture(100, 50, mode="RGBA")).decode()
    total = prepared([{"messages": ask({"base64": large}, {"base64": base64.b64encode(picture(4, 4)).decode()})}])
    counts = total.receipt.total
    assert (counts.enlarged_images, counts.reduced_images, counts.transparent_images) == (1, 1, 1)


BAD = {
    "missing": ({"messages": ask({"path": "gone.png"})}, r"gone\.png.*No such file"),
    "outside": ({"messages": ask({"path": "../../secret.png"})}, r"outside of .* set images\.root"),
    "URL": ({"messages": ask({"url": "https://example.com/a.png"})}, r"example\.com.* is not downloaded"),
    "not an image": ({"messages": ask({"base64": "aGVsbG8="})}, r"bytes in the row: the image is not a file that can"),
    "cut file": (
        {"messages": ask({"base64": base64.b64encode(picture(100, 80)[:40]).decode()})},
        "not a file that can be read|cannot be decoded",
    ),
    "too long": (
        {"messages": ask({"base64": base64.b64encode(picture(402, 2)).decode()})},
        r"402 x 2 pixels, and one side may be at most 200 times",
    ),
    "16 bits": (
        {
            "messages": ask(
                {"base64": base64.b64encode(picture(8, 8)).decode()},
                {"path": "deep.png"},
            )
        },
        r"deep\.png: the image has values of the kind 'I;16'",
    ),
    "too few": ({"messages": ask({}, {}), "images": ["a.png"]}, "2 places for images, and the column of images 1"),
    "too many": ({"messages": ask(), "images": ["a.png"]}, "0 places for images, and the column of images 1"),
    "literal placeholder": (
        {"messages": ask({"path": "a.png"}, text="I see <|pad|>")},
        "the text has 2 placeholders of images, and the row 1 images",
    ),
    "literal placeholder alone": (
        {"messages": ask(text="I see <|pad|>")},
        "the text has 1 placeholders of images, and the row 0 images",
    ),
    "video": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "B"}]},
        "a part that is of the type 'video', which xorl does not support",
    ),
    "no base64": ({"messages": ask({"base64": "%%%"})}, "not valid base64"),
    "number": ({"messages": ask({}), "images": [3]}, "an image is int, want a path, bytes or a data URI"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_unusable_image_names_row_and_file(prepared, image_options, tmp_path, case):
    """Catches an image that is replaced, left out, or named without its row."""
    row, message = BAD[case]
    (tmp_path / "rows").mkdir(exist_ok=True)
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "rows" / "deep.png")
    good = {"messages": ask({"path": "a.png"})}
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


def test_a_template_that_reads_lists_alone_gets_lists(prepared, image_options, tmp_path, write_tokenizer):
    """Catches messages of text that such a template leaves out."""
    folder = write_tokenizer(tmp_path / "lists", template=LISTS_ONLY)
    rows = [{"messages": ask({"path": "a.png"})}, {"messages": [{"role": "user", "content": "Hi"}, ask()[1]]}]
    documents = prepared(rows, replace(image_options, tokenizer_folder=folder))
    assert documents.num_trained.tolist() == [7, 7]
    ids, labels = documents.document(0)
    assert (labels != IGNORE).sum() == len("A cat.") + 1
    assert (ids == PLACEHOLDER).sum() == 6


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_changed_file_stops_the_run(prepared, tmp_path, num_workers):
    """Catches training on another image than the one that was counted."""
    documents = prepared([{"messages": ask({"path": "a.png"})}])
    (tmp_path / "rows" / "a.png").write_bytes(picture(24, 16, seed=5))
    with pytest.raises(DataError, match=r"a\.png: the image has changed since the data was prepared"):
        next(loader_of(documents, num_workers=num_workers).steps())


def test_orientation_and_transparency():
    """Catches turned photos whose tokens are counted by the size before, and black where an image is transparent."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    upright = Image.fromarray(pixels)
    turns = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    turns |= {2: Image.Transpose.FLIP_LEFT_RIGHT, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    turns |= {5: Image.Transpose.TRANSPOSE, 7: Image.Transpose.TRANSVERSE}
    wanted = read_patches(picture_of(upright), SETTINGS)
    for orientation, turn in turns.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = picture_of(upright if turn is None else upright.transpose(turn), exif=exif)
        header = read_header(content, SETTINGS)
        assert (header.size, header.is_rotated) == ((16, 24), orientation != 1), orientation
        assert torch.equal(read_patches(content, SETTINGS), wanted), orientation
    clear = Image.fromarray(np.dstack([pixels, np.zeros((16, 24), np.uint8)]), "RGBA")
    assert read_patches(picture_of(clear), SETTINGS).eq(255).all()
    palette = upright.convert("P")
    assert read_patches(picture_of(palette), SETTINGS).shape == wanted.shape
    assert read_patches(picture_of(upright.convert("L")), SETTINGS).shape == wanted.shape
    assert read_patches(picture_of(upright.convert("CMYK"), "JPEG"), SETTINGS).shape == wanted.shape
    animated = io.BytesIO()
    upright.save(animated, "PNG", save_all=True, append_images=[upright.transpose(Image.Transpose.ROTATE_180)])
    with pytest.raises(DataError, match="animated"):
        read_header(animated.getvalue(), SETTINGS)
    with pytest.raises(DataError, match="more than the limit of 100"):
        read_header(picture(), replace(SETTINGS, max_decoded_pixels=100))


def picture_of(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_patches_are_in_the_order_of_tokens():
    """Catches rows and columns of patches, or of tokens, that are exchanged, and resizing to the same size."""
    rows, columns = np.meshgrid(np.arange(16), np.arange(24), indexing="ij")
    pixels = np.stack([rows, columns, np.full_like(rows, 7)], -1).astype(np.uint8)
    patches = read_patches(picture_of(Image.fromarray(pixels)), SETTINGS).reshape(-1, 3, 4, 4)
    # Tokens of 8 x 8 pixels by rows, and in each its 4 patches by rows.
    corners = [
        (8 * y + 4 * dy, 8 * x + 4 * dx) for y in range(2) for x in range(3) for dy in range(2) for dx in range(2)
    ]
    assert [tuple(patch[:2, 0, 0].tolist()) for patch in patches] == corners
    assert patches[:, 2].eq(7).all()
    assert len(decoder_digest()) == 16


FIXED = replace(SETTINGS, merge_size=1, min_pixels=None, max_pixels=None, fixed_size=(12, 12), has_axes=False)


def test_images_of_a_fixed_size_are_stretched_or_cut():
    """Catches a crop of the corner, or a resize of the longer side."""
    pixels = np.zeros((12, 36, 3), np.uint8)
    pixels[:, 12:24] = 200
    content = picture_of(Image.fromarray(pixels))
    assert read_patches(content, replace(FIXED, crops=True)).eq(200).all()
    stretched = read_patches(content, FIXED)
    assert stretched.shape == (9, 48)
    assert not stretched.eq(200).all()
    assert grid_of(Size(12, 36), FIXED) == (3, 3)
    assert num_tokens(Size(3, 3), FIXED) == 9


def test_ranks_encode_large_images_at_the_same_time(prepared):
    """Catches bins that are dealt to ranks by their tokens alone: three ranks then wait for the one that encodes."""
    pictures = [{"bytes": base64.b64encode(picture(64, 16, seed=seed)).decode()} for seed in range(4)]
    # By their tokens, the others are more expensive than some of those with images, and cheaper than others.
    rows = [
        {"messages": ask({"base64": each["bytes"]}, text="What?" + "?" * (9 * index))}
        for index, each in enumerate(pictures)
    ]
    rows += [{"messages": ask(text="What?" + "?" * (18 + index))} for index in range(28)]
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
        loaders = [
            StepLoader(
                documents,
                bins,
                plan,
                micro_batch_size=1,
                dp_rank=rank,
                dp_size=4,
                images=SETTINGS,
                image_cost=image_cost,
            )
            for rank in range(4)
        ]
        split = [loader.bins_of_micro_batches(0) for loader in loaders]
        return {index for each in split for index, members in enumerate(each) if costly & set(members.tolist())}

    assert len(places((0.0, 0.0))) > 1
    assert places((1.0, 0.0)) == {0}
    assert places((0.0, 0.1)) == {0}


def test_documents_without_images_count_no_patches(prepared):
    """Catches a cost of images for text, and patches of another document after a selection."""
    text = prepared([{"messages": ask()}, {"messages": ask(text="And now?")}])
    assert text.image_patches() is None
    mixed = prepared([{"messages": ask()}, {"messages": ask({"path": "a.png"}, {"path": "b.png"})}])
    found = mixed.select(np.array([1, 0, 1]), "another order").image_patches()
    areas = [image.grid.area for image in mixed.images(int(np.flatnonzero(mixed.image_patches()[:, 0])[0]))]
    assert sorted(found[:, 0]) == [0, *[sum(areas)] * 2]
    assert max(found[:, 1]) == sum(area**2 for area in areas)
