"""One run: a model trained from a seed in one recipe, then validated.

The forward pass and the loss are one compiled function. `fullgraph=True` makes `torch.compile` refuse whatever it would
have to leave to Python, so a run that starts at all has one graph forward and, made from it by autograd, one backward.
The optimizer is PyTorch's fused AdamW, outside of the graph.
"""

import dataclasses
import math
import statistics
import sys
import time

import checkpoint
import meter
import torch
from data import Corpus, training_windows, validation_windows
from model import Gpt, make_loss
from processes import Sharding, rank
from settings import BASELINE, ExampleError, Session, Settings
from tqdm import tqdm

import quire

CLIP = 1.0  # largest norm of the gradient
WARM_UP = 0.1  # share of the steps in which the learning rate rises
FINAL_LR = 0.1  # of the peak learning rate, reached at the last step
FINAL_SHARE = 0.1  # of the steps, over which the reported training loss is the mean
SHOWN_LOSS = 0.9  # how much of the loss in the progress bar is the past


@dataclasses.dataclass
class Progress:
    """What has happened so far; saved with every checkpoint.

    `losses` has one training loss per step, `step_seconds` the time of every step except the first of each call of the
    program, which also compiles and whose time is in `first_seconds`. `result` is there once the run is complete.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    first_seconds: list[float] = dataclasses.field(default_factory=list)
    result: dict | None = None


def progress_bar(*args, **options) -> tqdm:
    """A tqdm that writes now and then only where nobody watches, such as into a log."""
    return tqdm(*args, **options, mininterval=0.1 if sys.stderr.isatty() else 10, disable=rank() != 0)


def learning_rate(step: int, settings: Settings) -> float:
    """A straight rise to the peak, then half a cosine down; a function of the step alone, so there is no state."""
    warm_up = max(1, round(WARM_UP * settings.steps))
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: Gpt, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices of products only, not on embeddings, norms and biases."""
    decayed = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith(("blocks", "head"))]
    chosen = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def make_recipe(name: str) -> object | None:
    """The recipe of that name; None for the baseline, which quantizes nothing."""
    if name == BASELINE:
        return None
    try:
        return quire.recipe.from_name(name)
    except (KeyError, ValueError) as error:
        raise ExampleError(f"--recipe {name}: {error.args[0] if error.args else error}") from error


class Run:
    """A model, its optimizer, its data and its progress.

    `train` and `finish` advance it, `save` and `load` carry it from one call of the program to the next.
    """

    def __init__(self, name: str, settings: Settings, corpus: Corpus):
        self.name, self.settings, self.digest = name, settings, corpus.digest
        self.sharding = Sharding(settings)
        self.model = self.sharding.make_model().to(settings.device)
        self.optimizer = make_optimizer(self.model, settings.lr)
        self.loss = make_loss(self.model, make_recipe(name), settings.dtype)
        meter.forget_graphs()
        self.compiled_loss = self.sharding.compiled(self.model, make_recipe(name))
        self.batches = training_windows(corpus.train, settings.seq, settings.batch, settings.seed)
        self.validation = validation_windows(
            corpus.validation, settings.seq, settings.batch, settings.validation_batches
        )
        self.progress = Progress()

    def own(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What this process has of a batch, on its device."""
        return tuple(part.to(self.settings.device) for part in self.sharding.own(batch))

    @property
    def step(self) -> int:
        """Steps done, and so the number of the next one."""
        return len(self.progress.losses)

    def save(self, session: Session) -> None:
        content = {
            "recipe": self.name,
            "settings": dataclasses.asdict(self.settings),
            "digest": self.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "quire_rng": quire.rng_state(self.model),
            "delayed": quire.delayed_state(self.model),
            "progress": dataclasses.asdict(self.progress),
        }
        checkpoint.save(session.checkpoint(self.name), content)

    def load(self, session: Session) -> None:
        """Continue from the checkpoint of this recipe, if there is one."""
        path = session.checkpoint(self.name)
        if not path.exists():
            return
        content = checkpoint.load(path)
        checkpoint.check_same_run(path, content, self.settings, self.digest)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["torch_rng"])
        quire.set_rng_state(self.model, content["quire_rng"])
        quire.set_delayed_state(self.model, content["delayed"])
        self.progress = Progress(**content["progress"])

    def train_step(self) -> float:
        """Forward, compiled backward, clipping, update. Returns the loss before the update."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings)
        loss = self.compiled_loss(*self.own(self.batches[self.step]))
        self.sharding.backward(loss, self.model)
        norm = self.sharding.clip_gradients(self.model, CLIP)
        loss = self.sharding.mean(loss)
        self.check_finite("training loss", loss)
        self.check_finite("gradient norm", norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def measure(self) -> tuple[int, int]:
        """Bytes that an eager forward keeps for backward, and bytes that this process sends in a step. The checkpoint
        that follows has no trace of it."""
        random, delayed = quire.rng_state(self.model), quire.delayed_state(self.model)
        batch = self.own(self.batches[0])
        with torch.compiler.set_stance("force_eager"):
            saved = meter.saved_bytes(self.model, lambda: self.loss(*batch))
            wire = meter.wire_bytes(lambda: self.sharding.backward(self.loss(*batch), self.model))
        self.optimizer.zero_grad()
        quire.set_rng_state(self.model, random)
        quire.set_delayed_state(self.model, delayed)
        return saved, wire

    def check_finite(self, what: str, value: torch.Tensor) -> None:
        if not math.isfinite(value.item()):
            raise ExampleError(
                f"{self.name}: the {what} became {value.item()} at step {self.step + 1} of {self.settings.steps}. "
                f"Training has diverged: lower --lr (now {self.settings.lr:g})"
            )

    def train(self, session: Session) -> None:
        """Train to the last step, or to `session.stop_after`, with a progress bar and checkpoints on the way."""
        last = min(self.settings.steps, session.stop_after or self.settings.steps)
        if self.step == last:
            return
        with progress_bar(total=1, desc=f"{self.name:>12}: compiling", bar_format="{desc} {elapsed}", leave=False):
            shown, seconds = self.timed_step(self.progress.first_seconds)
        compiled = f"compiled in {seconds:.1f} s"
        with progress_bar(total=self.settings.steps, initial=self.step, desc=f"{self.name:>12}", unit="step") as bar:
            bar.set_postfix_str(f"loss {shown:.3f}, {compiled}")
            self.save_if_due(session, last)
            while self.step < last:
                loss, seconds = self.timed_step(self.progress.step_seconds)
                shown = SHOWN_LOSS * shown + (1 - SHOWN_LOSS) * loss
                speed = self.settings.tokens_per_step / seconds
                bar.set_postfix_str(f"loss {shown:.3f}, {speed:,.0f} tokens/s, {compiled}", refresh=False)
                bar.update()
                self.save_if_due(session, last)

    def timed_step(self, times: list[float]) -> tuple[float, float]:
        """The loss of the next step and its seconds, which are added to `times`."""
        start = time.perf_counter()
        loss = self.train_step()
        times.append(time.perf_counter() - start)
        self.progress.losses.append(loss)
        return loss, times[-1]

    def save_if_due(self, session: Session, last: int) -> None:
        """After the last step of all `finish` saves, with the result."""
        due = self.step == last or self.step % session.checkpoint_every == 0
        if due and self.step < self.settings.steps:
            self.save(session)

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """The mean loss over the validation batches, and the seconds that compiling took.

        Without gradients the loss is another graph, the second and last of the run.
        """
        losses, seconds = [], []
        for index in progress_bar(
            range(self.settings.validation_batches), desc=f"{'validation':>12}", unit="batch", leave=False
        ):
            start = time.perf_counter()
            losses.append(self.compiled_loss(*self.own(self.validation[index])))
            seconds.append(time.perf_counter() - start)
        mean = self.sharding.mean(torch.stack(losses).double().mean())
        self.check_finite("validation loss", mean)
        return mean.item(), seconds[0] - statistics.median(seconds)

    def finish(self, session: Session) -> None:
        """Validate, and save the checkpoint that holds the result."""
        progress, settings = self.progress, self.settings
        trained = meter.count_graphs()
        validation_loss, validation_compile = self.validate()
        total = meter.count_graphs()
        step_seconds = statistics.median(progress.step_seconds or progress.first_seconds)
        training_compile = sum(progress.first_seconds) - step_seconds * len(progress.first_seconds)
        late = progress.losses[-max(1, round(FINAL_SHARE * settings.steps)) :]
        saved, wire = self.measure()
        progress.result = {
            "recipe": self.name,
            "train_loss": statistics.fmean(late),
            "validation_loss": validation_loss,
            "tokens_per_second": settings.tokens_per_step / step_seconds,
            "saved_activation_bytes": saved,
            "wire_bytes": wire,
            "train_graphs": trained.captured,
            "validation_graphs": total.captured - trained.captured,
            "graph_breaks": total.breaks,
            "compile_seconds": training_compile + validation_compile,
        }
        self.save(session)


def train_one(name: str, settings: Settings, corpus: Corpus, session: Session) -> dict | None:
    """Train one recipe from its start or its checkpoint.

    Returns the result and, under "losses", the loss of every step; None if `session.stop_after` came before the end.
    """
    run = Run(name, settings, corpus)
    if session.resume:
        run.load(session)
    if run.progress.result is None:
        run.train(session)
        if run.step == settings.steps:
            run.finish(session)
    return run.progress.result and {**run.progress.result, "losses": run.progress.losses}
