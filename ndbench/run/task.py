"""The frozen description of one repeat, as the runner hands it to the ranks, and what each rank hands back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ndbench.config import Cell, cell_from_dict
from ndbench.results.store import read_json, write_json

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")
"""What gloo, NCCL and the sockets below them say of a rank that is gone."""


@dataclass(frozen=True)
class Task:
    cell: Cell
    repeat: int
    seed: int
    structure: bool
    """Record collectives, FLOPs and tracked memory from one extra step."""
    handicap: float
    """Times its own duration that each step burns again."""
    folder: Path
    """Where the ranks write: the task itself, one report and one log a rank, the step counter."""
    runner: int
    """Process id of the run; the ranks end when it does."""
    started: float = 0.0
    """``time.time()`` of the launch, for the time to the first step."""
    turns: Path | None = None
    """Folder of the pipes over which the ranks are told when to step; null steps freely."""
    profile: bool = False
    """Trace one more step and break its time down."""

    @property
    def path(self) -> Path:
        return self.folder / "task.json"

    def report_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.json"

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def trace_path(self, rank: int) -> Path:
        return self.folder / f"trace{rank}.json.gz"

    @property
    def counter_path(self) -> Path:
        return self.folder / "step"

    def save(self) -> None:
        write_json(
            self.path,
            {
                "cell": self.cell.to_dict(),
                "repeat": self.repeat,
                "seed": self.seed,
                "structure": self.structure,
                "profile": self.profile,
                "handicap": self.handicap,
                "folder": str(self.folder),
                "runner": self.runner,
                "started": self.started,
                "turns": None if self.turns is None else str(self.turns),
            },
        )

    @classmethod
    def load(cls, path: Path) -> Task:
        values = read_json(path)
        values["cell"] = cell_from_dict(values["cell"])
        values["folder"] = Path(values["folder"])
        values["turns"] = Path(values["turns"]) if values["turns"] else None
        return cls(**values)


@dataclass
class RankReport:
    """What one rank measured; fields are null when it did not come that far. Non-finite numbers are stored as null."""

    rank: int
    outcome: str = "failed"
    reason: str | None = None
    failed_at: float | None = None
    """``time.time()`` of the exception: the first one is the cause, the others lost their peer."""
    seconds: list[float] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    grad_norm: list[float | None] | None = None
    tokens: list[int | None] | None = None
    """Valid tokens of each step as the engine counted them."""
    valid_tokens: list[int] = field(default_factory=list)
    """The same as the data says."""
    tokens_per_step: int | None = None
    data_hash: str | None = None
    time_to_first_step: float | None = None
    memory: dict[str, int | None] | None = None
    structure: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    yardstick_before: dict[str, float | None] | None = None
    yardstick_after: dict[str, float | None] | None = None
    compile_seconds: float | None = None
    compile_cache: str = "off"
    engine: dict[str, Any] = field(default_factory=dict)
    silent: bool = False
    """A script's rank that printed no step: rank 0's lines are the measurement."""

    @property
    def lost_peer(self) -> bool:
        """Whether its error is what the end of another rank looks like."""
        return any(words in (self.reason or "") for words in LOST_PEER)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> RankReport:
        return cls(**read_json(path))
