"""The precision plugin for PyTorch Lightning."""

import pytest

pytest.importorskip("lightning.pytorch")
import lightning.pytorch as lightning  # noqa: E402
import torch  # noqa: E402

import quire  # noqa: E402
from quire.integrations.lightning import QuirePrecision  # noqa: E402


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
        self.losses, self.dtypes = [], set()

    def training_step(self, batch, number):
        x, labels = batch
        h = self.first(x)
        self.dtypes.add(h.dtype)
        loss = torch.nn.functional.cross_entropy(self.second(torch.relu(h)), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches():
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randint(0, 8, (32,)))
    return torch.utils.data.DataLoader(data, batch_size=16)


def trained(plugin, tmp_path, epochs=10) -> Classifier:
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        plugins=[] if plugin is None else [plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, batches())
    return model


def trained_by_hand(recipe, epochs=10) -> Classifier:
    """The same without Lightning."""
    model = quire.convert(Classifier(), None, min_features=1)
    optimizer = model.configure_optimizers()
    for _ in range(epochs):
        for number, batch in enumerate(batches()):
            with quire.autocast(recipe=recipe):
                loss = model.training_step(batch, number)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("recipe", ["mxfp8", quire.recipe.DelayedScaling()], ids=["mxfp8", "delayed"])
def test_a_model_trains_in_the_formats_of_the_recipe(recipe, tmp_path):
    model, plain = trained(QuirePrecision(recipe, min_features=1), tmp_path), trained(None, tmp_path)
    assert type(model.first) is quire.Linear
    by_hand = trained_by_hand(recipe)
    assert model.losses == by_hand.losses and len(set(model.losses)) == 20
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(one, other)
    assert model.losses[0] != plain.losses[0], "quantized"


def test_a_dtype_is_that_of_torch_autocast(tmp_path):
    model = trained(QuirePrecision("mxfp8", min_features=1, dtype=torch.bfloat16), tmp_path, epochs=1)
    assert model.dtypes == {torch.bfloat16}
    assert model.first.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="dtype must be"):
        QuirePrecision("mxfp8", dtype=torch.float64)


def test_the_filter_decides_what_is_converted(tmp_path):
    plugin = QuirePrecision("mxfp8", lambda module, name: name == "first", min_features=1)
    model = trained(plugin, tmp_path, epochs=1)
    assert [type(model.first), type(model.second)] == [quire.Linear, torch.nn.Linear]
