"""A checkpoint that is not right is refused in one line that names the file; nothing is changed by it, nothing is run.

A checkpoint is two files of tensors here, one a rank, and the index and the marker.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ndbench.config import Config
from ndbench.parallel.state_files import CheckpointError
from ndbench.parallel.state_index import INDEX, MARKER, read_index, write_index
from ndbench.run.train import _instead_of
from ndbench.run.train_resume import newest_whole, start_of
from tests.parity.cases import Case, case, layout, llama, training
from tests.parity.pool import pool
from tests.state import ranks

SMALL = llama(num_hidden_layers=1)
CASE = case(layout(1, 2), SMALL, training=training(optimizer="adamw", learning_rate=1e-2), silent=0)
FILES = ["rank00000.safetensors", "rank00001.safetensors", INDEX, MARKER]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    pool(2).run(ranks.save, CASE, folder, "sharded", 1)
    (path,) = folder.iterdir()
    assert sorted(each.name for each in path.iterdir()) == sorted(FILES)
    return path


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


def refusal(path: Path, other: Case = CASE) -> str:
    """What every rank says; none has changed anything, and the checkpoint is as it was."""
    contents = {each.name: each.read_bytes() for each in path.iterdir()}
    answers = pool(2).run(ranks.refused, other, path)
    assert all(unchanged for _, unchanged in answers)
    assert {each.name: each.read_bytes() for each in path.iterdir()} == contents
    texts = [text for text, _ in answers]
    assert texts[0] == texts[1]
    text = texts[0]
    assert "\n" not in text
    return text


def test_a_whole_one_is_loaded(checkpoint: Path) -> None:
    assert [text for text, _ in pool(2).run(ranks.refused, CASE, checkpoint)] == ["loaded", "loaded"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    assert name in refusal(checkpoint)


@pytest.mark.parametrize("where", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_and_its_file_named(name: str, where: float, checkpoint: Path) -> None:
    path = checkpoint / name
    data = bytearray(path.read_bytes())
    position = int(where * (len(data) - 1))
    data[position] ^= 0x10
    path.write_bytes(data)
    assert name in refusal(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_a_short_file_is_named(name: str, checkpoint: Path) -> None:
    os.truncate(checkpoint / name, (checkpoint / name).stat().st_size // 2)
    assert name in refusal(checkpoint)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(CASE, model=llama()), "it lacks 9 of this model's (model.layers.1."),
        (replace(CASE, model=replace(SMALL, intermediate_size=80)), "3 differ (model.layers.0.mlp.gate_proj.weight is"),
        (replace(CASE, model=replace(SMALL, tie_word_embeddings=True)), "1 of its tensors are not this model's (lm_"),
        (replace(CASE, training=training()), "its optimizer is AdamW, this run's is SGD"),
    ],
    ids=["more layers", "another width", "tied", "another optimizer"],
)
def test_a_checkpoint_of_another_model_or_optimizer(other: Case, words: str, checkpoint: Path) -> None:
    text = refusal(checkpoint, other)
    assert text.startswith(str(checkpoint))
    assert words in text


def rewrite(checkpoint: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change the index and give it a marker that fits: what a forger would do."""
    content = json.loads((checkpoint / INDEX).read_bytes())
    change(content)
    write_index(checkpoint, content, 1)


def outside(content: dict) -> None:  # type: ignore[type-arg]
    """A file that would fit, but not in the checkpoint's folder."""
    content["files"]["../rank00000.safetensors"] = content["files"].pop("rank00000.safetensors")
    for tensor in content["tensors"].values():
        for piece in tensor["pieces"]:
            piece[0] = piece[0].replace("rank00000", "../rank00000")


def a_gap(content: dict) -> None:  # type: ignore[type-arg]
    content["tensors"]["lm_head.weight"]["pieces"].pop()


def another_piece_twice(content: dict) -> None:  # type: ignore[type-arg]
    pieces = content["tensors"]["lm_head.weight"]["pieces"]
    pieces[1] = [pieces[0][0], [1, 0], pieces[1][2]]


def a_wrong_type(content: dict) -> None:  # type: ignore[type-arg]
    content["tensors"] = ["lm_head.weight"]


def a_negative_size(content: dict) -> None:  # type: ignore[type-arg]
    content["tensors"]["lm_head.weight"]["shape"] = [-1, 64]


def no_random(content: dict) -> None:  # type: ignore[type-arg]
    content["random"] = [{"torch": "!"}, {}]


@pytest.mark.parametrize("change", [outside, a_gap, another_piece_twice, a_wrong_type, a_negative_size, no_random])
def test_an_index_that_was_tampered_with(change: Callable[[dict], None], checkpoint: Path) -> None:  # type: ignore[type-arg]
    rewrite(checkpoint, change)
    shutil.copy(checkpoint / "rank00000.safetensors", checkpoint.parent)
    assert INDEX in refusal(checkpoint)


def test_another_format_is_refused_with_both_versions(checkpoint: Path) -> None:
    marker = json.loads((checkpoint / MARKER).read_bytes()) | {"format": 2}
    (checkpoint / MARKER).write_text(json.dumps(marker))
    assert "has format 2, this version reads 1" in refusal(checkpoint)


class Bomb:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", ["rank00000.safetensors", INDEX, MARKER])
def test_a_pickle_in_the_place_of_a_file_is_never_loaded(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Even with checksums that fit, and beside it all the names under which other tools look for pickles."""
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace))
    with zipfile.ZipFile(tmp_path / "torch", "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
    torch_file = (tmp_path / "torch").read_bytes()
    for other in (".metadata", "pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (checkpoint / other).write_bytes(torch_file)
    for data in (bomb, torch_file):
        (checkpoint / name).write_bytes(data)
        if name.endswith("safetensors"):
            record = {"bytes": len(data), "checksums": [zlib.crc32(data)]}
            rewrite(checkpoint, lambda content, record=record: content["files"].update({name: record}))  # type: ignore[misc]
        assert name in refusal(checkpoint)
        assert not trace.exists()
    pickle.loads(bomb)
    assert trace.is_dir()  # the bomb works


def test_nothing_here_can_read_a_pickle() -> None:
    """No module of the checkpoints names a function that would."""
    folder = Path(__file__).parents[2] / "ndbench" / "parallel"
    sources = "".join(path.read_text() for path in folder.glob("state*.py"))
    assert len(sources) > 10_000
    for name in ("import pickle", "torch.load(", "np.load(", "cloudpickle", "FileSystemReader("):
        assert name not in sources


def test_a_plain_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no whole checkpoint: complete\.json is missing"):
        read_index(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_index(tmp_path / "nothing")


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def test_where_the_newest_is_damaged_the_newest_whole_one_is_named(original: Path, tmp_path: Path) -> None:
    old, middle, new = (Path(shutil.copytree(original, tmp_path / f"step-0000001{n}")) for n in range(3))
    for serial, folder in enumerate((old, middle, new)):
        marker = json.loads((folder / MARKER).read_bytes())
        (folder / MARKER).write_text(json.dumps(marker | {"serial": serial}))
    spoil(new / FILES[0])
    reason = f"rank 0: CheckpointError: {new / FILES[0]} is damaged"
    said = _instead_of(new, tmp_path, reason)
    assert said is not None
    assert said.endswith(f"resume={middle}")
    said = _instead_of(new, tmp_path, "rank 0: RuntimeError: another")
    assert said == f"the newest whole one is {new}: once mended, resume=auto goes on from it"
    spoil(middle / FILES[1])
    assert newest_whole(tmp_path, new) == old
    spoil(new / INDEX)
    config = Config(resume="auto")
    with pytest.raises(CheckpointError, match=rf"{new.name}/{INDEX} is damaged.*resume={old}$"):
        start_of(config, tmp_path, tmp_path / "none")
    spoil(old / INDEX)
    assert newest_whole(tmp_path, new) is None
    assert _instead_of(new, tmp_path, reason) == "no other checkpoint there is whole"


def test_where_a_marker_is_damaged_the_newest_whole_one_is_named(original: Path, tmp_path: Path) -> None:
    old, new = (Path(shutil.copytree(original, tmp_path / f"step-0000001{n}")) for n in range(2))
    (new / MARKER).write_text("{")
    for resume in ("auto", str(new)):
        with pytest.raises(CheckpointError, match=rf"{new.name}/{MARKER} is damaged.*resume={old}$"):
            start_of(Config(resume=resume), tmp_path, tmp_path / "none")
    (old / MARKER).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{MARKER} is damaged: it is not the marker of a checkpoint$"):
        start_of(Config(resume="auto"), tmp_path, tmp_path / "none")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_a_checkpoint_is_not_waited_for(name: str, original: Path, tmp_path: Path) -> None:
    old, new = (Path(shutil.copytree(original, tmp_path / f"step-0000001{n}")) for n in range(2))
    (new / name).unlink()
    os.mkfifo(new / name)
    assert newest_whole(tmp_path) == old
    if name in (INDEX, MARKER):
        with pytest.raises(CheckpointError, match=rf"{name} is not a regular file; the newest whole one is {old}"):
            start_of(Config(resume="auto"), tmp_path, tmp_path / "none")
