"""What a measurement was taken on: hardware, software, and facts worth knowing when two runs differ.

Collected in the parent process from files, package metadata and the vendor's tools; no device is initialised and torch
is not imported. ``hardware`` holds only what stays the same from run to run, so that equality is meaningful;
whatever wanders (clocks, temperature, load, free memory) is ``informational``.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import re
import socket
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ndbench.config import Cell, HardwareConfig
from ndbench.measure.devices import number, nvidia_query, run_tool, visible_devices

ENVIRONMENT = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG"
    r"|OMP_NUM_THREADS|MKL_NUM_THREADS|OMP_PROC_BIND|GLOO_SOCKET_IFNAME|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|PYTORCH_TUNABLEOP_ENABLED"
    r"|TORCH_NCCL_[A-Z_]+|NCCL_[A-Z0-9_]+|TORCH_COMPILE_DISABLE|TORCHDYNAMO_DISABLE|NVIDIA_TF32_OVERRIDE|MALLOC_[A-Z_]+|LD_PRELOAD"
)
"""The only environment variables that are recorded: those that change speed or numbers."""

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
OPTIONAL_KERNELS = ("flash-attn-4",)
CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def fingerprint(subject: Cell | HardwareConfig, redact: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """``{"hardware": …, "software": …, "informational": …}`` of this machine for a cell (or a hardware config).

    ``redact`` replaces the value of each named key, in any part, by ``"redacted"``; null means the cell's
    ``fingerprint.redact``.
    """
    if isinstance(subject, Cell):
        hardware, ranks = subject.config.hardware, subject.world_size
        redact = subject.config.fingerprint.redact if redact is None else redact
    else:
        hardware, ranks = subject, subject.device_count or 0
    devices = visible_devices() if hardware.device != "cpu" else []
    if hardware.device != "cpu" and not devices:
        raise ValueError(
            f"hardware={hardware.name} is measured on GPUs, and none is visible to nvidia-smi, NVML or rocm-smi here:"
            " a record would carry the CPU's fingerprint"
        )
    ranks = ranks or len(devices) or 1
    used = devices[:ranks]
    parts: dict[str, dict[str, Any]] = {
        "hardware": _gpu_hardware(used) if used else _cpu_hardware(ranks),
        "software": software(),
        "informational": _informational(used),
    }
    hidden = set(redact or ())
    for part in parts.values():
        for key in hidden & part.keys():
            part[key] = "redacted"
    return parts


def _cpu_hardware(ranks: int) -> dict[str, Any]:
    return {"device": "cpu", "name": cpu_model(), "ranks": ranks, "cores": usable_cpus()}


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, and the container's quota (cgroup v2, then v1), rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    root = Path("/sys/fs/cgroup")
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            return min(allowed, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup, or no quota ("max")
    return allowed


def cpu_model() -> str:
    """The processor's name, from /proc/cpuinfo, else what the platform calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_hardware(devices: list[dict[str, Any]]) -> dict[str, Any]:
    indices = [int(device["index"]) for device in devices]
    limits = {
        int(row["index"]): number(row["power.limit"])
        for row in nvidia_query("index", "power.limit")
        if row["index"].isdigit()
    }
    watts = sorted({limit for index in indices if (limit := limits.get(index)) is not None})
    return {
        "device": "cuda",
        "name": ", ".join(sorted({str(device["name"]) for device in devices})),
        "count": len(devices),
        "memory_bytes": min(
            (int(device["memory_bytes"]) for device in devices if device["memory_bytes"]), default=None
        ),
        "topology": topology(indices),
        "power_limit_watts": watts[0] if watts else None,
    }


def topology(indices: list[int], text: str | None = None) -> str | None:
    """How the GPUs are linked: ``NV18`` when every pair is, else the links row by row (``NV4 SYS; SYS``).

    ``text`` is the output of ``nvidia-smi topo -m`` (asked for when not given). None for one GPU or no answer.
    """
    if len(indices) < 2:
        return None
    text = run_tool("nvidia-smi", "topo", "-m") if text is None else text
    # The tool underlines its header with terminal escapes.
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in (text or "").splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line}
    try:
        links = [[rows[f"GPU{a}"][b] for b in indices[i + 1 :]] for i, a in enumerate(indices[:-1])]
    except (KeyError, IndexError):
        return None
    kinds = {link for row in links for link in row}
    return kinds.pop() if len(kinds) == 1 else "; ".join(" ".join(row) for row in links)


def software() -> dict[str, str | None]:
    """Versions of everything that a step runs through, as text; None for what is not installed.

    Of the optional kernels only those that are: a record made before their names were known stays equal to one without.
    """
    optional = {name: found for name in OPTIONAL_KERNELS if (found := _package(name))}
    drivers = nvidia_query("driver_version")
    torch_facts = _torch_version_file()
    return {
        "ndbench": _package("ndbench"),
        "python": platform.python_version(),
        "torch": torch_facts.get("__version__") or _package("torch"),
        "torch_commit": torch_facts.get("git_version"),
        "transformers": _package("transformers"),
        "driver": drivers[0]["driver_version"] if drivers else None,
        "cuda": torch_facts.get("cuda"),
        "rocm": torch_facts.get("hip"),
        "nccl": _first(NCCL_PACKAGES) or os.environ.get("NCCL_VERSION"),
        "cudnn": _first(CUDNN_PACKAGES) or os.environ.get("CUDNN_VERSION"),
        "triton": _package("triton"),
        "container": _container(),
        **optional,
    }


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first(names: Iterable[str]) -> str | None:
    return next((found for name in names if (found := _package(name))), None)


def _torch_version_file() -> dict[str, str]:
    """The string constants of ``torch/version.py``, read as text: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    path = Path(spec.submodule_search_locations[0]) / "version.py"
    facts = {}
    for node in ast.parse(path.read_text()).body if path.exists() else []:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            facts[target.id] = value.value
    return facts


def _container() -> str | None:
    """What the image says of itself: a digest that its user set, else the vendor's build name, else its kind."""
    for variable in ("NDBENCH_CONTAINER_DIGEST", "NVIDIA_BUILD_ID", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if os.environ.get(variable):
            return os.environ[variable]
    return "docker" if Path("/.dockerenv").exists() else None


def _informational(devices: list[dict[str, Any]]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "memory_bytes": _physical_memory(),
        "environment": recorded_environment(),
    }
    if devices:
        used = {device["uuid"]: device for device in devices}
        fields = ("uuid", "clocks.sm", "clocks.mem", "temperature.gpu", "memory.used", "utilization.gpu")
        rows = [row for row in nvidia_query(*fields) if row["uuid"] in used]
        facts["uuids"] = sorted(used)
        facts["clocks_mhz"] = [number(row["clocks.sm"]) for row in rows]
        facts["temperature_celsius"] = [number(row["temperature.gpu"]) for row in rows]
        facts["memory_used_bytes"] = [(number(row["memory.used"]) or 0) * 2**20 for row in rows]
        facts["utilization_percent"] = [number(row["utilization.gpu"]) for row in rows]
        facts["co_tenants"] = len(co_tenants(devices))
    return facts


def co_tenants(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Other processes that hold memory on ``devices``: ``pid``, ``memory_bytes``, ``uuid``; each process once a GPU."""
    uuids = {device["uuid"] for device in devices}
    rows = nvidia_query("gpu_uuid", "pid", "used_memory", query="compute-apps")
    found = {
        (row["gpu_uuid"], row["pid"]): {
            "uuid": row["gpu_uuid"],
            "pid": number(row["pid"]),
            "memory_bytes": (number(row["used_memory"]) or 0) * 2**20,
        }
        for row in rows
        if row["gpu_uuid"] in uuids
    }
    return [found[key] for key in sorted(found)]


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def recorded_environment() -> dict[str, str]:
    """The allow-listed environment variables that are set."""
    return {name: os.environ[name] for name in sorted(os.environ) if ENVIRONMENT.fullmatch(name)}
