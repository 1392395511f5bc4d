"""Routing and permutation written from moe-reference.md in NumPy and float64, for tests to compare with."""

import numpy as np
import torch


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def scores_of(function, x):
    return {
        "softmax": softmax,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
    }[function](x)


def best(values, count, places=None):
    """Places of the greatest, greatest first, of equal ones the smaller place first."""
    places = range(len(values)) if places is None else places
    return sorted(places, key=lambda i: (-values[i], i))[:count]


def choose(choice, topk, num_groups=None, group_topk=None, group_best=None):
    places = list(range(len(choice)))
    if num_groups:
        size = len(choice) // num_groups
        members = [places[g * size : (g + 1) * size] for g in range(num_groups)]
        count = topk // group_topk if group_best is None else group_best
        totals = [sum(choice[i] for i in best(choice, count, group)) for group in members]
        places = [i for g in best(totals, group_topk) for i in members[g]]
    return best(choice, topk, places)


def route(logits, topk, score_function="softmax", softmax_after_topk=False, renormalize=False, **options):
    """(weights float64 [T, k], ids int32 [T, k]) where the logits are."""
    place, logits = logits.device, logits.detach().cpu().double().numpy()
    bias = options.pop("expert_bias", None)
    bias = 0 if bias is None else bias.cpu().double().numpy()
    scaling_factor = options.pop("scaling_factor", 1.0)
    weights, ids = np.zeros((len(logits), topk)), np.zeros((len(logits), topk), np.int32)
    for t, line in enumerate(logits):
        scores = line if softmax_after_topk else scores_of(score_function, line)
        ids[t] = choose(scores + bias, topk, **options)
        weights[t] = softmax(line[ids[t]]) if softmax_after_topk else scores[ids[t]]
        if renormalize:
            weights[t] /= weights[t].sum()
    return torch.from_numpy(weights * scaling_factor).to(place), torch.from_numpy(ids).to(place)


def weights_of(logits, ids, score_function="softmax", softmax_after_topk=False, renormalize=False, **options):
    """Weights of given choices as a differentiable function of float64 logits."""
    functions = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x, threshold=1e9).sqrt(),
    }
    chosen = logits.gather(-1, ids.long())
    weights = chosen.softmax(-1) if softmax_after_topk else functions[score_function](logits).gather(-1, ids.long())
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * options.get("scaling_factor", 1.0)


def roundings_of_weights(logits):
    """How many roundings to float32 a weight or a score has at most, for assert_rounded with the weight as magnitude.

    exp has 2, and the one of its argument counts as often as the argument is large: the distance from the greatest
    logit. The mean of the distances over a softmax of n is at most log(n), below 3. A sum of 8, or of 16 by halves, has
    7. So a weight that is divided by a sum of such has 3 and its distance, then 3 + 3 + 7, and 2 for division and
    factor. A sigmoid and the root of softplus have at most 4 instead of 3 and the distance.
    """
    return 18 + float((logits.amax(-1) - logits.amin(-1)).max())


def roundings_of_gradient(logits, ids, dweights, score_function="softmax", renormalize=False, **options):
    """(magnitude, roundings) of the gradient of weights_of, for assert_rounded.

    The magnitude is the formula with the absolute value of each term: both the gradient of a softmax and that of a
    quotient are a product with a difference. A term has the roundings of every weight in it, and 12 of its own for
    each of the two formulas, as a sum of products and a difference have 9, and factors 3.
    """
    logits, ids, of_scores = logits.detach().double(), ids.long(), dweights.double().abs()
    of_scores = of_scores * options.get("scaling_factor", 1.0)
    if options.get("softmax_after_topk"):
        p = logits.gather(-1, ids).softmax(-1)
        of_chosen = p * (of_scores + (of_scores * p).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter(-1, ids, of_chosen), 2 * roundings_of_weights(logits) + 12
    functions = {"sigmoid": torch.sigmoid, "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt()}
    leaf = logits.requires_grad_()
    scores = leaf.softmax(-1) if score_function == "softmax" else functions[score_function](leaf)
    chosen = scores.detach().gather(-1, ids)
    if renormalize:
        total = chosen.sum(-1, keepdim=True)
        of_scores = (of_scores + (of_scores * chosen).sum(-1, keepdim=True) / total) / total
    of_scores = torch.zeros_like(scores).scatter(-1, ids, of_scores)
    if score_function == "softmax":
        p = scores.detach()
        magnitude = p * (of_scores + (of_scores * p).sum(-1, keepdim=True))
    else:
        (magnitude,) = torch.autograd.grad(scores, leaf, of_scores)
    return magnitude, (5 if renormalize else 2) * roundings_of_weights(logits.detach()) + 24


def limit(ids, capacity):
    seen, kept = {}, []
    for expert in ids.flatten().tolist():
        seen[expert] = seen.get(expert, 0) + 1
        kept.append(expert if seen[expert] <= capacity else -1)
    return torch.tensor(kept, dtype=torch.int32).reshape(ids.shape)


def rows_by_expert(ids, num_experts):
    """(row_map [T, k], offsets [E]) by sorting."""
    flat = ids.numpy().reshape(-1)
    places = [i for i in np.argsort(flat, kind="stable") if flat[i] >= 0]
    row_map = np.full(len(flat), -1, np.int32)
    row_map[places] = np.arange(len(places))
    ends = [int((flat[flat >= 0] <= e).sum()) for e in range(num_experts)]
    return torch.from_numpy(row_map.reshape(ids.shape)), torch.tensor(ends, dtype=torch.int32)


def permute(x, row_map, rows, weights=None):
    """Row by row, in x's own arithmetic."""
    y = torch.zeros(rows, x.shape[1], dtype=x.dtype)
    for t, slots in enumerate(row_map.tolist()):
        for s, row in enumerate(slots):
            if row >= 0:
                y[row] = x[t] if weights is None else (x[t] * weights[t, s]).to(x.dtype)
    return y


def unpermute(y, row_map, weights=None):
    """In the order of slots, in y's own arithmetic (float32 and float64: the same order of operations)."""
    x = torch.zeros(len(row_map), y.shape[1], dtype=y.dtype)
    for t, slots in enumerate(row_map.tolist()):
        terms = [y[row] if weights is None else y[row] * weights[t, s] for s, row in enumerate(slots) if row >= 0]
        if terms:
            x[t] = terms[0]
        for term in terms[1:]:
            x[t] = x[t] + term
    return x
