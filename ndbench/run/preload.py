"""Imported by the fork server: everything a rank needs, so that no rank pays for importing it.

Nothing here may create a thread, a process group or a CUDA context: those do not survive the fork.
"""

import signal
import threading
import warnings

import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.flop_counter  # noqa: F401

import ndbench.engines.bundled
import ndbench.run.worker  # noqa: F401
from ndbench.run.process import adopt_orphans

# What a killed rank had started becomes the fork server's, and so is still found below the run and ended.
adopt_orphans()
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")

if threading.current_thread() is threading.main_thread():
    # A scheduler's SIGTERM, and a terminal's SIGHUP, go to every process of a job: without their server, ranks look as
    # if they had died. A rank puts SIGTERM's own meaning back; SIGHUP is the parent's to answer.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
