"""Trains a small policy by rewards on two processes, and samples from it with a served copy in other batch sizes.

In each step quire.refit gives the server the trainer's new weights, the server writes texts, and the trainer computes
the log-probabilities of these texts again, with another batch size. Both must be the same numbers, bit for bit: then
the samples are of the policy that is trained, and importance ratios are 1. Each step prints how many differ, and the
exit status is 1 if any did.

    python examples/reinforce/reinforce.py mxfp8 nvfp4
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from policy import RECIPES, Settings, log_probabilities, make_server, make_trainer, of_tokens  # noqa: E402

import quire  # noqa: E402

#: Bytes that are rewarded: small letters.
REWARDED = torch.tensor([ord("a") <= byte <= ord("z") for byte in range(256)])


@dataclass(frozen=True)
class Run:
    """prompt: tokens that are given. texts: of each process and step. served: texts of one call of the server.
    like_training: as for make_server()."""

    settings: Settings
    prompt: int
    texts: int
    served: int
    steps: int
    like_training: bool = True


@dataclass(frozen=True)
class Step:
    """reward: the mean of all texts, the share of rewarded bytes. differing: log-probabilities of the server and the
    trainer that are not the same bits, of `count`, in all processes. refit: seconds of quire.refit."""

    reward: float
    differing: int
    count: int
    refit: float


FULL = Run(Settings(2, 128, 48, 16, 0, 3e-3, 0, "fp32", 0), prompt=8, texts=16, served=5, steps=40)
QUICK = Run(Settings(1, 64, 32, 6, 0, 3e-3, 0, "fp32", 0), prompt=20, texts=6, served=4, steps=3)


@torch.no_grad()
def rollouts(server: torch.nn.Module, run: Run, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts [texts, window], and the log-probabilities with which their tokens were drawn."""
    tokens = torch.randint(256, (run.texts, run.settings.seq), generator=generator)
    tokens[:, run.prompt :] = 0
    drawn = torch.empty(run.texts, run.settings.seq - run.prompt)
    for place in range(run.prompt, run.settings.seq):
        for rows in torch.arange(run.texts).split(run.served):
            log_p = log_probabilities(server, tokens[rows])[:, place - 1]
            chosen = torch.multinomial(log_p.exp(), 1, generator=generator)
            tokens[rows, place] = chosen[:, 0]
            drawn[rows, place - run.prompt] = log_p.gather(1, chosen)[:, 0]
    return tokens, drawn


def total(value: torch.Tensor) -> float:
    """The sum over all processes."""
    distributed.all_reduce(value)
    return value.item()


def train(recipe: str, run: Run) -> list[Step]:
    """REINFORCE with the mean reward as the baseline. All processes must call it."""
    trainer = make_trainer(run.settings, RECIPES[recipe])
    server = make_server(run.settings, RECIPES[recipe], run.like_training)
    parallel = DistributedDataParallel(trainer)
    optimizer = torch.optim.AdamW(trainer.parameters(), run.settings.lr)
    generator = torch.Generator().manual_seed(1 + distributed.get_rank())
    ranks, steps = distributed.get_world_size(), []
    for _ in range(run.steps):
        begin = time.perf_counter()
        quire.refit(server, trainer.state_dict())
        seconds = time.perf_counter() - begin
        tokens, drawn = rollouts(server, run, generator)
        log_p = of_tokens(log_probabilities(parallel, tokens), tokens, run.prompt)
        differing = (log_p.detach().view(torch.int32) != drawn.view(torch.int32)).sum()
        reward = REWARDED[tokens[:, run.prompt :]].float().mean(1)
        mean = total(reward.mean()) / ranks
        loss = -((reward - mean)[:, None] * log_p).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append(Step(mean, int(total(differing)), ranks * drawn.numel(), seconds))
        if distributed.get_rank() == 0:
            print(said(recipe, len(steps), steps[-1]), flush=True)
    return steps


def said(recipe: str, number: int, step: Step) -> str:
    return (
        f"{recipe} step {number:3}: reward {step.reward:.3f}, {step.differing} of {step.count} log-probabilities "
        f"differ, refit {1e3 * step.refit:.1f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--quick", action="store_true", help="a tiny policy and three steps")
    parser.add_argument(
        "--inference-scales",
        action="store_true",
        help="serve NVFP4 weights in the scales of a conversion for inference",
    )
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(RECIPES):
        parser.error(f"recipes are {', '.join(RECIPES)}; got {', '.join(sorted(unknown))}")
    from processes import begin, end, launch, launched

    if not launched():
        return launch(__file__, sys.argv[1:], processes=2)
    begin()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // distributed.get_world_size()))
    run = replace(QUICK if options.quick else FULL, like_training=not options.inference_scales)
    runs = [train(recipe, run) for recipe in options.recipes]
    end(int(any(step.differing for steps in runs for step in steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
