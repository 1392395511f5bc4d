"""Text from a trained model, one byte at a time."""

import sys

import checkpoint
import torch
from model import Gpt, make_logits
from run import make_recipe
from settings import ExampleError, Session, Settings


def load_model(name: str, session: Session) -> tuple[Gpt, Settings]:
    """The model of one recipe from its checkpoint, with the settings it was trained with."""
    path = session.checkpoint(name)
    if not path.exists() and list(session.out.glob(f"{name}.rank*.pt")):
        raise ExampleError(
            f"the checkpoints of {name} in {session.out} are those of several processes, which have parts of the "
            "model; train with one process to sample"
        )
    if not path.exists():
        raise ExampleError(f"no checkpoint {path} to sample from; train first, with the same --out and --recipe {name}")
    content = checkpoint.load(path)
    settings = Settings(**content["settings"])
    model = Gpt(settings)
    model.load_state_dict(content["model"])
    return model, settings


@torch.no_grad()
def generate(name: str, prompt: str, length: int, session: Session, temperature: float = 0.7) -> None:
    """Print `prompt` and `length` bytes that the model of recipe `name` continues it with, computed in that recipe."""
    model, settings = load_model(name, session)
    logits = make_logits(model, make_recipe(name), settings.dtype)
    chance = torch.Generator().manual_seed(settings.seed)
    text = torch.tensor([list(prompt.encode())])
    write(prompt.encode())
    for _ in range(length):
        last = logits(text[:, -model.seq :])[:, -1].float()
        text = torch.cat([text, torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=chance)], 1)
        write(bytes(text[0, -1:].tolist()))
    write(b"\n")


def write(text: bytes) -> None:
    """Bytes as they are: the model may stop in the middle of a character."""
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
