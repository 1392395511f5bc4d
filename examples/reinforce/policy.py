"""The policy: the small GPT of examples/train, for a trainer and a server, which compute the same log-probabilities.

The window of tokens has the same length in every call, so that attention, which is PyTorch's, has the same sizes too.
All linear layers, the output layer included, are quire's: a row of their results does not depend on the batch.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from model import Gpt  # noqa: E402
from settings import Settings  # noqa: E402

import quire  # noqa: E402
from quire.recipe import MXFP8BlockScaling, NVFP4BlockScaling, Recipe  # noqa: E402

#: In NVFP4 each row of x has an amax of its own, so that a row's codes do not depend on the other rows of the batch.
RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
}


def make_trainer(settings: Settings, recipe: Recipe) -> Gpt:
    torch.manual_seed(settings.seed)
    return quire.convert(Gpt(settings), recipe, min_features=1)


def make_server(settings: Settings, recipe: Recipe, like_training: bool = True) -> Gpt:
    """A model with quantized weights, which quire.refit replaces by those of the trainer. like_training: whether they
    have the specs of training. Without, NVFP4 weights have scales for 1 x 16 values instead of 16 x 16."""
    like = "training" if like_training else None
    model = Gpt(settings).eval()
    return quire.convert(model, recipe, for_inference=True, like=like, tokens=None, min_features=1)


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [batch, window] -> float32 [batch, window, 256], of each token that may come next."""
    with quire.batch_invariant():
        return F.log_softmax(model(tokens), -1)


def of_tokens(log_p: torch.Tensor, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """The log-probability of each token behind the prompt, [batch, window - prompt]."""
    return log_p[:, prompt - 1 : -1].gather(-1, tokens[:, prompt:, None]).squeeze(-1)
