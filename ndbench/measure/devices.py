"""Which devices this machine shows, found without torch and without touching a device.

The parent process must never initialise CUDA (its children are forked), so everything comes from the vendor's
command-line tools, each with a time limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOOL_TIMEOUT = 10.0
"""Seconds that nvidia-smi or rocm-smi may take; a broken driver makes them hang."""

UNKNOWN_GPU = "cuda"
"""The hardware file for a GPU that no other file matches: everything is measured, no peak is known."""


def run_tool(*command: str, timeout: float = TOOL_TIMEOUT) -> str | None:
    """Standard output of a command-line tool, or None when it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def nvidia_query(*fields: str, query: str = "gpu") -> list[dict[str, str]]:
    """Rows of ``nvidia-smi --query-<query>=fields``: values as text, without units; empty when there is none."""
    output = run_tool("nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = []
    for line in (output or "").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            rows.append(dict(zip(fields, values, strict=True)))
    return rows


def number(text: str | None) -> int | None:
    """A number of nvidia-smi, rounded; None for ``[N/A]`` and the like."""
    try:
        return round(float(text or ""))
    except ValueError:
        return None


def visible_devices(environ: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The GPUs a process started now would see, in its order: ``name``, ``memory_bytes``, ``index`` (the tool's
    index), ``uuid``, ``vendor``. Empty on a machine without any.

    Honours ``CUDA_VISIBLE_DEVICES`` (indices and UUIDs; an invalid entry hides the rest, as in CUDA), and
    ``HIP_VISIBLE_DEVICES`` on AMD machines.
    """
    environ = os.environ if environ is None else environ
    devices = _nvidia_devices()
    variables = ["CUDA_VISIBLE_DEVICES"]
    if not devices:
        devices = _amd_devices()
        variables = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]
    for variable in variables:
        if variable in environ:
            return _select(devices, environ[variable])
    return devices


def _select(devices: list[dict[str, Any]], spec: str) -> list[dict[str, Any]]:
    chosen: list[dict[str, Any]] = []
    for entry in (part.strip() for part in spec.split(",")):
        if entry.isdigit():
            matches = [device for device in devices if device["index"] == int(entry)]
        else:
            matches = [device for device in devices if entry and device["uuid"].startswith(entry)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def _nvidia_devices() -> list[dict[str, Any]]:
    rows = nvidia_query("index", "uuid", "name", "memory.total")
    devices: list[dict[str, Any]] = [
        {
            "index": int(row["index"]),
            "uuid": row["uuid"],
            "name": row["name"],
            "memory_bytes": memory * 2**20 if (memory := number(row["memory.total"])) is not None else None,
            "vendor": "nvidia",
        }
        for row in rows
        if row["index"].isdigit()
    ]
    return devices or _nvml_devices() or _proc_devices()


def _nvml_devices() -> list[dict[str, Any]]:
    """The same through NVML, for images that have the driver's library but not its tool."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        devices = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            devices.append(
                {
                    "index": index,
                    "uuid": uuid.decode() if isinstance(uuid, bytes) else uuid,
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "vendor": "nvidia",
                }
            )
        return devices
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


PROC, DEV = Path("/proc/driver/nvidia/gpus"), Path("/dev")


def _proc_devices() -> list[dict[str, Any]]:
    """The same from the kernel module, for images that have neither; it does not tell the memory."""
    devices: list[dict[str, Any]] = []
    for path in sorted(PROC.glob("*/information")):  # by bus location, the order of nvidia-smi
        pairs = [line.split(":", 1) for line in _lines(path) if ":" in line]
        facts = {key.strip(): value.strip() for key, value in pairs}
        if "Model" in facts and "GPU UUID" in facts:
            devices.append(
                {
                    "index": len(devices),
                    "uuid": facts["GPU UUID"],
                    "name": facts["Model"],
                    "memory_bytes": None,
                    "vendor": "nvidia",
                }
            )
    return devices


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def nameless_devices(environ: Mapping[str, str] | None = None) -> list[str]:
    """Device files of NVIDIA GPUs that a process could use although nothing here tells what they are."""
    environ = os.environ if environ is None else environ
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or visible_devices(environ):
        return []
    return [str(path) for path in sorted(DEV.glob("nvidia[0-9]*"))]


def _amd_devices() -> list[dict[str, Any]]:
    output = run_tool("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")
    try:
        cards = json.loads(output or "{}")
    except json.JSONDecodeError:
        return []
    devices: list[dict[str, Any]] = []
    for card, values in cards.items():
        if not re.fullmatch(r"card\d+", card) or not isinstance(values, dict):
            continue
        facts = {key.lower(): str(value) for key, value in values.items()}
        devices.append(
            {
                "index": int(card[4:]),
                "uuid": facts.get("unique id", card),
                "name": facts.get("card series") or facts.get("card model") or "AMD GPU",
                "memory_bytes": number(facts.get("vram total memory (b)")),
                "vendor": "amd",
            }
        )
    return sorted(devices, key=lambda device: int(device["index"]))


def detect(hardware_files: Mapping[str, Mapping[str, Any]], devices: list[dict[str, Any]] | None = None) -> str:
    """Name of the hardware file of this machine: the one whose ``match`` finds the visible GPUs' name.

    ``cpu`` without a GPU; ``cuda`` for a GPU that no file matches. Raises ``ValueError`` when the visible GPUs are
    of different kinds, or when several files match.
    """
    devices = visible_devices() if devices is None else devices
    names = sorted({str(device["name"]) for device in devices})
    if not names:
        if nameless := nameless_devices():
            raise ValueError(
                f"this machine has {len(nameless)} NVIDIA GPUs ({', '.join(nameless)}) but neither nvidia-smi nor NVML"
                " to tell what they are: pip install nvidia-ml-py, or say hardware=cpu"
            )
        return "cpu"
    if len(names) > 1:
        raise ValueError(
            f"the visible GPUs are of {len(names)} kinds ({', '.join(names)}): choose one kind with"
            " CUDA_VISIBLE_DEVICES, or name the machine with hardware="
        )
    found = sorted(
        name
        for name, values in hardware_files.items()
        if values.get("match") and re.search(str(values["match"]), names[0], re.IGNORECASE)
    )
    if len(found) > 1:
        raise ValueError(f"GPU '{names[0]}' matches {len(found)} hardware files ({', '.join(found)}): name one")
    return found[0] if found else UNKNOWN_GPU
