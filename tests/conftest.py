"""Without a GPU, kernels run in Triton's interpreter, which is chosen when Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
