"""A mode that hears of every operator that PyTorch dispatches."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """seen: their names, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
