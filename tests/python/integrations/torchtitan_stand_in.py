"""What quire.integrations.torchtitan uses of torchtitan 0.3.0, which asks for packages that tests do not have: classes
with the same names and the same behaviour towards it."""

import dataclasses
import sys
import types
from typing import ClassVar

import torch


class Configurable:
    """Has a nested Config, whose build() makes it."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs):
            return self._owner(config=dataclasses.replace(self), **kwargs)

        def traverse(self, kind, *, recurse=False, _prefix=""):
            """(name, configuration, its holder, place there) of each of that kind; those within one are not looked
            at."""
            if isinstance(self, kind):
                yield _prefix, self, None, None
                return
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                each = enumerate(value) if isinstance(value, list) else [(None, value)]
                for index, one in each:
                    if not hasattr(one, "traverse"):
                        continue
                    holder, place = (self, field.name) if index is None else (value, index)
                    name = ".".join(str(part) for part in (_prefix, field.name, index) if part not in ("", None))
                    for found, config, parent, at in one.traverse(kind, _prefix=name):
                        yield (found, config, holder, place) if parent is None else (found, config, parent, at)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            if "__slots__" not in vars(cls.Config):
                raise TypeError(f"{cls.__name__}.Config must use @dataclass(kw_only=True, slots=True)")
            cls.Config._owner = cls


class Module(torch.nn.Module, Configurable):
    _param_init = _sharding_config = None

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_init: dict | None = None
        sharding_config: object | None = None

        def build(self, **kwargs):
            made = Configurable.Config.build(self, **kwargs)
            made._param_init, made._sharding_config = self.param_init, self.sharding_config
            return made

    def init_states(self, *, buffer_device=None):
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._param_init[name](parameter)

    def parallelize(self, parallel_dims):
        for module in self.modules():
            if module is not self and isinstance(module, Module):
                module.parallelize(parallel_dims)

    def _apply(self, fn, recurse=True):
        return super()._apply(fn, recurse=recurse)


class Linear(torch.nn.Linear, Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config):
        super().__init__(config.in_features, config.out_features, bias=config.bias)


class QuantizationConverter(Configurable):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_compile_enabled: bool = False


def modules() -> dict[str, types.ModuleType]:
    """Name -> module, for sys.modules."""
    made = {}
    for name, classes in {
        "torchtitan": (),
        "torchtitan.components": (),
        "torchtitan.components.quantization": (QuantizationConverter,),
        "torchtitan.models": (),
        "torchtitan.models.common": (),
        "torchtitan.models.common.linear": (Linear,),
        "torchtitan.protocols": (),
        "torchtitan.protocols.module": (Module,),
    }.items():
        made[name] = types.ModuleType(name)
        vars(made[name]).update({one.__name__: one for one in classes})
    return made


def install(monkeypatch) -> None:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
