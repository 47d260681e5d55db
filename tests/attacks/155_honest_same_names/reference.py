import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        h = torch.exp(-x * x)
        return h, h.cumsum(-1)[:, -1] / h.shape[1]

def get_inputs():
    return [torch.randn(64, 512)]

def get_init_inputs():
    return []
