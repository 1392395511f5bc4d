"""Models that gather_codes has prepared: other ways to run them, and what is refused, for functions that tests/ranks.py
runs."""

import contextlib
import copy
import io

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quire
from every_recipe import TABLE
from quire.distributed import gather_codes
from shard_ranks import (
    IN,
    OUT,
    Case,
    CountedGather,
    batches,
    layers_of,
    make,
    mesh_of,
    passes,
    same,
    shard,
    sharded,
    train,
)


def evaluation_between_steps(rank, reshard):
    """No gradient is wanted, and then one is."""
    case, found = Case("mxfp8", reshard=reshard), []
    for codes in (False, True):
        model, _ = sharded(case, codes)
        with torch.no_grad(), quire.autocast(recipe=TABLE[case.recipe]):
            before = model(batches(case)[0, 0, rank])
        for layer in (model[0], model[2]):
            layer.unshard()  # outside of any pass
        found.append([before, *train(model, rank, case)])
    assert same(*found) == []


def states_are_plain(rank):
    case = Case("mxfp8")
    model, _ = sharded(case, codes=True)
    other, _ = sharded(case, codes=True)
    train(model, rank, case)
    state = model.state_dict()
    assert type(state["0.weight"]) is DTensor and type(state["0.weight"].to_local()) is torch.Tensor
    assert state["0.weight"].placements == model[0].weight.placements
    other.load_state_dict(state)
    assert same(train(model, rank, case), train(other, rank, case)) == []
    with contextlib.suppress(RuntimeError):
        other.load_state_dict(state, assign=True)
        raise AssertionError("assign=True took the codes away")
    assert type(other[0].weight.to_local()) is type(model[0].weight.to_local())


def copies_are_prepared_too(rank):
    case = Case("mxfp8")
    model = make(case)
    gather_codes(model, TABLE[case.recipe])
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["0.weight"]) is torch.Tensor
    x = batches(case)[0, 0, rank]
    assert same(passes(model, x, TABLE["mxfp8"]), passes(make(case), x, TABLE["mxfp8"])) == []  # not yet sharded
    assert "MasterShard('mxfp8:nan'" in repr(model[0].weight)
    counts = []
    for each in (model, copied):
        model = shard(each, case)
        counted = CountedGather(model)
        passes(model, x, TABLE["mxfp8"])
        counts.append(counted.bytes)
    assert counts[0] == counts[1]


def models_leave_the_meta_device(rank):
    case = Case("mxfp8")
    found = []
    for codes in (False, True):
        with torch.device("meta"):
            model = torch.nn.Sequential(*layers_of("linears", OUT))
        if codes:
            gather_codes(model, TABLE[case.recipe])
        shard(model, case).to_empty(device="cpu")
        for i, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, 0.01 * (i + 1))
        found.append(train(model.to(torch.float32), rank, case))
    assert same(*found) == []


def tied_weights_stay_tied(rank):
    case, found = Case("mxfp8", outputs=IN), []
    for codes in (False, True):
        model = make(case)
        model[2].weight = model[0].weight
        if codes:
            gather_codes(model, TABLE[case.recipe])
        fully_shard(model, mesh=mesh_of(case))
        assert model[2].weight is model[0].weight
        found.append(train(model, rank, case))
    assert same(*found) == []


def optimizers_update_masters(rank):
    makers = {
        "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    }
    case = Case("nvfp4_no_sr")
    for name, make_optimizer in makers.items():
        found = []
        for codes in (False, True):
            model, _ = sharded(case, codes)
            optimizer = make_optimizer(model.parameters())
            for xs in batches(case):
                passes(model, xs[0, rank], TABLE[case.recipe])
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            found.append([parameter.full_tensor() for parameter in model.parameters()])
        assert same(*found) == [], name


# ---------------------------------------------------------------- what is refused


def errors(rank):
    """What is said, by what was tried."""
    case, said = Case("mxfp8"), {}

    def tried(name, function):
        try:
            function()
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            said[name] = str(error)
        else:
            said[name] = "nothing"

    def forward(model, recipe="mxfp8"):
        return passes(model, batches(case)[0, 0, rank], TABLE[recipe])

    tried("no layers", lambda: gather_codes(torch.nn.Linear(4, 4), "mxfp8"))
    tried("high precision", lambda: gather_codes(make(case), TABLE["mxfp8_high_precision"]))
    tried("no recipe", lambda: gather_codes(make(case), None))
    tried("after", lambda: gather_codes(sharded(case, codes=False)[0], "mxfp8"))
    tried("twice", lambda: gather_codes(sharded(case, codes=True)[0], "mxfp8"))
    with quire.quantized_model_init(recipe="mxfp8"):
        quantized = make(case)
    tried("no master", lambda: gather_codes(quantized, "mxfp8"))
    tried("quantized", lambda: fully_shard(quantized, mesh=mesh_of(case)))
    fused = torch.nn.Sequential(quire.Linear(IN, OUT, fuse_wgrad_accumulation=True))
    tried("fused", lambda: gather_codes(fused, "mxfp8"))
    tried("fused values", lambda: forward(shard(fused, case)))
    delayed = shard(torch.nn.Sequential(quire.Linear(IN, IN, delay_wgrad_compute=True)), case)
    forward(delayed)
    tried("delayed", delayed[0].backward_dw)
    tried("other recipe", lambda: forward(sharded(case, codes=True)[0], "nvfp4"))
    for codes in (False, True):
        tried(f"kept {codes}", lambda codes=codes: quire.quantize_weights(sharded(case, codes)[0], "mxfp8"))
    again = Case("mxfp8", kind="checkpoint")
    tried("again", lambda: passes(sharded(again, codes=True)[0], batches(again)[0, 0, rank], TABLE["mxfp8"]))
    return said
