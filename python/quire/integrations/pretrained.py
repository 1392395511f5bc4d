"""Classes for the hooks of Hugging Face transformers: what a quantized checkpoint becomes, and how it is written.

transformers loads the plain parameters of a model. The quantized weights it does not see: their parameters are taken
out of the model before (_process_model_before_weight_loading), and quire.io loads them after it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quire.io.container import INDEX, CheckpointError, Container
from quire.io.dialect import Configs
from quire.io.dialects import dialect_named
from quire.io.fitting import Record, Target, fit, forget, record_of
from quire.io.from_model import Entries
from quire.io.into_model import LoadOptions, is_quantized, load_checkpoint
from quire.io.reading import Checkpoint
from quire.io.writing import Plan, planned_configs
from quire.nn.product_module import ProductModule
from quire.nn.quantized_parameters import decode_weights
from quire.nn.stacked_experts import StackedExperts
from quire.tensor import QuantizedTensor


class StoredConfig(QuantizationConfigMixin):
    """`quantization_config` of a config.json, which is written as it was read. said: all of it."""

    def __init__(self, quant_method: str, **said: Any) -> None:
        self.quant_method = quant_method
        self.said = {"quant_method": quant_method, **said}

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.said)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


class QuireQuantizer(HfQuantizer):
    """Loads and saves checkpoints of the dialects of quire.io."""

    requires_calibration = True  # a model that is not quantized yet is quire.convert's

    def __init__(self, quantization_config: StoredConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise ValueError(
                f"quire: quantization_config is {quantization_config.to_dict()}, and the checkpoint is not "
                "pre-quantized; load the model without quantization_config, then call quire.convert(model, recipe, "
                "for_inference=True)"
            )
        super().__init__(quantization_config, **kwargs)
        self.checkpoint: Checkpoint | None = None
        self.rename: Callable[[str], str] | None = None
        self.taken: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        #: How transformers has renamed and merged plain parameters; None: as it does for such models.
        self.conversions: list[Any] | None = None
        self.device: Any = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises NotImplementedError for a model whose layers are on several devices."""
        devices = {str(device) for device in (device_map.values() if isinstance(device_map, dict) else [device_map])}
        if len(devices) > 1 or devices & {"disk", "auto", "balanced", "balanced_low_0", "sequential"}:
            raise NotImplementedError(
                f"quire: device_map={device_map!r} may spread the model over devices or a disk, which is not supported "
                "for quantized layers; pass one device, or none"
            )
        self.device = next(iter(device_map.values())) if isinstance(device_map, dict) else device_map

    def _process_model_before_weight_loading(
        self, model: torch.nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
            raise CheckpointError(
                f"quantized checkpoints are read from .safetensors files, got {checkpoint_files}",
                "pass the folder of such a checkpoint to from_pretrained",
            )
        first = Path(checkpoint_files[0])
        self.checkpoint = Checkpoint(Container(first if len(checkpoint_files) == 1 else first.parent / INDEX))
        self.rename = _renaming(model, self)
        targets = [
            t for t in fit(model, self.checkpoint, None, "auto", self.rename) if is_quantized(t, self.checkpoint)
        ]
        ties = getattr(model, "all_tied_weights_keys", {})  # transformers ties weights when it has loaded them
        of_ties = {*ties.keys(), *ties.values()}
        tied = [t.name for t in targets if len(t.owners) > 1 or t.untied or not of_ties.isdisjoint(t.names())]
        if tied:
            raise CheckpointError(
                "the checkpoint has a quantized weight for a parameter that the model ties to another",
                "pass tie_word_embeddings=False to from_pretrained",
                file=self.checkpoint.container.path,
                tensor=tied[0],
            )
        self._take_out(model, targets)

    def _take_out(self, model: torch.nn.Module, targets: list[Target]) -> None:
        """Hides parameters from transformers, which would refuse the shapes of codes and change dtypes of scales."""
        paths = set()
        for target in targets:
            path, module, attribute = target.owners[0]
            self.taken.append((module, attribute, target.value))
            module._parameters[attribute] = None
            module._is_hf_initialized = True
            paths.add(path)
        # These tensors have no place in the model for now.
        silent = {rf"(^|\.){re.escape(path)}\." for path in sorted(paths)}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *silent}

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        for module, attribute, parameter in self.taken:
            module._parameters[attribute] = parameter
        vars(model).pop("_keys_to_ignore_on_load_unexpected", None)
        load_checkpoint(model, self.checkpoint, LoadOptions(strict=False, plain=False, rename=self.rename))
        for module in {id(module): module for module, _, _ in self.taken}.values():
            if self.device is not None:
                module.to(self.device)
        self.conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = []  # names are those of the file already when transformers writes them
        self.checkpoint, self.rename, self.taken = None, None, []
        return model

    def get_state_dict_and_metadata(self, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Names and bytes as in the file that was read. Once a quantized weight was written to, and where there was no
        file, all of them in quire's own dialect. The model's configuration says so while save_pretrained() runs."""
        record = record_of(model) or Record("", None, {})  # of a model that quire.convert has quantized
        of_file = dialect_named(record.dialect) if record.dialect else None
        entries = Entries(model, record, None, of_file)
        changed = of_file is None or any(_is_changed(entries, name) for name in entries.layers)
        dialect = dialect_named("quire") if changed else of_file
        entries = Entries(model, record, None, dialect) if dialect is not of_file else entries
        values = {name: entries[name] for name in entries.layers}
        plan = Plan(dialect, exact=True)
        state = self._plain(model, entries)
        for name, stored in values.items():
            plan.choose(name, stored)
            state |= {key: _own(tensor) for key, tensor in plan.tensors(name, stored).items()}
        state |= {name: tensor for name, tensor in record.other.items() if name not in state}
        if changed or getattr(model.config, "quantization_config", None) is None:
            shapes = {name: tuple(stored.shape) for name, stored in values.items()}
            model.config.quantization_config = _said(plan, {} if changed else record.configs, shapes)
        return state, {}

    def _plain(self, model: torch.nn.Module, entries: Entries) -> dict[str, torch.Tensor]:
        """What is not quantized: under the names of the file, and what the file did not have under those that
        transformers would write."""
        quantized, state, done = {*entries.layers, *entries.biases.values()}, {}, set()
        for entry, pieces in entries.pieces.items():
            names = {name for piece in pieces.values() for name in piece.target.names()}
            known = not names.isdisjoint(entries.record.sources)
            if known and entry not in quantized:
                state[entry] = _own(entries[entry])
            done |= names if known or entry in quantized else set()
        modules = ((path, module) for path, module in model.named_modules() if isinstance(module, ProductModule))
        done |= {f"{path}.{name}" for path, module in modules for name in module.input_scales()}
        rest = {name: value for name, value in model.state_dict().items() if name not in done}
        with _with(model, {"_weight_conversions": self.conversions}):
            return state | revert_weight_conversion(model, rest)

    def _dequantize(self, model: torch.nn.Module, dtype: torch.dtype | str | None = None) -> torch.nn.Module:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # which save_pretrained() leaves
        for parameter in decode_weights(model, dtype):
            parameter.requires_grad_(True)
        forget(model)
        model._weight_conversions = self.conversions
        model.hf_quantizer = self  # which transformers takes away, of a model of its own and of a converted one
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train; so does a weight after requires_grad_(True), rounded to its format in each step."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class QuantizerOfConverted:
    """The attribute hf_quantizer of transformers' models, where from_pretrained() has set none: quire's for a model
    with weights that quire has quantized, so that save_pretrained() can write it."""

    def __get__(self, model: torch.nn.Module | None, owner: type | None = None) -> QuireQuantizer | None:
        if model is None or not any(isinstance(p, QuantizedTensor) for p in model.parameters()):
            return None
        made = QuireQuantizer(StoredConfig("quire"))
        made.conversions = getattr(model, "_weight_conversions", None)
        return made


def leaving_models(save: Callable[..., Any]) -> Callable[..., Any]:
    """save_pretrained() of transformers' models, after which a model that quire has quantized is as it was."""

    @functools.wraps(save)
    def save_pretrained(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        quantizer = getattr(self, "hf_quantizer", None)
        if not isinstance(quantizer, QuireQuantizer):
            return save(self, *args, **kwargs)
        # The names of the quantizer's state dict are those of the file: transformers is to rename nothing.
        during = {"hf_quantizer": quantizer, "_weight_conversions": []}
        said = {"quantization_config": getattr(self.config, "quantization_config", None)}
        with contextlib.ExitStack() as stack:
            for config in _untied_configs(self):
                stack.enter_context(_with(config, {"tie_word_embeddings": False}))
            stack.enter_context(_with(self, during))
            stack.enter_context(_with(self.config, said))
            return save(self, *args, **kwargs)

    return save_pretrained


def _untied_configs(model: torch.nn.Module) -> list[Any]:
    """The configurations, of the model and of models in it, that tie a weight to another which it is no longer: quire
    has quantized one of them."""
    found: dict[int, Any] = {}
    for module in model.modules():
        ties = module.get_expanded_tied_weights_keys() if isinstance(module, PreTrainedModel) else {}
        for names in ties.items():
            one, other = (_parameter(module, name) for name in names)
            if one is not other and (isinstance(one, QuantizedTensor) or isinstance(other, QuantizedTensor)):
                found[id(module.config)] = module.config
    return list(found.values())


def _parameter(model: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None


@contextlib.contextmanager
def _with(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """An object with these attributes; afterwards all of them are what they were."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Of transformers' table of experts implementations: the experts become a StackedExperts in their first call."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"quire: the experts of {type(self).__name__} become quire's outside of a compiled function; call "
            "quire.convert(model) before torch.compile"
        )
    StackedExperts.adopt(self, None).reset_states()
    return self(hidden_states, top_k_index, top_k_weights)


def _renaming(model: torch.nn.Module, quantizer: QuireQuantizer) -> Callable[[str], str]:
    """Name in the file -> name in the model, as transformers maps it; experts keep their own names."""
    renamings = [one for one in get_model_conversion_mapping(model, None, quantizer) if isinstance(one, WeightRenaming)]
    names, prefix = model.state_dict(), model.base_model_prefix
    modules = {path for path, _ in model.named_modules()}

    def renamed(name: str) -> str:
        new = rename_source_key(name, renamings, [], prefix, names)[0]
        # The prefix of a model without its head is transformers' to add or take away, for names that the model has.
        block, experts, rest = new.partition(".experts.")
        if not experts or block in modules:
            return new
        others = block.removeprefix(f"{prefix}."), f"{prefix}.{block}"
        return next((f"{other}.experts.{rest}" for other in others if other in modules), new)

    return renamed


def _said(plan: Plan, base: Configs, shapes: dict[str, tuple[int, ...]]) -> StoredConfig:
    """What config.json says of the layers."""
    found = planned_configs(plan, base, shapes).get("config.json", {}).get("quantization_config")
    if found is None:
        raise CheckpointError(
            f"{plan.dialect.name} does not describe its layers in config.json, where transformers looks",
            "save the model by quire.io.save(model, path)",
        )
    return StoredConfig(**found)


def _is_changed(entries: Entries, name: str) -> bool:
    """Whether a quantized weight is not known to have the bytes of the file."""
    return any(piece.target.value.origin is None for piece in entries.pieces[name].values())


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in separate memory: transformers treats tensors with the same memory as one tensor."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
