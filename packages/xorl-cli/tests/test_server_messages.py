"""What the service's processes say to each other, and the names clients give."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from xorl.server.datum import Array, Datum
from xorl.server.identifiers import CheckpointRef, checkpoint_folder, model_id_in_folder, parse_uri
from xorl.server.messages import Submit, Work
from xorl.server.operations import ForwardBackward, OptimStep, Sample, SessionSampler
from xorl.server.queries import Answer, Request


def tokens(*values):
    return Array.of(np.array(values, dtype=np.int32))


def test_a_request_is_the_same_on_the_other_side():
    """Catches a message that cannot be told apart, or loses a field, between processes."""
    datum = Datum(tokens(1, 2, 3), {"weights": Array.of(np.array([0.0, 1.0, 0.5], dtype=np.float32))})
    call = ForwardBackward("sess:train:0", [datum], "ppo", {"clip_low_threshold": 0.8, "kl_type": "k3"})
    submit = Submit("r0", call, "tinker", b"hash", key="k", seq_id=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Request) == submit
    sample = Submit("r1", Sample(SessionSampler("sess:sample:0"), tokens(5), stop_ids=(7,)), "tinker", b"")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=Request) == sample


def test_bfloat16_is_widened_exactly():
    """Catches bits of bfloat16 read as another format."""
    assert Array("bfloat16", (2, 1), b"\x80\x3f\x00\xc0").numpy().tolist() == [[1.0], [-2.0]]


def array_of(dtype, shape, data):
    """An array as it is decoded."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode({"dtype": dtype, "shape": shape, "data": data}), type=Array)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: array_of("int32", (2,), b"\0" * 4), "has 8 bytes, got 4"),
        (lambda: array_of("float32", (-1, -1), b"\0" * 4), "must be at least 0"),
        (lambda: array_of("float64", (1,), b"\0" * 8), "'float64'"),
        (lambda: Datum(tokens(1, 2), {"target_tokens": tokens(1, 2, 3)}), "for each"),
        (lambda: Work(["a", "b"], [OptimStep("m", 1e-3), OptimStep("n", 1e-3)]), "together"),
    ],
)
def test_what_does_not_agree_is_refused(make, message):
    """Catches a client that makes a worker read beyond what was sent, targets that would be read against the wrong
    tokens, and an optimizer step in the middle of a mixed pass."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "uri",
    [
        "tinker://../weights/x",
        "tinker://m/weights/..",
        "tinker://m/weights/.hidden",
        "tinker://m/weights/a/b",
        "tinker://m/weights/a%2fb",
        "tinker://m/optimizer/a",
        "tinker:///weights/a",
        "xorl://m/weights/a\0",
        "xorl://m/weights/a\n",
        "/etc/passwd",
        "xorl://m/weights/" + "a" * 129,
        "xorl://~m/weights/a",
    ],
)
def test_names_that_climb_or_hide_are_no_checkpoints(uri):
    """Catches a traversal: a client's name that becomes a path."""
    with pytest.raises(ValueError, match="got"):
        parse_uri(uri)


def test_a_checkpoint_and_its_folder_name_each_other(tmp_path):
    """Catches two ids that share a folder, and URIs that do not come back."""
    ref = CheckpointRef("sess-1:train:0", "sampler_weights", "step.1")
    assert parse_uri(ref.uri("tinker")) == ref == parse_uri(ref.uri("xorl"))
    folder = checkpoint_folder(tmp_path, ref)
    assert folder == tmp_path / "sampler_weights" / "sess-1~train~0" / "step.1"
    assert model_id_in_folder(folder.parent.name) == ref.model_id


def test_a_link_does_not_lead_out_of_the_output_folder(tmp_path):
    """Catches a folder that is swapped for a link to elsewhere."""
    output = tmp_path / "outputs"
    (output / "weights").mkdir(parents=True)
    (output / "weights" / "m").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="leads out"):
        checkpoint_folder(output, CheckpointRef("m", "weights", "x"))


def test_the_folder_of_a_kind_may_be_a_link_to_a_larger_disk(tmp_path):
    """Catches an operator whose checkpoints lie elsewhere, and is told that they lead out."""
    disk, output = tmp_path / "disk", tmp_path / "outputs"
    (disk / "weights").mkdir(parents=True)
    (tmp_path / "real").mkdir()
    output.symlink_to(tmp_path / "real")
    (output / "weights").symlink_to(disk / "weights")
    ref = CheckpointRef("m", "weights", "x")
    assert checkpoint_folder(output, ref) == output / "weights" / "m" / "x"
    (disk / "weights" / "m").symlink_to(disk)
    with pytest.raises(ValueError, match="leads out"):
        checkpoint_folder(output, ref)


def test_messages_load_no_torch():
    """Catches an import that would give the API and the orchestrator a torch each."""
    code = "import sys, xorl.server.queries; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_every_answer_is_decoded_by_its_own_name():
    """Catches two messages of one tag, which msgspec would find only when the first is sent."""
    assert msgspec.msgpack.Decoder(Answer)
