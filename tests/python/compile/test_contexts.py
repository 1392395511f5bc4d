"""A compiled function sees what a context of its thread has changed since it was compiled."""

import threading

import pytest
import torch

import quire
from quire.autocast import is_within_autocast
from quire.distributed import data_parallel, one_process

#: A context, and what tells whether a thread is within it.
CONTEXTS = {
    "autocast": (lambda: quire.autocast(recipe="mxfp8"), is_within_autocast),
    "batch_invariant": (quire.batch_invariant, quire.is_batch_invariant_enabled),
    "data_parallel_rank": (
        lambda: quire.distributed.data_parallel_rank(3),
        lambda: data_parallel.declared_rank() is not None,
    ),
    "exact": (quire.distributed.exact, one_process.enabled),
}


@pytest.mark.parametrize("first", [False, True], ids=["compiled outside", "compiled inside"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_graph_is_of_the_context_in_which_it_is_called(name, first):
    context, within = CONTEXTS[name]

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        return x + (1 if within() else 2)

    def call(inside):
        if not inside:
            return compiled(torch.zeros(1)).item()
        with context():
            return compiled(torch.zeros(1)).item()

    for inside in (first, not first, first):
        assert call(inside) == (1 if inside else 2)


def test_state_of_a_thread_is_in_attributes_of_the_instance():
    """Dynamo takes an attribute of a thread-local's class for a constant."""
    of_quire = [cls for cls in threading.local.__subclasses__() if cls.__module__.startswith("quire.")]
    assert len(of_quire) >= 6
    for cls in of_quire:
        state = [name for name, value in vars(cls).items() if not name.startswith("__") and not callable(value)]
        assert not state, f"{cls.__module__}.{cls.__name__}: set {state} in __init__"


class Recomputed(torch.nn.Module):
    """A layer behind a checkpoint, with an autocast around the checkpoint or inside it."""

    def __init__(self, around):
        super().__init__()
        self.layer, self.around = quire.Linear(64, 64), around

    def within(self, x):
        with quire.autocast(recipe="mxfp8"):
            return self.layer(x) if not self.around else quire.checkpoint(self.layer, x)

    def forward(self, x):
        return self.within(x) if self.around else quire.checkpoint(self.within, x)


@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_an_autocast_is_in_the_graph_around_a_checkpoint_and_not_inside(around, compiler):
    model, x = Recomputed(around), torch.randn(32, 64)
    expected = model(x)
    compiled = compiler(model)
    if around:
        assert torch.equal(compiled(x), expected) and not torch.equal(expected, model.layer(x))
        return
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        compiled(x)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), expected)  # without fullgraph, eagerly
