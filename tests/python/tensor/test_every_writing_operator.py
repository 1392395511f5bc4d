"""Every operator of PyTorch that writes to a tensor: to a QuantizedTensor and to a view of one it writes what it writes
to plain values, or it raises and changes nothing."""

import contextlib
import itertools

import pytest
import torch

import quire
from quire.tensor.writes import undeclared_writes
from steps import same

pytestmark = pytest.mark.any_device

N = 32
#: Operators that change what a tensor is and not its values, or that leave values undefined.
NOT_VALUES = (
    "empty_like",
    "detach",
    "set_",
    "resize",
    "record_stream",
    "requires_grad",
    "rename",
    "names",
    "sparse",
    "quantized",
    "retain_grad",
)
#: Arguments by the type that a schema names; several are tried.
GIVEN = {
    "Tensor": [lambda: values(1), lambda: values(2) > 0, lambda: torch.arange(N), lambda: torch.tensor(2.0)],
    "Optional[Tensor]": [lambda: None, lambda: values(1)],
    "List[Tensor]": [lambda: [values(1), values(2)]],
    "List[Optional[Tensor]]": [lambda: [torch.tensor([1, 3])]],
    "number": [lambda: 0.5, lambda: 1],
    "float": [lambda: 0.5],
    "int": [lambda: 0, lambda: 1],
    "bool": [lambda: False],
    "str": [lambda: "none"],
    "List[int]": [lambda: [0], lambda: [N, N]],
    "List[number]": [lambda: [0.5, 0.25]],
}


#: Kernels of PyTorch that read past their arguments where these do not fit, one that reads any device's memory on the
#: host, and one that the CPU does not have.
UNCHECKED = ("_fft_", "_pdist_backward", "range", "_copy_from")
#: Given pivots that are none, LAPACK writes past its memory, also in plain tensors.
LEFT_OUT = ("linalg_ldl_solve",)
#: Functions of several operators that write, each of which rounds.
TWICE = ("alpha_dropout_", "feature_alpha_dropout_")


def values(seed):
    return torch.randn(N, N, generator=torch.Generator().manual_seed(seed))


def schemas():
    """Overloads that write to their first argument, or to one named out."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if (
            namespace == "aten"
            and written
            and name not in TWICE + LEFT_OUT
            and not any(word in name for word in NOT_VALUES)
        ):
            first = written[0]
            single = str(first.type) == "Tensor" and len(written) == 1
            if single and (first.name in ("out", "self") or first is schema.arguments[0]):
                marks = [pytest.mark.cpu_only] if name.startswith(UNCHECKED) else []
                yield pytest.param(schema, first.name, marks=marks, id=f"{name}.{schema.overload_name or 'default'}")


def calls(schema, written):
    """Arguments besides the written one: combinations for those without a default."""
    needed = [a for a in schema.arguments if a.name != written and not a.has_default_value()]
    kinds = [GIVEN.get(str(a.type).replace("SymInt", "int").replace("Scalar", "number")) for a in needed]
    if None not in kinds:
        for made in itertools.islice(itertools.product(*kinds), 24):
            yield lambda made=made: {a.name: make() for a, make in zip(needed, made, strict=True)}


def operator_of(schema):
    return getattr(getattr(torch.ops.aten, schema.name.split("::")[1]), schema.overload_name or "default")


def call(operator, schema, written, target, others):
    torch.manual_seed(0)
    positional = [target if a.name == written else others.get(a.name) for a in schema.arguments if not a.kwarg_only]
    while positional and positional[-1] is None:
        positional.pop()
    named = {
        a.name: target if a.name == written else others[a.name]
        for a in schema.arguments
        if a.kwarg_only and (a.name == written or a.name in others)
    }
    operator(*positional, **named)
    if target.device.type != "cpu":
        torch.accelerator.synchronize()  # kernels there say later which values they refuse


#: The tensor that is written, of a QuantizedTensor or of its values; and the spec.
TARGETS = [
    (lambda t: t, "mxfp8"),
    (lambda t: t.t(), "nvfp4:16x16"),
    (lambda t: t.view(2, N // 2, N)[:, 0], "fp8_block"),
    (lambda t: t[: N // 2], "mxfp4"),
]
#: Of these at least one target is written; the table does not end up calling nothing.
WRITE = frozenset(
    "add_ sub_ mul_ div_ pow_ neg_ abs_ sqrt_ exp_ fill_ zero_ copy_ lerp_ addcmul_ addcdiv_ addmm_ masked_fill_ "
    "index_fill_ index_add_ index_copy_ index_put_ scatter_ fill_diagonal_ tril_ triu_ sigmoid_ tanh_ relu_ "
    "round_ floor_ uniform_ normal_ bernoulli_ random_ nan_to_num_ sgn_ where atan2_ copysign_ hypot_ eq_ lt_ "
    "add mul sub div exp mm matmul sum cumsum clamp sin".split()
)


@pytest.mark.parametrize("schema, written", list(schemas()))
def test_an_operator_writes_what_it_writes_to_plain_values(schema, written):
    operator = operator_of(schema)
    wrote = False
    targets = TARGETS if written != "out" else TARGETS[len(schema.name) % 2 :: 2]
    for target, spec in targets:
        start = quire.quantize(values(0), spec, columnwise=True)
        for others in calls(schema, written):
            plain = start.dequantize()
            try:
                call(operator, schema, written, target(plain), others())
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
                continue
            q = start.clone()
            try:
                call(operator, schema, written, target(q), others())
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                assert same(q, start), "refused, and nothing has changed"
            else:
                wrote = True
                nothing = torch.equal(plain, start.dequantize()) and same(q, start)
                assert nothing or same(q, quire.quantize(plain, spec, columnwise=True))
            break
    assert wrote or schema.overload_name or schema.name.removeprefix("aten::") not in WRITE


UNCHANGED = {
    "detach_": lambda t: t.detach_(),
    "resize_": lambda t: t.resize_(t.shape),
    "resize_as_": lambda t: t.resize_as_(torch.empty(t.shape)),
    "requires_grad_": lambda t: t.requires_grad_(False),
    "evaluation of a batch norm": lambda t: torch.nn.functional.batch_norm(values(1), t[0], t[1]),
    "dropout_": lambda t: torch.nn.functional.dropout(t, 0.5, training=False, inplace=True),
}


@pytest.mark.parametrize("call", UNCHANGED.values(), ids=UNCHANGED)
@pytest.mark.parametrize("target, spec", TARGETS)
def test_an_operator_that_changes_no_value_changes_no_code(call, target, spec):
    q = quire.quantize(values(0), spec, columnwise=True)
    before = q.clone()
    with contextlib.suppress(RuntimeError):  # views refuse detach_
        call(target(q))
    assert same(q, before)


def test_a_batch_norm_writes_its_running_statistics():
    """Its schema does not say that it does."""
    q = quire.quantize(values(0).abs(), "fp8_block")
    plain = q.dequantize()
    for target in (q, plain):
        torch.nn.functional.batch_norm(values(1), target[0], target[1], training=True, momentum=0.5)
    assert not torch.equal(plain, quire.quantize(values(0).abs(), "fp8_block").dequantize())
    expected = quire.quantize(values(0).abs(), "fp8_block")
    for row in (0, 1):  # two writes, and each quantizes anew
        written = expected.dequantize()
        written[row] = plain[row]
        expected = quire.quantize(written, "fp8_block")
    assert same(q, expected)


@pytest.mark.cpu_only
def test_each_collective_is_known_to_write():
    """Its schema does not say so; the names of all of them end as those of operators that write do."""
    names = [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")]
    reading = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"}
    for name in set(names) - reading:
        operator = getattr(torch.ops.c10d, name.split("::")[1]).default
        assert undeclared_writes(operator) == (operator._schema.arguments[0].name,), name
    assert len(set(names) - reading) > 15
