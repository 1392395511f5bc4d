"""Hugging Face transformers: from_pretrained() and save_pretrained() of checkpoints that quire.io reads, the experts of
mixtures (docs/integrations.md). And the text that a language model in a checkpoint folder makes (python -m quire.io run
--prompt)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.checks import check_type
from quire.integrations import needed
from quire.io.container import CheckpointError
from quire.io.inspection import inspect
from quire.nn.own_context import running

#: The version that tests run with.
KNOWN = "5.23.0"
#: Values of quant_method in config.json, as transformers knows none of them.
METHODS = ("modelopt", "quire")
#: Dialect of quire.io -> its quant_method, for which transformers has a quantizer of its own.
REPLACEABLE = {
    "gpt_oss": "mxfp4",
    "deepseek": "fp8",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fbgemm_fp8",
}
#: Name of the implementation of experts.
EXPERTS = "quire"
#: What is used of transformers: module -> names. Hooks of HfQuantizer differ from version to version.
_USED = {
    "transformers.quantizers": ("HfQuantizer", "register_quantizer", "register_quantization_config"),
    "transformers.quantizers.auto": ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"),
    "transformers.utils.quantization_config": ("QuantizationConfigMixin",),
    "transformers.integrations.moe": ("ALL_EXPERTS_FUNCTIONS",),
    "transformers.core_model_loading": ("WeightRenaming", "rename_source_key", "revert_weight_conversion"),
    "transformers.modeling_utils": ("PreTrainedModel",),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
}
#: Of PreTrainedModel: which weights its configuration ties.
_TIES = "get_expanded_tied_weights_keys"
_HOOKS = (
    "_process_model_before_weight_loading",
    "_process_model_after_weight_loading",
    "get_state_dict_and_metadata",
    "is_serializable",
    "is_trainable",
    "_dequantize",
)


def register(replace: Iterable[str] = ()) -> None:
    """Teaches transformers the checkpoints of ModelOpt and of quire, and experts that quire computes.

    After it, `AutoModelForCausalLM.from_pretrained(folder)` of a checkpoint with quant_method "modelopt" or "quire"
    gives a model whose quantized layers are quire's and hold the codes of the file; save_pretrained() writes the same
    bytes. save_pretrained() of a model that quire.convert has quantized writes a checkpoint of the dialect quire.
    experts_implementation="quire" computes the experts of a mixture by quire.

    replace: values of quant_method for which transformers has a quantizer of its own, and that quire loads instead from
        now on, in this process: "mxfp4" (gpt-oss), "fp8" (DeepSeek, Qwen), "compressed-tensors", "fbgemm_fp8".
        transformers' own quantizers may need a GPU or packages for it, and else dequantize the model.

    A second call with the same arguments does nothing. Raises ImportError if transformers is missing or lacks a hook
    that quire uses; RuntimeError if another package has registered one of the names; ValueError for another name in
    `replace`. quire.io.load(model, path) needs no hook.
    """
    replaced = _checked(replace)
    found = {module: needed("quire.integrations.transformers.register", module, KNOWN) for module in _USED}
    _check(found)
    from quire.integrations import pretrained

    auto = found["transformers.quantizers.auto"]
    experts = found["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
    tables = {
        "quantizer": (auto.AUTO_QUANTIZER_MAPPING, pretrained.QuireQuantizer, METHODS),
        "quantization config": (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, pretrained.StoredConfig, METHODS),
        "experts implementation": (experts, pretrained.experts_forward, (EXPERTS,)),
    }
    for what, (table, ours, names) in tables.items():
        for name in names:
            _check_free(what, name, table[name] if name in table else ours, ours)
    for name in replaced:
        auto.AUTO_QUANTIZER_MAPPING[name] = pretrained.QuireQuantizer
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] = pretrained.StoredConfig
    for name in METHODS:
        if name not in auto.AUTO_QUANTIZER_MAPPING:
            found["transformers.quantizers"].register_quantizer(name)(pretrained.QuireQuantizer)
            found["transformers.quantizers"].register_quantization_config(name)(pretrained.StoredConfig)
    models = found["transformers.modeling_utils"].PreTrainedModel
    if not hasattr(models, "hf_quantizer"):
        models.hf_quantizer = pretrained.QuantizerOfConverted()
        models.save_pretrained = pretrained.leaving_models(models.save_pretrained)
    if EXPERTS not in experts:
        experts.register(EXPERTS, pretrained.experts_forward)


def _checked(replace: Iterable[str]) -> list[str]:
    names, known = [replace] if isinstance(replace, str) else list(replace), sorted(REPLACEABLE.values())
    if wrong := [name for name in names if name not in known]:
        raise ValueError(
            f"quire.integrations.transformers.register: replace must be of {', '.join(known)}, got {wrong}; "
            f"{' and '.join(METHODS)} are registered in any case"
        )
    return names


def _check(found: dict[str, ModuleType]) -> None:
    lacking = [
        f"{module}.{name}" for module, names in _USED.items() for name in names if not hasattr(found[module], name)
    ]
    quantizer = getattr(found["transformers.quantizers"], "HfQuantizer", object)
    lacking += [f"HfQuantizer.{name}" for name in _HOOKS if not hasattr(quantizer, name)]
    models = getattr(found["transformers.modeling_utils"], "PreTrainedModel", object)
    lacking += [] if hasattr(models, _TIES) else [f"PreTrainedModel.{_TIES}"]
    if lacking:
        version = needed("quire.integrations.transformers.register", "transformers", KNOWN).__version__
        raise ImportError(
            f"quire.integrations.transformers.register: transformers {version} has no {', '.join(lacking)}; use "
            f"transformers {KNOWN}, or quire.io.load(model, path), which needs none of these"
        )


def _check_free(what: str, name: str, there: object, ours: object) -> None:
    if there is not ours:
        raise RuntimeError(
            f"quire.integrations.transformers.register: the {what} {name!r} is {there!r} already; call register() "
            "before the other package, or use quire.io.load(model, path)"
        )


_CALLER = "python -m quire.io run --prompt"


@dataclass(frozen=True)
class Answer:
    """What generate() found. text: what follows the prompt. tokens: how many it has. seconds: for all of them, the
    prompt included."""

    path: str
    prompt: str
    text: str
    tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{self.prompt}{self.text}\n\n{self.tokens} tokens in {self.seconds:.2f} s: {rate:.1f} tokens/s"

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dict(vars(self))


def generate(path: str | Path, prompt: str, new_tokens: int = 32) -> Answer:
    """Continues a prompt by the most probable tokens, with a static cache.

    path: a folder with a quantized checkpoint that transformers loads through quire (register()), its config.json and
    its tokenizer. new_tokens: the most that are made; fewer if the model ends its text.

    Raises ImportError without transformers; CheckpointError for another dialect, or without a tokenizer; ValueError for
    an empty prompt, or new_tokens below 1.
    """
    check_type(_CALLER, str | Path, path=path)
    check_type(_CALLER, str, prompt=prompt)
    check_type(_CALLER, int, new_tokens=new_tokens)
    if new_tokens < 1:
        raise ValueError(f"{_CALLER}: new_tokens must be at least 1, got {new_tokens}")
    transformers = needed(_CALLER, "transformers", KNOWN)
    dialect = inspect(path).dialect
    register([REPLACEABLE[dialect]] if dialect in REPLACEABLE else [])
    if dialect not in (*METHODS, *REPLACEABLE):
        raise CheckpointError(
            f"a prompt needs a checkpoint of a dialect of {', '.join((*METHODS, *REPLACEABLE))}, got {dialect}",
            "convert it by python -m quire.io convert SRC DST --to quire, and put the model's config.json and "
            "tokenizer beside it",
            file=str(path),
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"transformers finds no tokenizer ({str(error).partition(chr(10))[0]})",
            "put tokenizer.json and tokenizer_config.json of the model into the folder",
            file=str(path),
        ) from error
    given = tokenizer(prompt, return_tensors="pt")
    if given["input_ids"].numel() == 0:
        raise ValueError(f"{_CALLER}: the prompt must have at least one token, got {prompt!r}")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
    options = {"max_new_tokens": new_tokens, "do_sample": False, "cache_implementation": "static"}
    options |= {"attention_mask": given["attention_mask"], "disable_compile": True}
    with running(model):
        began = time.perf_counter()
        ids = model.generate(given["input_ids"], **options)
        seconds = time.perf_counter() - began
    own = ids[0, given["input_ids"].shape[1] :]
    return Answer(str(path), prompt, tokenizer.decode(own, skip_special_tokens=True), len(own), seconds)
