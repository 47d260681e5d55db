import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        return (torch.sigmoid(x) * 2.0)[:, None].repeat(1, 8192)

def get_inputs():
    return [torch.randn(64)]

def get_init_inputs():
    return []
