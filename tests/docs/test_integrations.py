"""The Python of docs/integrations.md, with models of a few thousand parameters."""

import re
import textwrap

import pytest

for package in ("transformers", "peft", "accelerate", "lightning.pytorch"):
    pytest.importorskip(package)
import torch  # noqa: E402

import quire  # noqa: E402
from python.integrations import tiny_language_models as tiny  # noqa: E402

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def run(block: str, **scope: object) -> dict[str, object]:
    exec(compile(textwrap.dedent(block), "docs/integrations.md", "exec"), scope)
    return scope


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_python_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny.write_modelopt(tmp_path / "folder-of-a-checkpoint", "llama", "MXFP8")
    loading, generating, adapting, preparing, offloading, training = BLOCK.findall(page("docs/integrations.md").text)
    model = run(loading)["model"]
    assert (tmp_path / "copy" / "model.safetensors").stat().st_size > 0
    adapted = run(adapting, quire=quire, model=model)["model"]
    assert adapted(tiny.tokens()).logits.requires_grad
    small = {"quire": quire, "torch": torch}
    plain = torch.nn.Sequential(torch.nn.Linear(256, 256))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 256)))
    prepared = run(preparing, model=plain, loader=loader, **small)["model"]
    assert prepared(torch.randn(2, 256)).dtype == torch.float32  # which accelerate makes of it
    quantized = quire.convert(plain, "mxfp8", for_inference=True, tokens=None)
    expected = quantized(torch.ones(2, 256))
    assert torch.equal(
        run(offloading, torch=torch, model=quantized, device="cpu")["model"](torch.ones(2, 256)), expected
    )
    assert run(training, **small)["trainer"].precision == "bf16-mixed"
    monkeypatch.setattr(
        torch, "compile", lambda function, fullgraph: function
    )  # integrations/test_generation.py compiles
    convert = lambda model, recipe, for_inference: quire.convert(  # noqa: E731
        model, recipe, min_features=1, for_inference=for_inference, tokens=None
    )
    namespace = type("quire", (), {"convert": staticmethod(convert)})
    run(generating, quire=namespace, torch=torch, model=tiny.model_of("llama"), ids=tiny.tokens(1, 4))
