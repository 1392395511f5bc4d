"""What the schemas of the library's operators may hold."""

import torch

import quire  # noqa: F401  loads the operators

PLAIN = {
    "Tensor",
    "Optional[Tensor]",
    "List[Tensor]",
    "List[Optional[Tensor]]",
    "int",
    "List[int]",
    "bool",
    "str",
    "float",
}


def schemas():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quire::")]
    assert len(names) > 30
    return [torch._C._get_schema(*(name.split(".") + [""])[:2]) for name in names]


def test_operators_take_tensors_numbers_and_texts_only():
    for schema in schemas():
        for argument in schema.arguments:
            assert str(argument.type) in PLAIN, f"{schema.name}: {argument.name}"


def test_products_take_no_float_which_could_be_infinite():
    products = [schema for schema in schemas() if "linear" in schema.name or "wgrad" in schema.name]
    assert len(products) >= 6
    assert [s.name for s in products if any(str(a.type) == "float" for a in s.arguments)] == []
