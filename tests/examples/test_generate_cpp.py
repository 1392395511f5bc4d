"""A language model, quantized and exported with its cache, answers in a C++ program without Python."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

import quire

pytestmark = pytest.mark.slow

PROMPT, LIMIT, LENGTH, VOCABULARY = [5, 17, 80, 3], 12, 16, 97
RECIPES = {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}


@pytest.fixture(scope="module")
def exported(chat, make_tiny, tmp_path_factory):
    """Folder, and the tokens of each model's answer by its eager call in Python."""
    folder, answers = tmp_path_factory.mktemp("exported"), {}
    generate, export, record = chat["llama"].generate, chat["export"].export, chat["export"].record
    for name, recipe in RECIPES.items():
        model = make_tiny()
        # Of its own: a head that is the embedding repeats the last token.
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 64), requires_grad=False)
        quire.quantize_model(model, recipe)
        answers[name] = generate(model, model.new_caches(LENGTH), PROMPT, LIMIT, end=-1)
        answer = generate(export(model, LENGTH, folder / f"{name}.pt2"), [], PROMPT, LIMIT, end=-1)
        assert answer == answers[name] and len(set(answer)) > 6
        texts = [f" {token}".encode() for token in range(VOCABULARY)]
        torch.save(record(PROMPT, answer, -1, texts), folder / f"{name}.greedy.pt")
    return folder, answers


def run(serve: Path, folder: Path, name: str) -> subprocess.CompletedProcess:
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([serve.parent / "generate", folder, name], env=bare, capture_output=True, text=True)


def test_the_cpp_program_generates_the_tokens_of_python(exported, serve):
    folder, answers = exported
    for name, answer in answers.items():
        done = run(serve, folder, name)
        assert done.returncode == 0, done.stderr
        text, said = done.stdout.splitlines()
        assert [int(token) for token in text.split()] == answer
        assert said.startswith(f"{name}: 12 tokens, equal to Python, ")


def test_the_cpp_program_stops_at_the_end_and_notices_another_token(exported, serve, tmp_path):
    (source, answers), folder = exported, tmp_path
    (folder / "mxfp8.pt2").symlink_to(source / "mxfp8.pt2")
    file, answer = folder / "mxfp8.greedy.pt", answers["mxfp8"]
    saved = torch.load(source / file.name)
    stop = answer.index(answer[4])
    saved[1], saved[2] = saved[1][: stop + 1], torch.tensor(answer[4])
    torch.save(saved, file)
    done = run(serve, folder, "mxfp8")
    assert done.returncode == 0 and f"mxfp8: {stop + 1} tokens, equal to Python" in done.stdout
    saved[1][2] = (saved[1][2] + 1) % VOCABULARY
    torch.save(saved, file)
    done = run(serve, folder, "mxfp8")
    assert done.returncode == 1 and "DIFFERENT from Python" in done.stdout
