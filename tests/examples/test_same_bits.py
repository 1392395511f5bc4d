"""The language model of `./dev train`: a server computes the log-probabilities of the trainer, bit for bit, whatever
the compositions of both their batches are."""

import copy
import importlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pytorch
import quire
from steps import same

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train"
SEQ, VOCABULARY = 48, 256
RECIPES = {
    "mxfp8": quire.recipe.MXFP8BlockScaling(),
    "nvfp4": quire.recipe.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
}
#: How a server divides five sequences into batches. The trainer has all of them in one.
COMPOSITIONS = ((1, 1, 1, 1, 1), (2, 3))


@pytest.fixture(scope="module")
def gpt():
    """A function that makes the model."""
    sys.path.insert(0, str(TRAIN))
    try:
        model, settings = (importlib.import_module(name) for name in ("model", "settings"))
    finally:
        sys.path.remove(str(TRAIN))
    sizes = settings.Settings(2, 128, SEQ, 5, 1, 1e-3, 0, "fp32", 1)

    def make():
        torch.manual_seed(0)
        made = model.Gpt(sizes)
        with torch.no_grad():  # the start of a run has logits of nearly nothing
            for parameter in made.parameters():
                parameter.mul_(4 if parameter.dim() == 2 else 1)
        return made

    return make


class Served(torch.nn.Module):
    """Log-probabilities of the next token. What Inductor would generate code for, which has other last bits, are
    functions of quire: norms and GELU."""

    def __init__(self, gpt):
        super().__init__()
        for block in gpt.blocks:
            block.attention_norm, block.mlp_norm = (own_norm(it) for it in (block.attention_norm, block.mlp_norm))
            block.mlp = Mlp(block.mlp)
        gpt.norm = own_norm(gpt.norm)
        self.gpt = gpt

    def forward(self, tokens):
        return logprobs(self.gpt(tokens[:, :-1]), tokens)


def logprobs(logits, tokens):
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)


def own_norm(norm):
    own = quire.LayerNorm(norm.normalized_shape[0], eps=norm.eps)
    own.load_state_dict(norm.state_dict())
    return own


class Mlp(torch.nn.Module):
    def __init__(self, network):
        super().__init__()
        self.up, self.down = network.up, network.down

    def forward(self, x):
        return self.down(quire.functional.activation(self.up(x), "gelu", x.dtype)[0])


def is_head(module, name):
    return name.endswith("head")


def as_layers_of_quire(model, recipe, **options):
    """The model with the recipe in its blocks. The output layer is a layer of quire without one."""
    quire.convert(model, filter=is_head, min_features=1)
    return quire.convert(model, recipe, filter=lambda *layer: not is_head(*layer), min_features=1, **options)


def server_of(model, recipe):
    served = as_layers_of_quire(copy.deepcopy(model), recipe, for_inference=True, tokens=None, like="training")
    return served.eval().requires_grad_(False)


def trained(model, recipe, tokens):
    """What the forward pass of a training step computes."""
    trainer = as_layers_of_quire(model, recipe)
    with quire.batch_invariant():
        found = trainer(tokens)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in trainer.parameters())
    return found.detach()


def tokens_of(seed=1):
    return torch.randint(VOCABULARY, (5, SEQ), generator=torch.Generator().manual_seed(seed))


def in_batches(function, tokens, sizes):
    return torch.cat([function(part) for part in tokens.split(list(sizes))])


@pytest.mark.parametrize("name", RECIPES)
def test_a_server_has_the_log_probabilities_of_the_trainer(gpt, name):
    recipe, tokens, model = RECIPES[name], tokens_of(), Served(gpt())
    server = server_of(model, recipe)
    expected = trained(model, recipe, tokens)
    with quire.batch_invariant(), torch.no_grad():
        for sizes in COMPOSITIONS:
            assert same(in_batches(server, tokens, sizes), expected), sizes
    assert float(expected.std()) > 0.5  # they tell tokens apart: bits of a constant would be no comparison


@pytest.mark.parametrize("name", RECIPES)
def test_so_has_a_program_that_runs_outside_of_the_context(gpt, name):
    recipe, tokens, model = RECIPES[name], tokens_of(), Served(gpt())
    file = io.BytesIO()
    with quire.batch_invariant(), torch.no_grad():
        program = torch.export.export(
            server_of(model, recipe), (tokens,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
        )
    torch.export.save(program, file)
    file.seek(0)
    run = torch.export.load(file).module()
    expected = trained(model, recipe, tokens)
    for sizes in ((2, 3), (4, 1)):
        assert same(in_batches(run, tokens, sizes), expected), sizes


@pytest.mark.slow
@pytorch.aotinductor
@pytest.mark.parametrize("name", RECIPES)
def test_so_has_a_package_in_python_and_in_cpp(gpt, serve, name, tmp_path):
    recipe, tokens, model = RECIPES[name], tokens_of(), Served(gpt())

    class Logits(torch.nn.Module):
        """The part of the model that computes no function of PyTorch's own whose last bits Inductor changes."""

        def __init__(self, served):
            super().__init__()
            self.gpt = served.gpt

        def forward(self, tokens):
            return self.gpt(tokens[:, :-1])

    server = Logits(server_of(model, recipe))
    with quire.batch_invariant(), torch.no_grad():
        program = torch.export.export(server, (tokens,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "gpt.pt2"))
    run = torch._inductor.aoti_load_package(path)
    expected = trained(model, recipe, tokens)
    cases = []
    for sizes in COMPOSITIONS:
        parts = [run(part) for part in tokens.split(list(sizes))]
        assert same(logprobs(torch.cat(parts), tokens), expected), sizes
        cases += [tensor for pair in zip(tokens.split(list(sizes)), parts, strict=True) for tensor in pair]
    torch.save(cases, tmp_path / "gpt.cases.pt")
    done = subprocess.run([serve, tmp_path, "gpt"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("equal to Python") == 7, done.stdout + done.stderr
