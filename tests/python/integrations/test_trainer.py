"""transformers' Trainer with models that quire has converted."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
import torch  # noqa: E402
import transformers  # noqa: E402

import quire  # noqa: E402
from python.integrations import tiny_language_models as tiny  # noqa: E402


def for_training():
    return quire.convert(tiny.model_of("llama"), "mxfp8", min_features=1)


def with_adapters():
    options = {"min_features": 1, "for_inference": True, "tokens": None, "gradients": "input"}
    model = quire.convert(tiny.model_of("llama"), "nvfp4", **options)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [for_training, with_adapters])
def test_the_trainer_trains_a_converted_model(make, tmp_path):
    torch.manual_seed(0)
    model, ids = make(), tiny.tokens(4)
    first = model(ids, labels=ids).loss.item()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    said = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(tmp_path, **said, **quiet),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(first, rel=1e-3) and losses[2] < losses[1] < losses[0]
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
