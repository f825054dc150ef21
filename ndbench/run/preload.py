"""Imported by the fork server before anything else: everything a rank needs, so that no rank pays for importing it.

Nothing here, and nothing that the server imports later, may create a thread, a process group or a CUDA context: those
do not survive the fork.
"""

import signal
import sys
import threading
import warnings

if threading.current_thread() is threading.main_thread():
    # A scheduler's SIGTERM, and a terminal's Ctrl-C and SIGHUP, go to every process of a job: without their server,
    # ranks look as if they had died. A rank puts SIGTERM's own meaning back; the others are the parent's to answer.
    # They were blocked until here.
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

# transformers imports torchao where it is installed, and torchao asks the GPU what it can do: a rank imports it itself.
# preload_end gives it back.
sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]

import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import torch.utils.flop_counter  # noqa: E402, F401

import ndbench.engines.bundled  # noqa: E402
import ndbench.run.worker  # noqa: E402, F401
from ndbench.run.process import adopt_orphans  # noqa: E402

# What a killed rank had started becomes the fork server's, and so is still found below the run and ended.
adopt_orphans()
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
