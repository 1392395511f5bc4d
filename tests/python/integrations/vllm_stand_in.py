"""What quire.integrations.vllm uses of vLLM: classes with the same names and arguments, and a loader that does what
vLLM does with them."""

import sys
import types
from abc import ABC, abstractmethod

import torch

METHODS, CONFIGS = ["fp8", "compressed-tensors"], {}


class QuantizationConfig(ABC):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {}

    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...


class LinearMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer, *sizes, **extra_weight_attrs): ...

    @abstractmethod
    def apply(self, layer, x, bias=None): ...

    def process_weights_after_loading(self, layer):
        return


class ModelWeightParameter(torch.nn.Parameter):
    """A parameter that knows how it is loaded."""

    def __new__(cls, data, **options):
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data, *, weight_loader, **options):
        self.weight_loader = weight_loader


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(self, layer, *sizes, **extra_weight_attrs):
        """sizes: of this rank's inputs, of its outputs, of all inputs, of all outputs, and the dtype."""
        inputs, outputs, _, _, dtype = sizes
        data = torch.empty(sum(outputs), inputs, dtype=dtype)
        weight = ModelWeightParameter(data, weight_loader=extra_weight_attrs.pop("weight_loader"))
        layer.register_parameter("weight", weight)

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class LinearBase(torch.nn.Module):
    """A layer of several matrices side by side, as vLLM has q, k and v."""

    def __init__(self, input_size, output_sizes, *, bias, quant_config, prefix):
        super().__init__()
        self.quant_method = UnquantizedLinearMethod()
        if quant_config is not None:
            self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
        dtype = torch.bfloat16
        sizes = (input_size, list(output_sizes), input_size, sum(output_sizes), dtype)
        self.quant_method.create_weights(self, *sizes, weight_loader=self.weight_loader)
        self.bias = torch.nn.Parameter(torch.empty(sum(output_sizes), dtype=dtype)) if bias else None

    def weight_loader(self, parameter, loaded):
        parameter.data.copy_(loaded)

    def forward(self, x):
        return self.quant_method.apply(self, x, self.bias), None


def register_quantization_config(quantization):
    def keep(config):
        if quantization in METHODS or not issubclass(config, QuantizationConfig):
            raise ValueError(f"{quantization} exists, or {config} is no QuantizationConfig")
        METHODS.append(quantization)
        CONFIGS[quantization] = config
        return config

    return keep


def loaded(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A model with these weights, after what vLLM does last."""
    for name, parameter in model.named_parameters():
        load = getattr(parameter, "weight_loader", lambda one, values: one.data.copy_(values))
        load(parameter, weights[name])
    for module in list(model.modules()):
        if isinstance(getattr(module, "quant_method", None), LinearMethodBase):
            module.quant_method.process_weights_after_loading(module)
    return model


def install(monkeypatch) -> None:
    """In sys.modules, until the test ends."""
    layers = "vllm.model_executor.layers"
    contents = {
        "vllm": {},
        "vllm.model_executor": {},
        layers: {},
        f"{layers}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{layers}.quantization": {
            "QUANTIZATION_METHODS": METHODS,
            "register_quantization_config": register_quantization_config,
        },
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
