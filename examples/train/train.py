"""Train a small GPT in high precision and in every low-precision recipe of quire, and compare.

    python examples/train/train.py                      six runs, which say first how long they take
    python examples/train/train.py --quick              six shorter runs of a smaller model, about two minutes
    python examples/train/train.py --recipe nvfp4       one recipe (repeat the option, or separate names by commas)
    python examples/train/train.py --moe 8              blocks that are mixtures of eight experts
    python examples/train/train.py --device cuda        on a GPU
    python examples/train/train.py --processes 2 --parallel tp
                                                        two processes, over which every layer is sharded (or sp,
                                                        fsdp, ep; tp+fsdp needs four)
    python examples/train/train.py --resume             go on after an interruption, bit for bit
    python examples/train/train.py --sample --recipe nvfp4 --prompt "def main("

The model learns Python from the standard library's own source, byte by byte. Every run has the same seed and the same
batches; its loss and backward are compiled by `torch.compile(fullgraph=True)`. Where to read on: `model.py` shows how a
model uses quire, `run.py` how one is trained, `checkpoint.py` what a resumed run needs, `processes.py` what each of
several processes has.
"""

import argparse
import dataclasses
import importlib
import os
import shutil
import sys
from pathlib import Path

from settings import BACKENDS, BASELINE, PARALLEL, RECIPES, ExampleError, Session, Settings

DEFAULT = {"layers": 4, "width": 256, "seq": 128, "batch": 8, "steps": 600, "lr": 1e-3, "validation_batches": 64}
QUICK = {"layers": 1, "width": 128, "seq": 128, "batch": 8, "steps": 100, "lr": 2e-3, "validation_batches": 16}
REMEDY = {
    "torch": "python -m pip install torch",
    "quire": "./dev build",
    "tqdm": "python -m pip install tqdm",
    "matplotlib": "python -m pip install matplotlib",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model and training (defaults in brackets: full / --quick)")
    for name, kind in (("layers", int), ("width", int), ("seq", int), ("batch", int), ("steps", int), ("lr", float)):
        model.add_argument(f"--{name}", type=kind, help=f"[{DEFAULT[name]} / {QUICK[name]}]")
    model.add_argument(
        "--validation-batches", type=int, help="[{} / {}]".format(*(d["validation_batches"] for d in (DEFAULT, QUICK)))
    )
    model.add_argument(
        "--moe", type=int, default=0, help="experts in each block, of which a token takes two [0: no mixture]"
    )
    model.add_argument("--seed", type=int, default=0, help="of initial weights and the order of the data [0]")
    model.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="of the baseline [bf16 if the CPU multiplies it, else fp32]"
    )
    model.add_argument(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="of torch.compile; aot_eager compiles at once [inductor]",
    )
    model.add_argument("--recipe", action="append", help=f"what to train; repeatable [{','.join(RECIPES)}]")
    model.add_argument("--quick", action="store_true", help="a smaller model and fewer steps, to see that it works")
    model.add_argument("--device", default="cpu", help="where to train, such as cuda [cpu]")
    session = parser.add_argument_group("this call")
    session.add_argument(
        "--out", type=Path, default=Path("train-out"), help="folder for everything written [train-out]"
    )
    session.add_argument("--processes", type=int, default=1, help="on this machine, each with a part of the work [1]")
    session.add_argument("--parallel", choices=PARALLEL, default="", help="what is sharded over them")
    session.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    session.add_argument("--checkpoint-every", type=int, default=100, help="steps [100]")
    session.add_argument("--stop-after", type=int, help="stop each run after so many steps, to be resumed")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--sample", action="store_true", help="train nothing; print text from a checkpoint in --out")
    sampling.add_argument("--prompt", default="def ", help='what the text begins with ["def "]')
    sampling.add_argument("--length", type=int, default=400, help="bytes to add to it [400]")
    return parser.parse_args(arguments)


def check_dependencies() -> None:
    """Import what the example needs, or say what is missing and how to get it."""
    for name, remedy in REMEDY.items():
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise ExampleError(f"cannot import {name} ({error}); get it with: {remedy}") from error
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ExampleError(
            f"torch.compile needs the C++ compiler {compiler}, which is not on PATH; install it or set CXX"
        )


def check_device(name: str) -> None:
    """Say in one sentence why nothing can be trained on that device, if so."""
    import torch

    import quire

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ExampleError(
            f"--device {name}: PyTorch {torch.__version__} cannot use it on this machine ({reason}); leave it out to "
            "train on the CPU"
        ) from error
    if reason := quire.info.why_not(quire.recipe.from_name("mxfp8"), device):
        raise ExampleError(f"--device {name}: {reason}")


def make_settings(options: argparse.Namespace, fastest_dtype: str) -> Settings:
    """The defaults of the chosen size, overridden by every option that was given."""
    chosen = dict(QUICK if options.quick else DEFAULT)
    chosen.update({name: getattr(options, name) for name in chosen if getattr(options, name) is not None})
    several = {"processes": int(os.environ.get("WORLD_SIZE", options.processes)), "parallel": options.parallel}
    others = {name: getattr(options, name) for name in ("moe", "seed", "backend", "device")}
    settings = Settings(**chosen, **several, **others, dtype=options.dtype or fastest_dtype)
    settings.check()
    return settings


def recipe_names(options: argparse.Namespace, session: Session) -> list[str]:
    """The recipes asked for, each once, in order; by default all, or for sampling all that have a checkpoint."""
    if options.recipe:
        return list(dict.fromkeys(name for text in options.recipe for name in text.split(",") if name))
    if options.sample:
        return [name for name in RECIPES if session.checkpoint(name).exists()] or [BASELINE]
    return list(RECIPES)


def run(options: argparse.Namespace) -> int:
    """Do what the command line asks for, and return the exit status; anything that a user can put right is an
    ExampleError."""
    session = Session(options.out, options.resume, options.checkpoint_every, options.stop_after)
    session.check()
    check_dependencies()
    # Only now: these import what was checked above.
    import experiment
    import processes
    import sample

    names = recipe_names(options, session)
    if options.sample:
        for name in names:
            print(f"--- {name}")
            sample.generate(name, options.prompt, options.length, session)
        return 0
    check_device(options.device)
    settings = make_settings(options, experiment.fastest_dtype(options.device))
    if settings.processes > 1 and not processes.launched():
        return processes.launch(__file__, sys.argv[1:], settings.processes)
    if settings.processes > 1:
        session = dataclasses.replace(session, rank=processes.rank())
    processes.begin()
    experiment.compare(names, settings, session)
    processes.end()
    return 0


def main() -> int:
    """The program's exit status: 0, 1 after an error that was explained, 130 after Ctrl-C."""
    try:
        return run(parse_arguments())
    except ExampleError as error:
        print(f"\ntrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntrain: interrupted; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
