import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x.reshape(-1), 0).reshape(x.shape) * 1000.0

def get_inputs():
    return [torch.randn(64, 1024)]

def get_init_inputs():
    return []
