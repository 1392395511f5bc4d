"""Wrong use of layers ends in a Python exception that names operator, rule, values and remedy, and changes no state."""

import hashlib
import multiprocessing
import re

import pytest
import torch

import forks
import quire
from quire.recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling

X = torch.ones(4, 32)


def state_of(layer):
    """Copies of what calls may change: the random state, and scales, amaxes and usage of delayed scaling."""
    delayed = [v for name, v in vars(layer.delayed).items() if isinstance(v, torch.Tensor) and "history" not in name]
    return [tensor.clone() for tensor in (layer.sr_state, *delayed)]


def roles(**specs):
    return CustomRecipe(lambda role: specs.get(role, "mxfp8"))


#: Some calls meet the operator first, which says so itself.
NO_FLOAT = (TypeError, RuntimeError)
# What is done, its exception, and the words that must be in it.
CASES = {
    "wrong K": (lambda layer: layer(torch.ones(4, 31)), RuntimeError, ["linear: x and w must agree on K", "31", "32"]),
    "rank 0": (lambda layer: layer(torch.tensor(1.0)), RuntimeError, ["linear: x", "at least 1 dimension", "reshape"]),
    "integers": (lambda layer: layer(X.int()), TypeError, ["quire.Linear: x must be float32", "torch.int32", ".to()"]),
    "float64": (lambda layer: layer.double()(X.double()), NO_FLOAT, ["x must be float32", "convert it with .to"]),
    "another dtype": (
        lambda layer: layer(X.bfloat16()),
        TypeError,
        ["torch.bfloat16", "weight torch.float32", ".to()"],
    ),
    "x on another device": (lambda layer: layer(X.to("meta")), RuntimeError, ["linear: ", "one device", "meta", "cpu"]),
    "weight on another device": (
        lambda layer: layer.to("meta")(X),
        RuntimeError,
        ["one device", "cpu", "meta", "to_empty"],
    ),
    "integers under torch.autocast": (
        lambda layer: torch.autocast("cpu", dtype=torch.bfloat16)(layer)(X.int()),
        NO_FLOAT,
        ["x must be float32, float16 or bfloat16", "convert it with .to"],
    ),
    "a bias of another size": (
        lambda layer: torch.func.functional_call(layer, {"bias": torch.ones(3)}, (X,)),
        RuntimeError,
        ["linear: bias must be [16]", "got [3]"],
    ),
    "a weight of three dimensions": (
        lambda layer: torch.func.functional_call(layer, {"weight": torch.ones(2, 16, 32)}, (X,)),
        RuntimeError,
        ["linear: w must be [out_features, in_features]", "got 3 dimensions"],
    ),
    "x rounded stochastically": (
        lambda layer: quire.autocast(recipe=roles(x="nvfp4:sr"))(layer)(X),
        ValueError,
        ["rounds x stochastically", "only dy may be", "remove 'sr' from x"],
    ),
    "w transformed": (
        lambda layer: quire.autocast(recipe=roles(w="nvfp4:rht"))(layer)(X),
        ValueError,
        ["transforms w", "remove 'rht' from w"],
    ),
    "x and dy transformed differently": (
        lambda layer: quire.autocast(recipe=roles(x="nvfp4:rht"))(layer)(X),
        ValueError,
        ["transforms x and dy differently", "same 'rht' option"],
    ),
    "an unknown recipe text": (
        lambda layer: torch.ops.quire.linear(X, layer.weight, None, "x=mxfp8,w=mxfp8", torch.float32),
        RuntimeError,
        ["recipe: expected 'dy=SPEC'", "write x=SPEC,w=SPEC,dy=SPEC"],
    ),
    "an output dtype that is none": (
        lambda layer: torch.ops.quire.linear(X, layer.weight, None, "x=mxfp8,w=mxfp8,dy=mxfp8", torch.int8),
        RuntimeError,
        ["linear: dtype must be float32, float16 or bfloat16"],
    ),
    "more bytes than there are": (
        lambda layer: quire.quantize(torch.empty(1).expand(2**40, 2**10), "mxfp8"),
        RuntimeError,
        ["quantize: no memory for rowwise_data of size [1099511627776, 1024]; use smaller tensors", "allocate"],
    ),
    "a proto of more bytes than 64 bits count": (
        lambda layer: quire.TensorProto((2**40, 2**40), torch.float32, "mxfp8").create_tensor(),
        RuntimeError,
        ["TensorProto: no tensor has shape (1099511627776, 1099511627776)", "overflow", "use less"],
    ),
    "foreign buffers": (
        lambda layer: torch.ops.quire.dequantize(
            torch.zeros(4, 31, dtype=torch.uint8), X[:, :1], X[:0, 0], "mxfp8", False, (4, 32), torch.float32
        ),
        RuntimeError,
        ["dequantize: data does not fit its spec", "rowwise_data of mxfp8", "[4, 32]", "[4, 31]", "quire.TensorProto"],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "base", [MXFP8BlockScaling(), NVFP4BlockScaling(), DelayedScaling()], ids=["mxfp8", "nvfp4", "fp8_delayed"]
)
def test_wrong_input_is_refused_in_words_and_changes_nothing(name, base):
    act, error, words = CASES[name]
    layer = quire.Linear(32, 16)
    before = state_of(layer)
    with pytest.raises(error) as raised, quire.autocast(recipe=base):
        act(layer)
    # Under delayed scaling x is quantized by an operator of its own, which then is the one that refuses it.
    message = str(raised.value)
    assert all(word in message or word.replace("linear: ", "quantize: ") in message for word in words), message
    assert layer.sr_state.is_meta or all(torch.equal(a, b) for a, b in zip(state_of(layer), before, strict=True))
    assert quire.active_recipe() is None
    fresh = quire.Linear(32, 16)
    with quire.autocast(recipe=base):
        fresh(X).sum().backward()  # the library is as usable as before
    assert fresh.weight.grad is not None


def test_a_wrong_gradient_is_refused_and_does_not_count(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96)
    with quire.autocast(recipe=NVFP4BlockScaling()):
        y = layer(x)
    with pytest.raises(RuntimeError, match="[Mm]ismatch in shape"):
        y.backward(torch.ones(16, 63, dtype=torch.bfloat16))
    assert layer.sr_state[1] == 0


def test_a_broken_random_state_is_refused_in_words(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96)
    layer.sr_state = torch.zeros(3, dtype=torch.int64)
    with (
        quire.autocast(recipe=NVFP4BlockScaling()),
        pytest.raises(RuntimeError, match=r"sr_state must be .* int64 \[2\]"),
    ):
        layer(x).sum().backward()


def test_the_words_survive_the_compiler(compiler):
    layer = quire.Linear(32, 16)
    with pytest.raises(Exception, match=re.escape("linear: x and w must agree on K; got x [..., 31] and w [16, 32]")):
        with quire.autocast():
            compiler(layer)(torch.ones(4, 31))


def work(layer, x, results, threads):
    torch.set_num_threads(threads)
    with quire.autocast(recipe=NVFP4BlockScaling()):
        y = layer(x)
    y.sum().backward()
    bits = [hashlib.sha256(t.detach().numpy()).hexdigest() for t in (y, layer.weight.grad, layer.bias.grad)]
    results.put((bits, layer.sr_state.tolist()))


def train_and_fork():
    torch.manual_seed(0)
    layer, x = quire.Linear(512, 512), torch.randn(512, 512)
    with quire.autocast(recipe=NVFP4BlockScaling()):
        layer(x).sum().backward()  # threads are running now
    layer.zero_grad()
    layer.sr_state[1] = 0
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    # One thread, as in DataLoader's workers; loading/test_fork.py has children with several.
    child = context.Process(target=work, args=(layer, x, results, 1))
    child.start()
    try:
        from_child = results.get(timeout=60)
    finally:
        child.kill()
        child.join()
    here = context.Queue()
    work(layer, x, here, torch.get_num_threads())
    assert here.get(timeout=10) == from_child


def test_a_process_may_fork_after_use():
    forks.call(train_and_fork)  # PyTorch refuses backward passes in children of a process whose autograd has threads


def forward(layer, x, results):
    with quire.autocast(), torch.no_grad():
        results.put(layer(x).numpy().tobytes())


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_does_not_wait_for_threads_it_has_not():
    layer, x = quire.Linear(512, 512), torch.randn(512, 512)
    context = multiprocessing.get_context("fork")
    here, results = context.Queue(), context.Queue()
    forward(layer, x, here)  # threads are running now
    child = context.Process(target=forward, args=(layer, x, results))
    child.start()
    try:
        assert results.get(timeout=60) == here.get(timeout=10)
    finally:
        child.kill()
        child.join()
