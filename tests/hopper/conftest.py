"""The model works on small blocks, for which one thread is fastest; two workers would also fight for two cores."""

import torch

torch.set_num_threads(1)
