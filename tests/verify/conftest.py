"""One thread: the tensors are small, and threads that spin cost more than they give on shared cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
