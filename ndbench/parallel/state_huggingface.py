"""A model as a Hugging Face folder (config.json and safetensors, sharded with an index when large), and back.

Written by rank 0, one whole tensor in memory at a time; read by every rank, its own slices only. Tied parameters are
stored once, under the name they have first. It knows nothing of the transformers library but its files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from ndbench.parallel.mesh import Mesh
from ndbench.parallel.state_files import (
    DTYPES,
    CheckpointError,
    Entry,
    FileSeries,
    names_file,
    remove,
    sync_folder,
    write_bytes,
)
from ndbench.parallel.state_gather import plan_gather, together
from ndbench.parallel.state_index import Stored
from ndbench.parallel.state_pieces import elect, model_pieces, reshard
from ndbench.parallel.state_read import Slices
from ndbench.parallel.state_write import described, write_gathered

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9


def export_hf(
    folder: Path, model: nn.Module, config: Mapping[str, Any], mesh: Mesh, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write ``folder``, which ``AutoModelForCausalLM.from_pretrained`` loads; it must not exist yet. Collective.

    ``config`` is the content of config.json (:func:`hf_config`). The folder appears when it is whole.
    """
    draft = folder.with_name(f".{folder.name}.tmp")

    def begin() -> None:
        if folder.exists():
            raise CheckpointError(f"{folder} exists already: nothing is overwritten")
        with names_file(draft):
            if draft.exists():
                remove(draft)
            draft.mkdir(parents=True)

    def end() -> None:
        sync_folder(draft)
        with names_file(folder):
            draft.rename(folder)
        sync_folder(folder.parent)

    first = dist.get_rank() == 0
    together(begin if first else _nothing)
    together(lambda: write_hf(draft, model, config, mesh, max_shard_bytes))
    together(end if first else _nothing)


def write_hf(
    folder: Path, model: nn.Module, config: Mapping[str, Any], mesh: Mesh, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, Any]:
    """The files of :func:`export_hf` in a folder that exists; returns, on rank 0, their ``files`` and ``tensors``."""
    reshard(model)
    mine = elect(model_pieces(model, mesh.config.world_size).values(), dist.get_rank(), spread=False)
    planned = plan_gather(mine)
    files = split([item.entry for item in planned], max_shard_bytes)
    series = FileSeries(folder, files, offsets=False)
    write_gathered(series, planned, mine, torch.device(mesh.device_type))
    if dist.get_rank() != 0:
        return {"files": {}, "tensors": {}}
    others = {"config.json": json.dumps(config, indent=2, sort_keys=True)}
    if len(files) > 1:
        where = {entry.name: file for file, entries in files for entry in entries}
        total = {"total_size": sum(item.entry.bytes for item in planned)}
        others[WEIGHTS_INDEX] = json.dumps({"metadata": total, "weight_map": where}, indent=2, sort_keys=True)
    records = series.records
    for name, text in others.items():
        records[name] = write_bytes(folder / name, f"{text}\n".encode())
    tensors = {entry.name: described(entry, entry.size, file) for file, entries in files for entry in entries}
    return {"files": records, "tensors": tensors}


def split(entries: Sequence[Entry], max_bytes: int) -> list[tuple[str, list[Entry]]]:
    """Files of at most ``max_bytes`` (a larger tensor has one of its own), named as transformers names them."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    if len(groups) == 1:
        return [(WEIGHTS, groups[0])]
    return [(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, start=1)]


def hf_config(model: nn.Module) -> dict[str, Any]:
    """What config.json says about a transformers model. Raises :class:`CheckpointError` for another kind of model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise CheckpointError(f"{type(model).__name__} has no transformers configuration: it has no Hugging Face form")
    assert config is not None
    # Sharding changed the class; the name that transformers knows is that of a base.
    own = next((kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")), type(model))
    written: dict[str, Any] = json.loads(config.to_json_string())
    return {**written, "architectures": [own.__name__], "use_cache": True}


def load_hf(folder: Path, model: nn.Module, mesh: Mesh) -> int:
    """Fill ``model``, laid out over ``mesh`` already, from a Hugging Face folder; returns the bytes this rank read.

    Collective. Nothing is changed when the folder is not this model's: a missing or a surplus tensor, another shape.
    """
    reshard(model)
    stored = together(lambda: hf_tensors(folder))
    pieces = model_pieces(model, mesh.config.world_size)
    sources = together(lambda: _sources(folder, model, {name: piece.shape for name, piece in pieces.items()}, stored))
    slices = Slices(folder, stored)

    def read() -> None:
        for name, piece in pieces.items():
            slices.read(piece, sources[name])

    try:
        together(read)
    finally:
        slices.close()
    return slices.bytes_read


def hf_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a Hugging Face folder, from the headers of its safetensors files."""
    index = folder / WEIGHTS_INDEX
    wanted: dict[str, str] | None = None
    if index.is_file():
        with names_file(index):
            data = index.read_bytes()
        try:
            wanted = {str(name): str(file) for name, file in json.loads(data)["weight_map"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    files = [WEIGHTS] if wanted is None else sorted(set(wanted.values()))
    stored: dict[str, Stored] = {}
    for file in files:
        path = folder / file
        if Path(file).name != file:
            raise CheckpointError(f"{index} names the file '{file}', which is not in its folder")
        if not path.is_file():
            pickles = sorted(each.name for each in folder.glob("*.bin"))
            why = f"; {pickles[0]} is a pickle, which is never loaded" if pickles and wanted is None else ""
            raise CheckpointError(f"{path} is missing{why}")
        stored |= _header(path, wanted)
    if wanted is not None and (absent := sorted(set(wanted) - set(stored))):
        raise CheckpointError(f"{folder / wanted[absent[0]]} lacks {absent[0]}, which {WEIGHTS_INDEX} says it has")
    return stored


def _header(path: Path, wanted: Mapping[str, str] | None) -> dict[str, Stored]:
    found = {}
    try:
        with names_file(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if wanted is not None and wanted.get(name) != path.name:
                    continue
                lazy = file.get_slice(name)
                shape = tuple(lazy.get_shape())
                dtype = DTYPES.get(lazy.get_dtype())
                if dtype is None:
                    raise CheckpointError(f"{path} has {name} as {lazy.get_dtype()}, which is not supported")
                found[name] = Stored(dtype, shape, ((path.name, (0,) * len(shape), shape),))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    return found


def _sources(
    folder: Path, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]
) -> dict[str, str]:
    """For each tensor of the model the name it has in the folder."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names = {tied[0]: tied for tied in aliases.values()}
    # A folder of the bare model (without its head's name in front) is read too.
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    bare = not any(name.startswith(prefix) for name in stored)
    sources: dict[str, str] = {}
    for name in shapes:
        tied = names.get(name, [name])
        candidates = [*tied, *(each.removeprefix(prefix) for each in tied if bare)]
        sources[name] = next((each for each in candidates if each in stored), "")
    if missing := [name for name, source in sources.items() if not source]:
        raise CheckpointError(f"{folder} is not of this model: it lacks {_some(missing)}")
    known = {*sources.values(), *(name for tied in names.values() for name in tied)}
    known |= {name for name, _ in model.named_buffers()}
    ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    surplus = [name for name in stored if name not in known and not any(re.search(rule, name) for rule in ignored)]
    if surplus:
        raise CheckpointError(f"{folder} is not of this model, which lacks {_some(surplus)}")
    for name, source in sources.items():
        if stored[source].shape != shapes[name]:
            raise CheckpointError(
                f"{folder} is not of this model: {source} has shape {list(stored[source].shape)}, "
                f"this model's has {list(shapes[name])}"
            )
    return sources


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def _nothing() -> None:
    return None
