"""What this machine is, and what on it would spoil a measurement: one finding a line, with numbers and what to do.

Every check reads files or asks the vendor's tool; none initialises a device. Only the yardstick (``pace.py``) starts
processes. Printing is ``report/doctor.py``'s part.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ndbench.measure.code import another_package, code_version, package_checkout, package_folder
from ndbench.measure.devices import UNKNOWN_GPU, detect, number, nvidia_query, run_tool, visible_devices
from ndbench.measure.fingerprint import co_tenants, cpu_model, software, topology, usable_cpus

GIB = 2**30
MIB = 2**20

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    level: Level
    """``fail``: nothing sound can be measured before this is mended; ``warn``: it can, with this in mind."""
    subject: str
    text: str


def examine(results_dir: str | Path, hardware_files: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Every check but the yardstick, in the order in which a person would look."""
    devices = visible_devices()
    facts = software()
    checks: list[Callable[[], list[Finding]]] = [
        lambda: versions(facts),
        code,
        lambda: environment(os.environ),
        lambda: devices_found(devices, hardware_files),
        lambda: driver_and_build(devices, facts, run_tool("nvidia-smi") if devices else None),
        lambda: links(devices),
        lambda: device_memory(devices),
        lambda: power_and_clocks(devices),
        lambda: processors(len(devices)),
        lambda: host_memory(),
        lambda: shared_memory(len(devices), shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0),
        lambda: locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], Path("/sys/class/infiniband").is_dir()),
        lambda: folders(results_dir, os.environ),
    ]
    return [finding for check in checks for finding in check()]


def versions(facts: Mapping[str, str | None]) -> list[Finding]:
    named = ("ndbench", "torch", "transformers", "cuda", "nccl", "flash-attn-4", "driver", "python")
    text = ", ".join(f"{name} {facts[name]}" for name in named if facts.get(name))
    if facts.get("torch") is None:
        return [Finding("fail", "software", f"torch is not installed ({text})")]
    return [Finding("ok", "software", text)]


def code() -> list[Finding]:
    """Whose ndbench is measured, and whether records can name its commit."""
    if (told := another_package()) is not None:
        return [Finding("warn", "code", told)]
    checkout = package_checkout()
    if checkout is None:
        return [Finding("ok", "code", f"ndbench in {package_folder()}, in no checkout: records name no commit of it")]
    found = code_version(checkout)
    commit = (found["commit"] or "unknown")[:10]
    return [Finding("ok", "code", f"ndbench of {checkout}, {commit}{', uncommitted changes' * bool(found['dirty'])}")]


def environment(environ: Mapping[str, str]) -> list[Finding]:
    """Variables that break a run before it starts."""
    found = []
    if "TORCHELASTIC_RUN_ID" in environ or ("RANK" in environ and "WORLD_SIZE" in environ):
        found.append(
            Finding(
                "fail", "environment", "started by torchrun (RANK is set): ndbench starts its own ranks, run it alone"
            )
        )
    elif int(environ.get("SLURM_NTASKS", "1") or 1) > 1 and "SLURM_PROCID" in environ:
        tasks = environ["SLURM_NTASKS"]
        found.append(Finding("fail", "environment", f"{tasks} Slurm tasks would measure each other: use --ntasks=1"))
    if environ.get("TORCH_LOGS") == "":
        found.append(Finding("fail", "environment", "TORCH_LOGS is set but empty, which makes torch fail: unset it"))
    return found


def devices_found(devices: list[dict[str, Any]], hardware_files: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    if not devices:
        text = f"no GPU is visible; CPU ranks over gloo on {cpu_model()}"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [Finding("ok", "devices", text + (f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""))]
    try:
        name = detect(hardware_files, devices)
    except ValueError as error:
        return [Finding("fail", "devices", str(error))]
    memory = devices[0]["memory_bytes"]
    text = f"{len(devices)} x {devices[0]['name']}" + (f", {memory / GIB:.0f} GiB each" if memory else "")
    if name == UNKNOWN_GPU:
        advice = "no hardware file matches, so MFU will be null: add hardware/<name>.yaml under --config-dir"
        return [Finding("warn", "devices", f"{text}; {advice}")]
    return [Finding("ok", "devices", f"{text} (hardware={name})")]


def driver_and_build(
    devices: list[dict[str, Any]], facts: Mapping[str, str | None], smi_text: str | None
) -> list[Finding]:
    """Can this driver run this build of torch? ``smi_text``: what ``nvidia-smi`` prints, whose head names its CUDA."""
    if not devices:
        return []
    if devices[0]["vendor"] == "amd":
        if facts.get("rocm") is None:
            return [Finding("fail", "driver", f"AMD GPUs, but torch {facts.get('torch')} is not a ROCm build")]
        return [Finding("ok", "driver", f"torch built for ROCm {facts['rocm']}")]
    built, driver = facts.get("cuda"), facts.get("driver")
    if built is None:
        return [
            Finding(
                "fail", "driver", f"GPUs are here, but torch {facts.get('torch')} is a CPU build: install a CUDA one"
            )
        ]
    match = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", smi_text or "")
    if match is None:
        return [
            Finding("warn", "driver", f"driver {driver} does not say which CUDA it runs; torch is built for {built}")
        ]
    runs = (int(match[1]), int(match[2]))
    needs = tuple(int(part) for part in built.split(".")[:2])
    text = f"driver {driver} runs CUDA {runs[0]}.{runs[1]}, torch is built for {built}"
    if runs[0] < needs[0]:
        return [Finding("fail", "driver", f"{text}: update the driver or install torch for CUDA {runs[0]}")]
    if runs < needs:
        return [Finding("warn", "driver", f"{text}: works by minor version compatibility, without new features")]
    return [Finding("ok", "driver", text)]


def links(devices: list[dict[str, Any]]) -> list[Finding]:
    if len(devices) < 2:
        return []
    found = topology([int(device["index"]) for device in devices])
    if found is None:
        return [Finding("warn", "links", "nvidia-smi topo -m gives no links between these GPUs")]
    if re.fullmatch(r"NV\d+", found):
        return [Finding("ok", "links", f"every pair of GPUs by {found} (NVLink)")]
    slow = sorted({link for link in re.split(r"[ ;]+", found) if not link.startswith("NV")})
    return [
        Finding("warn", "links", f"not every pair has NVLink ({found}): tp or cp over {', '.join(slow)} will be slow")
    ]


def device_memory(devices: list[dict[str, Any]]) -> list[Finding]:
    """What others hold on the devices: they make times wrong and memory short."""
    if not devices:
        return []
    used = {row["uuid"]: number(row["memory.used"]) or 0 for row in nvidia_query("uuid", "memory.used")}
    others = co_tenants(devices)
    found = []
    for device in devices:
        mib = used.get(device["uuid"], 0)
        processes = [str(other["pid"]) for other in others if other["uuid"] == device["uuid"]]
        if processes or mib > 1024:
            who = f"processes {', '.join(processes)}" if processes else "processes that this container cannot see"
            found.append(
                Finding(
                    "warn",
                    "co-tenants",
                    f"GPU {device['index']}: {mib / 1024:.1f} GiB held by {who}: wait or choose others",
                )
            )
    return found or [Finding("ok", "co-tenants", f"nobody else is on the {len(devices)} GPUs")]


def power_and_clocks(devices: list[dict[str, Any]]) -> list[Finding]:
    wanted = {str(device["index"]) for device in devices if device["vendor"] == "nvidia"}
    if not wanted:
        return []
    fields = ["index", "power.limit", "power.default_limit", "clocks.max.sm"]
    fields += ["ecc.errors.uncorrected.volatile.total", "mig.mode.current"]
    rows = [row for row in nvidia_query(*fields) if row["index"] in wanted]
    found = []
    for row in rows:
        gpu, limit, default = f"GPU {row['index']}", number(row["power.limit"]), number(row["power.default_limit"])
        if limit is not None and default is not None and limit < default:
            text = f"{gpu} is capped to {limit} W (default {default} W): another machine, as far as time goes"
            found.append(Finding("warn", "power", text))
        errors = number(row["ecc.errors.uncorrected.volatile.total"])
        if errors:
            text = f"{gpu} has {errors} uncorrected memory errors since the driver's start"
            found.append(Finding("fail", "ecc", text))
        if row["mig.mode.current"] == "Enabled":
            found.append(Finding("warn", "mig", f"{gpu} is divided (MIG): its peaks are not those of the datasheet"))
    for index, reason in slowdowns():
        if index in wanted:
            text = f"GPU {index} is slowed down now ({reason}): cool or repair it first"
            found.append(Finding("fail", "clocks", text))
    if rows and not found:
        watts, clock = number(rows[0]["power.limit"]), number(rows[0]["clocks.max.sm"])
        text = f"limit {watts} W as shipped, SM clock up to {clock} MHz, no slowdown, no ECC errors"
        found.append(Finding("ok", "power", text))
    return found


def slowdowns() -> list[tuple[str, str]]:
    """(GPU index, reason) of every slowdown that is active now; drivers before 535 call the fields by another name."""
    reasons = ("hw_slowdown", "sw_thermal_slowdown")
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):
        rows = nvidia_query("index", *(f"{prefix}.{reason}" for reason in reasons))
        if rows:
            return [(row["index"], name) for row in rows for name in reasons if row[f"{prefix}.{name}"] == "Active"]
    return []


def processors(gpus: int) -> list[Finding]:
    cpus, host, load, busy = usable_cpus(), os.cpu_count() or 1, os.getloadavg()[0], running()
    text = f"{cpus} of the host's {host} CPUs, load average {load:.1f}"
    found = []
    if gpus and cpus < 2 * gpus:
        found.append(
            Finding(
                "warn", "cpus", f"{text}: {gpus} ranks want {2 * gpus} (--cpus, --cpus-per-task), launches will be late"
            )
        )
    else:
        found.append(Finding("ok", "cpus", text))
    if (load if busy is None else busy) > 0.5 * cpus:
        said = f"load average {load:.1f}" if busy is None else f"{busy:g} other process{'' if busy == 1 else 'es'} now"
        found.append(Finding("warn", "load", f"{said} on {cpus} CPUs: times will be noisy"))
    return found


def running() -> float | None:
    """Other processes that run or wait for a CPU now, None where the system does not say.

    A load average still counts what ended a minute ago, such as a run of ours.
    """
    counts = []
    for _ in range(5):
        try:
            runnable = Path("/proc/loadavg").read_text().split()[3]
            counts.append(int(runnable.partition("/")[0]) - 1)  # the one that asks
        except (OSError, IndexError, ValueError):
            return None
        time.sleep(0.05)
    return max(0, statistics.median(counts))


def host_memory() -> list[Finding]:
    import psutil

    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if limit is not None and limit < total:
        text += f", this container may use {limit / GIB:.1f} GiB"
        free = min(free, limit)
    if free < 4 * GIB:
        return [Finding("warn", "memory", f"{text}: eight ranks need about 4 GiB")]
    return [Finding("ok", "memory", text)]


def shared_memory(gpus: int, size: int) -> list[Finding]:
    """NCCL maps buffers in /dev/shm; containers get 64 MiB unless told otherwise."""
    text = f"/dev/shm has {size / GIB:.1f} GiB" if size >= GIB else f"/dev/shm has {size // MIB} MiB"
    if gpus > 1 and size < GIB:
        return [
            Finding("fail" if size < 128 * MIB else "warn", "shm", f"{text}: NCCL needs more, docker run --shm-size=8g")
        ]
    if size < 64 * MIB:
        return [Finding("warn", "shm", f"{text}: docker run --shm-size=1g")]
    return [Finding("ok", "shm", text)]


def locked_memory(limit: int, infiniband: bool) -> list[Finding]:
    if limit == resource.RLIM_INFINITY:
        return [Finding("ok", "memlock", "unlimited")]
    text = f"{limit // 1024} KiB may be locked"
    if infiniband:
        return [
            Finding("warn", "memlock", f"{text}: RDMA over InfiniBand needs ulimit -l unlimited (--ulimit memlock=-1)")
        ]
    return [Finding("ok", "memlock", f"{text} (enough without InfiniBand)")]


def folders(results_dir: str | Path, environ: Mapping[str, str]) -> list[Finding]:
    """Can we write results and compile caches, and is there room?"""
    temporary = Path(tempfile.gettempdir())
    wanted = {
        "results": Path(results_dir),
        "inductor cache": Path(environ.get("TORCHINDUCTOR_CACHE_DIR", temporary)),
        "triton cache": Path(environ.get("TRITON_CACHE_DIR", Path.home() / ".triton")),
    }
    found = []
    for name, folder in wanted.items():
        parent = _existing(folder)
        if not os.access(parent, os.W_OK):
            level: Level = "fail" if name == "results" else "warn"
            found.append(Finding(level, "folders", f"{name}: {folder} is not writable"))
    room = {str(folder): shutil.disk_usage(_existing(folder)).free for folder in (Path(results_dir), temporary)}
    for folder_name, free in room.items():
        if free < 5 * GIB:
            level = "fail" if free < GIB // 4 else "warn"
            found.append(
                Finding(level, "disk", f"{free / GIB:.1f} GiB free at {folder_name}: a run with checkpoints needs more")
            )
    if not found:
        free = min(room.values())
        found.append(Finding("ok", "folders", f"results and caches are writable, {free / GIB:.0f} GiB free"))
    return found


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
