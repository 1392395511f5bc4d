"""quire.checkpoint: a forward pass computed again is the forward pass that was."""

import _thread
import contextlib
import functools
import gc
import queue

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint_sequential

import pytorch
import quire
from every_recipe import DEFAULTS, DELAYED, VARIANTS, each, some

pytestmark = pytest.mark.any_device


@pytest.fixture(autouse=True)
def no_hook_of_a_recomputation_that_raised():
    """Before PyTorch 2.13 it removes its hook when garbage is collected, or that of whoever computes then."""
    yield
    if pytorch.is_before("2.13"):
        gc.collect()


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(quire.Linear(64, 64), torch.nn.GELU(), quire.Linear(64, 64))


def gradients_of_steps(model, recipe, call, interleave, growth=100.0):
    """Steps whose inputs grow by that factor; backward runs outside of autocast, and with `interleave` after the next
    forward pass. Returns the gradients."""
    found, pending = [], []
    generator = torch.Generator().manual_seed(3)
    for i in range(4):
        x = (torch.randn(33, 64, generator=generator) * growth**i).requires_grad_()
        with quire.autocast(recipe=recipe):
            pending.append((x, call(model, x)))
        while len(pending) > interleave:
            leaf, y = pending.pop(0)
            y.sum().backward()
            found += [leaf.grad, *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
    return found


@each(some("mxfp8", "nvfp4", "delayed"))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("interleave", [0, 1])
def test_gradients_are_those_without_a_checkpoint(recipe, reentrant, interleave):
    expected = gradients_of_steps(make_model(), recipe, lambda model, x: model(x), interleave)
    got = gradients_of_steps(
        make_model(), recipe, lambda model, x: quire.checkpoint(model, x, use_reentrant=reentrant), interleave
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_error_leaves_no_hooks_to_later_code():
    calls = []

    def wrong(x):
        calls.append(x)
        raise ZeroDivisionError

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(ZeroDivisionError) as kept:  # its traceback holds the frames
        quire.checkpoint(lambda x: quire.checkpoint(wrong, x), x)
    x.square().sum().backward()
    assert torch.equal(x.grad, 2 * x) and len(calls) == 1 and kept


@pytest.mark.parametrize("growth", [100.0, 0.01])
def test_a_checkpoint_within_a_checkpoint_has_the_scales_of_its_forward_pass(growth):
    def nested(model, x):
        return quire.checkpoint(lambda x: model[1:](quire.checkpoint(model[0], x)), x)

    results = []
    for call in (lambda model, x: model(x), nested):
        model = make_model()
        found = gradients_of_steps(model, DELAYED, call, 1, growth)
        results.append([*found, *(model[i].delayed.fwd_amax for i in (0, 2))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_keywords_of_the_function_are_not_refused(reentrant):
    def call(model, x):
        return quire.checkpoint(
            lambda x, *, factor: model(x) * factor, x, use_reentrant=reentrant, preserve_rng_state=False, factor=2
        )

    recipe = DEFAULTS["mxfp8"]
    expected = gradients_of_steps(make_model(), recipe, lambda model, x: model(x) * 2, 0)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients_of_steps(make_model(), recipe, call, 0), expected, strict=True)
    )
    with pytest.raises(ValueError, match="context_fn"):
        quire.checkpoint(make_model(), torch.ones(1, 64), use_reentrant=True, context_fn=list)


def test_a_recomputed_output_adds_nothing_to_a_later_step():
    layer, recipe = quire.Linear(64, 64), DELAYED
    x = torch.randn(5, 64, requires_grad=True)
    with quire.autocast(recipe=recipe):
        y = quire.checkpoint(lambda x: layer(x, fp8_output=True).dequantize(), 1000 * x)
    with quire.autocast(recipe=recipe):  # ends the step of y
        assert layer.delayed.fwd_amax[2] == 0
    y.sum().backward()
    assert layer.delayed.fwd_amax[2] == 0


@each(some("mxfp8", "nvfp4", "delayed"))
def test_it_compiles(recipe, compiler):
    expected = gradients_of_steps(make_model(), recipe, lambda model, x: model(x), 0)
    function = compiler(lambda model, x: quire.checkpoint(model, x))
    # aot_eager and GELU: the operators around ours are eager's own.
    got = gradients_of_steps(make_model(), recipe, function, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- PyTorch's own checkpoint repeats a forward pass under what is active then.


def by_pytorch(reentrant):
    return functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)


REENTRANT, OTHER = by_pytorch(True), by_pytorch(False)
#: Ways to run a model with a checkpoint of PyTorch's in it.
WAYS = {
    "reentrant": REENTRANT,
    "not reentrant": OTHER,
    "without a comparison": functools.partial(OTHER, determinism_check="none"),
    "in segments, reentrant": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=True),
    "in segments": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "reentrant in reentrant": lambda model, x: REENTRANT(lambda x: REENTRANT(model, x), x),
    "not reentrant in reentrant": lambda model, x: REENTRANT(lambda x: OTHER(model, x), x),
    "reentrant in not reentrant": lambda model, x: OTHER(lambda x: REENTRANT(model, x), x),
    "reentrant in quire's": lambda model, x: quire.checkpoint(lambda x: REENTRANT(model, x), x),
    "quire's in reentrant": lambda model, x: REENTRANT(lambda x: quire.checkpoint(model, x), x),
    "with a wrapper": lambda model, x: checkpoint_wrapper(model)(x),
}
#: The context of the forward pass, and that of the backward pass where it is to be another one.
PAIRS = {
    "no recipe": ("mxfp8", None),
    "disabled": ("mxfp8", {"enabled": False}),
    "of the same shapes": ("nvfp4", {"recipe": VARIANTS["nvfp4_no_sr"]}),
    "a recipe only then": (None, {"recipe": DEFAULTS["fp8_current"]}),
    "by layer": ("by layer", None),
    "delayed": ("delayed", None),
    "the next step": ("delayed", {"recipe": DELAYED}),
}


class ByLayer(quire.recipe.MXFP8BlockScaling):
    def of_layer(self, layer):
        return DEFAULTS["mxfp8" if layer.in_features == 64 else "nvfp4"]


ACTIVE = {"by layer": ByLayer(), "mxfp8": DEFAULTS["mxfp8"], "nvfp4": DEFAULTS["nvfp4"], "delayed": DELAYED, None: None}


def active(options):
    return contextlib.nullcontext() if options is None else quire.autocast(**options)


def forward(way, first, model=None):
    model = make_model() if model is None else model
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    recipe = ACTIVE[first]
    with active(None if recipe is None else {"recipe": recipe}):
        return model, x, way(model, x)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("first", "then"), PAIRS.values(), ids=PAIRS)
def test_pytorchs_checkpoint_does_not_recompute_another_forward_pass(way, first, then):
    model, x, y = forward(way, first)
    with active(then), pytest.raises(torch.utils.checkpoint.CheckpointError, match="Use quire.checkpoint, or call"):
        y.sum().backward()
    assert x.grad is None and model[0].weight.grad is None


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each(some("mxfp8", "nvfp4", "delayed", "high_precision"))
def test_pytorchs_checkpoint_within_the_same_autocast_gives_the_gradients_without_it(way, recipe):
    results = []
    for call in (lambda model, x: model(x), way):
        model = make_model()
        x = torch.randn(33, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with quire.autocast(recipe=recipe, enabled=recipe is not None):
            call(model, x).sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Block(torch.nn.Module):
    """Layers within a context of their own."""

    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def forward(self, x):
        with quire.autocast(recipe=DELAYED):
            return self.layers(x)


def steps_of_blocks(count, call):
    """What steps of delayed scaling give whose contexts are in the blocks: gradients, at last the scales."""
    model, found = torch.nn.Sequential(*[Block() for _ in range(count)]), []
    generator = torch.Generator().manual_seed(3)
    for i in range(3):
        x = (torch.randn(33, 64, generator=generator) * 10.0**i).requires_grad_()
        call(model, x).square().mean().backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found + [part.delayed.fwd_scale for part in model.modules() if isinstance(part, quire.Linear)]


def each_block(way):
    """A checkpoint around each block."""

    def call(model, x):
        for block in model:
            x = way(block, x)
        return x

    return call


QUIRES = {f"quire's{', reentrant' * re}": functools.partial(quire.checkpoint, use_reentrant=re) for re in (False, True)}
WHOLE = {name: way for name, way in (WAYS | QUIRES).items() if "in segments" not in name}
IN_BLOCKS = WAYS | QUIRES | {f"{name}, of each block": each_block(way) for name, way in WHOLE.items()}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", IN_BLOCKS)
def test_contexts_within_the_checkpoint_give_the_gradients_without_it_or_an_error(way, count):
    if count == 1 and "in segments" in way:
        pytest.skip("one block is one segment, which runs without a checkpoint")
    expected = steps_of_blocks(count, lambda model, x: model(x))
    if count == 1 or way.partition(", of")[0] in QUIRES:
        found = steps_of_blocks(count, IN_BLOCKS[way])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        return
    # The second context ends the step whose scales the first one has used.
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="Use quire.checkpoint"):
        steps_of_blocks(count, IN_BLOCKS[way])


@pytest.mark.parametrize("way", [OTHER, REENTRANT, *QUIRES.values()], ids=["not reentrant", "reentrant", *QUIRES])
def test_a_context_within_a_compiled_function_is_refused_within_a_checkpoint(way):
    torch.compiler.reset()  # after many graphs of one function it would run eagerly
    compiled, x = torch.compile(Block(), backend="aot_eager"), torch.randn(33, 64, requires_grad=True)
    compiled(x).sum().backward()
    y = way(compiled, x)
    with pytest.raises(RuntimeError, match="delayed_update_: a backward pass recomputes .*; enter it around the check"):
        y.sum().backward()


@pytest.mark.parametrize("way", [REENTRANT, QUIRES["quire's, reentrant"]])
def test_a_reentrant_checkpoint_that_evaluates_ends_no_step(way):
    block, x = Block(), torch.randn(33, 64)
    block(x)
    scales = [layer.delayed.fwd_scale for layer in block.layers if isinstance(layer, quire.Linear)]
    with torch.no_grad():
        way(block, x.requires_grad_())
    after = [layer.delayed.fwd_scale for layer in block.layers if isinstance(layer, quire.Linear)]
    assert all(one is other for one, other in zip(after, scales, strict=True))


@pytest.mark.parametrize("way", [OTHER, QUIRES["quire's"]])
def test_a_teacher_without_gradients_within_a_checkpoint_ends_no_step(way):
    """A function with a context of delayed scaling under no_grad, in front of layers without a recipe."""
    results = []
    for call in (lambda function, x: function(x), way):
        teacher, student = Block(), make_model()

        def function(x, teacher=teacher, student=student):
            with torch.no_grad():
                target = teacher(x)
            return student(x) * target

        x = torch.randn(33, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        teacher(x)  # it has scales
        call(function, x).sum().backward()
        results.append([x.grad, *(p.grad for p in student.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.cpu_only
def test_a_subclass_of_pytorchs_reentrant_checkpoint_is_called():
    class Own(torch.utils.checkpoint.CheckpointFunction):
        calls = 0

        @staticmethod
        def forward(ctx, function, *others):
            Own.calls += 1
            return torch.utils.checkpoint.CheckpointFunction.forward(ctx, function, *others)

    x = torch.ones(3, requires_grad=True)
    Own.apply(lambda x: x * 2, True, x).sum().backward()
    assert Own.calls == 1 and torch.equal(x.grad, torch.full((3,), 2.0))


def in_a_foreign_thread(work):
    """What work() returns or raises in a thread that Python did not start, as those of C++ programs."""
    results = queue.Queue()

    def run():
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    _thread.start_new_thread(run, ())
    result, error = results.get(timeout=60)
    if error is not None:
        raise error
    return result


def test_pytorchs_checkpoint_in_a_foreign_thread_has_the_recipe_of_that_thread():
    model = make_model()
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with quire.autocast(recipe="mxfp8"):
        (expected,) = torch.autograd.grad(model(x).sum(), x)

    def work():
        with quire.autocast(recipe="mxfp8"):
            return torch.autograd.grad(OTHER(model, x).sum(), x)

    assert torch.equal(in_a_foreign_thread(work)[0], expected)


@pytest.mark.parametrize("way", [REENTRANT, OTHER], ids=["reentrant", "not reentrant"])
def test_what_no_layer_would_notice_is_recomputed(way):
    """Other modules than quire's; layers that have an autocast of their own; one that is the same to these layers."""
    own = quire.convert(make_model(), "mxfp8", min_features=1)

    def within(model, x):
        return way(lambda x: quire.autocast(recipe="mxfp8")(model)(x), x)

    cases = [(torch.nn.Linear(64, 64), way, "nvfp4", None), (make_model(), within, None, {"enabled": False})]
    cases += [(own, way, None, {"recipe": "mxfp8"}), (own, way, "mxfp8", None)]
    for model, call, first, then in cases:
        _, x, y = forward(call, first, model)
        with active(then):
            y.sum().backward()
        _, expected, y = forward(lambda model, x: model(x), first or "mxfp8", model)
        y.sum().backward()
        assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize("way", [REENTRANT, OTHER], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("what", ["a function", "compiled"])
def test_whoever_asks_for_the_recipe_is_not_recomputed_under_another_one(way, what):
    def asking(x):
        return (x * (1.0 if quire.active_recipe() is None else 2.0)).square()

    compiled = torch.compile(make_model(), backend="aot_eager")
    function = {"a function": asking, "compiled": compiled}[what]
    _, x, y = forward(way, "mxfp8", function)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="that ran under 'x=mxfp8:nan"):
        y.sum().backward()
    assert x.grad is None and quire.active_recipe() is None


def test_saved_tensors_are_plain_and_may_leave_the_device(make_x):
    seen = []
    model, x = make_model(), make_x(33, 64, dtype=torch.float32)
    for context in (torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t), None):
        model.zero_grad()
        with context or torch.autograd.graph.save_on_cpu(), quire.autocast():
            y = model(quire.quantize(x, "mxfp8", columnwise=True) if context is None else x)
        y.sum().backward()
    assert seen and all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in seen)
