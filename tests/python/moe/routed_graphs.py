"""What is routed in eager mode and in graphs, and how far both may be apart."""

import torch

TOKENS = [0, 1, 7, 64, 33, 2]


EXPERTS = 6


def inputs(tokens, mark=None):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=generator)
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    logits[:, tokens % EXPERTS] += 3 * (tokens % 3)  # loads differ, some experts are empty
    for t in (x, logits):
        t.requires_grad_()
        if mark is not None:
            mark(t, 0)
    return x, logits


def both(function, compiled, tokens, mark):
    """Results and gradients, eager and compiled, of the same inputs."""
    done = []
    for run, marked in ((function, None), (compiled, mark)):
        given = inputs(tokens, marked)
        loss, *rest = run(*given)
        loss.backward()
        done.append((loss.detach(), *rest, *(t.grad for t in given)))
    return done


def agree(eager, compiled):
    """What quire computes is equal; Inductor's and eager's sums and sines may differ in last bits: by one rounding of
    each of at most `terms` terms."""
    terms = 2 * max(eager[-2].numel(), 64)
    for e, c in zip(eager, compiled, strict=True):
        assert e.shape == c.shape and e.dtype == c.dtype
        if e.is_floating_point() and e.numel():
            assert float((c - e).abs().max()) <= terms * 2.0**-24 * float(e.abs().max())
        assert e.is_floating_point() or torch.equal(e, c)
