"""Whether this process is one rank of a world that somebody else started (torchrun, srun, mpirun).

ndbench starts its own ranks; started N times over, N parents would measure each other.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", ""),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "srun --ntasks=1 "),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("mpirun", "PMI_RANK", "PMI_SIZE", ""),
)
"""Who sets it, the variable of the rank, that of the world, and how one process is started there."""


def refuse_outer_world(environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Raises ``ValueError`` with the right command when this process has a rank in a world of more than one."""
    for launcher, rank, world, prefix in _LAUNCHERS:
        size = environ.get(world, "")
        if rank in environ and size.isdigit() and int(size) > 1:
            # a suite has layouts of its own for what the machine shows
            sized = any(word.startswith(("world_size=", "suite=")) for word in argv) or "--resume" in argv
            command = shlex.join(["ndbench", *argv, *([] if sized else [f"world_size={size}"])])
            raise ValueError(
                f"started by {launcher} as rank {environ[rank]} of {size} ({rank}, {world}): ndbench starts its own "
                f"ranks, and {size} of it would measure each other; start it once: {prefix}{command}"
            )
