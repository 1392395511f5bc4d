"""python -m quire.io run --prompt, of a checkpoint folder that transformers loads."""

import json

import pytest

pytest.importorskip("transformers")
import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from python.integrations import tiny_language_models as tiny  # noqa: E402
from quire.integrations.transformers import register  # noqa: E402
from quire.io.__main__ import main  # noqa: E402

WORDS = [f"w{i}" for i in range(64)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny.write_modelopt(tmp_path / "model", "llama", "MXFP8")
    return tmp_path / "model"


def add_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


@torch.no_grad()
def greedy(folder, ids, count):
    """Without a cache, and without generate()."""
    register()
    model = AutoModelForCausalLM.from_pretrained(folder)
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


def test_a_prompt_is_continued_by_the_most_probable_tokens(folder, capsys):
    add_tokenizer(folder)
    assert main(["run", str(folder), "--prompt", "w5 w9 w11", "--new-tokens", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = greedy(folder, torch.tensor([[5, 9, 11]]), found["tokens"])[3:]
    special = [0]  # the unknown word, which is not written
    assert found["text"].split() == [WORDS[i] for i in expected if i < len(WORDS) and i not in special]
    assert found["text"] and 1 <= found["tokens"] <= 6 and found["seconds"] > 0
    assert main(["run", str(folder), "--prompt", "w5 w9 w11", "--new-tokens", "6"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("w5 w9 w11") and f"{found['tokens']} tokens in " in said and " tokens/s" in said


def test_what_a_prompt_needs_is_said_in_words(folder, tmp_path, capsys):
    assert main(["run", str(folder), "--prompt", "w5"]) == 1
    assert "no tokenizer" in (said := capsys.readouterr().err) and "put tokenizer.json" in said
    add_tokenizer(folder)
    assert main(["run", str(folder), "--prompt", ""]) == 1
    assert "the prompt must have at least one token, got ''" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "other"), "--to", "torchao"]) == 0
    capsys.readouterr()
    assert main(["run", str(tmp_path / "other"), "--prompt", "w5"]) == 1
    assert "compressed-tensors, fbgemm_fp8, got torchao" in (said := capsys.readouterr().err)
    assert "--to quire" in said
