"""Imported once, by the process that forks the workers: what torch imports only at first use.

So a worker is there in a tenth of a second, and what its process holds before its first load is
what it has to hold after the last.
"""

from __future__ import annotations

import torch
from torch import nn

from warmcast.loader.skeletons import skeleton

torch.set_num_threads(1)  # a pool of threads would not survive the fork
with skeleton():
    nn.Linear(2, 2)
