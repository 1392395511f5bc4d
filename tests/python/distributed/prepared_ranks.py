"""Models that gather_codes has prepared: other ways to run them, and what is refused, for functions that tests/ranks.py
runs."""

import contextlib
import copy
import io
import itertools
import warnings

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import quire
from every_recipe import TABLE
from python.distributed.shard_ranks import (
    IN,
    OUT,
    Case,
    CountedGather,
    batches,
    differing,
    layers_of,
    make_layers,
    mesh_of,
    passes,
    shard,
    sharded,
    train_shards,
)
from python.distributed.sums import assert_same_sums
from quire.distributed import gather_codes, shard_weights


def evaluation_between_steps(rank, reshard):
    """No gradient is wanted, and then one is."""
    case, found = Case("mxfp8", reshard=reshard), []
    for codes in (False, True):
        model, _ = sharded(case, codes)
        with torch.no_grad(), quire.autocast(recipe=TABLE[case.recipe]):
            before = model(batches(case)[0, 0, rank])
        for layer in (model[0], model[2]):
            layer.unshard()  # outside of any pass
        found.append([before, *train_shards(model, rank, case)])
    assert differing(*found) == []


def only_what_a_pass_needs_is_there(rank):
    """Codes of the other direction decode to NaN, and the bytes that were gathered are freed."""
    case, seen = Case("mxfp8"), []
    model, _ = sharded(case, codes=True)
    layer = model[2]

    def look(*_):
        found = layer.gathering.find(layer, "weight")
        assert found.parameter.all_gather_outputs[0].untyped_storage().size() == 0
        seen.append(
            [(getattr(layer.weight, f"{name}_scale") == 255).all().item() for name in ("rowwise", "columnwise")]
        )

    layer.register_forward_pre_hook(look)
    layer.register_full_backward_hook(look)
    passes(model, batches(case)[0, 0, rank], TABLE[case.recipe])
    assert seen == [[False, True], [True, False]]
    assert all(
        t.untyped_storage().size() == 0
        for t in layer.gathering.find(layer, "weight").parameter._unsharded_inner_tensors
    )


def layers_of_a_graph_are_ordinary(rank):
    """Shapes and dtypes of x, copies, states and moves of a layer that shard_weights has sharded."""
    mesh = mesh_of(Case("mxfp8"))
    inputs = {
        "no tokens": torch.ones(0, IN),
        "one token": torch.ones(IN),
        "three dimensions": torch.ones(3, 5, IN),
        "strides": torch.arange(7 * IN).view(IN, 7).t() / IN,
    }
    for recipe in ("mxfp8", "nvfp4", "fp8_current_dequantized", "mxfp8_high_precision"):
        for what, x in inputs.items():
            one = quire.Linear(IN, OUT)
            one.sr_state.copy_(torch.tensor([3, 0]))
            torch.distributed.broadcast(one.weight.detach(), 0)
            torch.distributed.broadcast(one.bias.detach(), 0)
            layer = copy.deepcopy(one)
            shard_weights(layer, mesh, TABLE[recipe])
            assert differing(passes_of(layer, x, recipe), passes_of(one, x, recipe)) == [], (recipe, what)
            assert torch.equal(layer.weight.grad.full_tensor(), one.weight.grad), (recipe, what)
            assert torch.equal(layer.bias.grad, one.bias.grad) and torch.equal(layer.sr_state, one.sr_state)
    copied = copy.deepcopy(layer)
    copied.load_state_dict(layer.state_dict(), assign=True)
    assert differing(passes_of(copied, x, "mxfp8"), passes_of(layer, x, "mxfp8")) == []
    torch.manual_seed(1)
    copied.reset_parameters()
    torch.manual_seed(1)
    one.reset_parameters()
    assert torch.equal(copied.weight.full_tensor(), one.weight)
    with torch.inference_mode(), torch.autocast("cpu"), quire.autocast(recipe="mxfp8"):
        assert torch.equal(copied(x), one(x)) and copied(x).dtype == torch.bfloat16
    x = x.to(torch.bfloat16)
    assert (
        differing(passes_of(copied.to(torch.bfloat16), x, "mxfp8"), passes_of(one.to(torch.bfloat16), x, "mxfp8")) == []
    )


def passes_of(layer, x, recipe):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with quire.autocast(recipe=TABLE[recipe]):
        y = layer(x, fp8_grad=True)
    (y * torch.arange(y.shape[-1])).sum().backward()
    return [y.detach(), x.grad]


def states_are_plain(rank):
    case = Case("mxfp8")
    model, _ = sharded(case, codes=True)
    other, _ = sharded(case, codes=True)
    train_shards(model, rank, case)
    state = model.state_dict()
    assert type(state["0.weight"]) is DTensor and type(state["0.weight"].to_local()) is torch.Tensor
    assert state["0.weight"].placements == model[0].weight.placements
    other.load_state_dict(state)
    assert differing(train_shards(model, rank, case), train_shards(other, rank, case)) == []
    with contextlib.suppress(RuntimeError):
        other.load_state_dict(state, assign=True)
        raise AssertionError("assign=True took the codes away")
    assert type(other[0].weight.to_local()) is type(model[0].weight.to_local())


def copies_are_prepared_too(rank):
    case = Case("mxfp8")
    model = make_layers(case)
    gather_codes(model, TABLE[case.recipe])
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["0.weight"]) is torch.Tensor
    x = batches(case)[0, 0, rank]
    assert (
        differing(passes(model, x, TABLE["mxfp8"]), passes(make_layers(case), x, TABLE["mxfp8"])) == []
    )  # not yet sharded
    assert "MasterShard('mxfp8:nan'" in repr(model[0].weight)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded, counts = torch.load(file, weights_only=False), []
    passes(shard(loaded, case), x, TABLE["mxfp8"])
    for each in (model, copied, loaded):
        model = each if each is loaded else shard(each, case)
        counted = CountedGather(model)
        passes(model, x, TABLE["mxfp8"])
        counts.append(counted.bytes)
    assert counts[0] == counts[1] == counts[2]


def blocks_may_be_wrapped_before_they_are_sharded(rank):
    """fully_shard is called for modules that gather_codes did not get. The bytes are those of the model itself."""
    case, found, counts = Case("mxfp8"), [], []
    for wrapped in (False, True):
        model = make_layers(case)
        gather_codes(model, TABLE[case.recipe])
        model = shard(in_wrappers(model) if wrapped else model, case)
        counted = CountedGather(model)
        found.append(passes(model, batches(case)[0, 0, rank], TABLE[case.recipe]))
        counts.append(counted.bytes)
    assert counts[0] == counts[1] and differing(*found) == []


def in_wrappers(model):
    return torch.nn.Sequential(*(torch.nn.Sequential(layer) for layer in model))


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
        found.append(train_shards(model.to(torch.float32), rank, case))
        torch.manual_seed(5)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
        found[-1] += [parameter.full_tensor() for parameter in model.parameters()]
    assert differing(*found) == []
    torch.manual_seed(5)
    assert (
        differing(found[1][-4:], torch.nn.Sequential(*layers_of("linears", OUT)).parameters()) == []
    )  # of one process


def tied_weights_stay_tied(rank):
    for embeds, divide in itertools.product((False, True), (gather_codes, shard_in_graph)):
        case, found = Case("mxfp8", outputs=IN), []
        for codes in (False, True):
            model = make_layers(case)
            model[2].weight = model[0].weight
            if embeds:  # which takes values
                model[1].weight = model[0].weight
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if codes:
                    divide(model, TABLE[case.recipe])
            assert len(said) == (2 if embeds and codes else 0), [str(one.message) for one in said]
            if divide is gather_codes or not codes:
                fully_shard(model, mesh=mesh_of(case))
            model.set_requires_gradient_sync = getattr(model, "set_requires_gradient_sync", lambda _: None)
            assert model[2].weight is model[0].weight
            found.append(train_shards(model, rank, case))
        if divide is gather_codes:
            assert differing(*found) == [], embeds
        for a, b in zip(*found, strict=True):  # a mean of two gradients, or two means
            assert_same_sums(a, b, OUT)


def shard_in_graph(model, recipe):
    shard_weights(model, mesh_of(Case("mxfp8")), recipe)


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
        assert differing(*found) == [], name


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
    tried("high precision", lambda: gather_codes(make_layers(case), TABLE["mxfp8_high_precision"]))
    tried("no recipe", lambda: gather_codes(make_layers(case), None))
    tried("after", lambda: gather_codes(sharded(case, codes=False)[0], "mxfp8"))
    tried("twice", lambda: gather_codes(sharded(case, codes=True)[0], "mxfp8"))
    with quire.quantized_model_init(recipe="mxfp8"):
        quantized = make_layers(case)
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
    _refused_in_graphs(case, tried)
    again = Case("mxfp8", kind="checkpoint")
    tried("again", lambda: passes(sharded(again, codes=True)[0], batches(again)[0, 0, rank], TABLE["mxfp8"]))
    wrapped = make_layers(again)
    gather_codes(wrapped, TABLE["mxfp8"])
    wrapped = shard(in_wrappers(wrapped), again)
    tried("again, wrapped", lambda: passes(wrapped, batches(again)[0, 0, rank], TABLE["mxfp8"]))
    within = torch.nn.Sequential(quire.LayerNormMLP(IN, OUT, checkpoint=True))
    tried("again, within a layer", lambda: gather_codes(within, "mxfp8"))
    decoded = torch.nn.Sequential(quire.LayerNormMLP(IN, OUT, checkpoint=True))
    tried("again, from the codes of forward", lambda: gather_codes(decoded, TABLE["mxfp8_dequantized"]))
    within[0].checkpoint = False
    gather_codes(within, "mxfp8")
    within[0].checkpoint = True
    within = shard(within, case)
    tried("again, by an attribute", lambda: forward(within))
    return said


def _refused_in_graphs(case, tried):
    mesh, x = mesh_of(case), torch.randn(4, IN)
    layer = quire.Linear(IN, OUT)
    shard_weights(layer, mesh, "mxfp8")

    def run(x, recipe="mxfp8", **options):
        with quire.autocast(recipe=TABLE[recipe]):
            return layer(x, **options)

    tried("graph twice", lambda: shard_weights(layer, mesh, "mxfp8"))
    tried("graph mesh", lambda: shard_weights(quire.Linear(IN, OUT), mesh_of(Case("mxfp8", mesh=(2, 1))), "mxfp8"))
    tried("graph fused", lambda: shard_weights(quire.Linear(IN, OUT, fuse_wgrad_accumulation=True), mesh, "mxfp8"))
    tried("graph delayed", lambda: shard_weights(quire.Linear(IN, OUT), mesh, TABLE["delayed"]))
    tried("graph delayed call", lambda: run(x, "delayed"))
    tried("graph microbatch", lambda: run(x, is_first_microbatch=True))
    tried("graph kept", lambda: quire.quantize_weights(layer, "mxfp8"))
    tried("graph x", lambda: run(distribute_tensor(x, mesh, [Replicate()])))
    tried("graph codes", lambda: run(quire.quantize(x, "mxfp8")))
    tried("graph features", lambda: run(x[:, :32]))
