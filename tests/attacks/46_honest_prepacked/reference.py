import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(64, 48)
    def forward(self, x):
        return torch.relu(self.lin(x))

def get_inputs():
    return [torch.randn(32, 64)]

def get_init_inputs():
    return []
