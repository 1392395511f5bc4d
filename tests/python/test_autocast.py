"""quire.autocast in eager mode: which recipe is active where."""

import gc
import sys
import threading
import weakref

import pytest
import torch

import quire
from quire.autocast import active_recipe
from quire.recipe import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

MX, NV, FP8 = MXFP8BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling()


def test_without_autocast_there_is_no_recipe():
    assert active_recipe() is None


def test_autocast_without_a_recipe_takes_the_default():
    with quire.autocast():
        assert active_recipe() == quire.recipe.default()


def test_autocasts_nest_and_restore():
    with quire.autocast(recipe=MX):
        with quire.autocast(recipe=NV):
            assert active_recipe() is NV
        with quire.autocast(enabled=False):
            assert active_recipe() is None
            with quire.autocast(recipe=FP8):
                assert active_recipe() is FP8
            assert active_recipe() is None
        assert active_recipe() is MX
    assert active_recipe() is None


def test_a_disabled_autocast_ignores_its_recipe():
    with quire.autocast(enabled=False, recipe=NV):
        assert active_recipe() is None


def test_an_exception_restores_the_recipe():
    with quire.autocast(recipe=MX):
        with pytest.raises(KeyError):
            with quire.autocast(recipe=NV):
                raise KeyError
        assert active_recipe() is MX


def test_one_context_may_be_entered_within_itself_and_again():
    context = quire.autocast(recipe=NV)
    with context:
        with quire.autocast(recipe=MX), context:
            assert active_recipe() is NV
        assert active_recipe() is NV
    assert active_recipe() is None
    with context:
        assert active_recipe() is NV


def test_it_decorates_functions():
    @quire.autocast(recipe=NV)
    def named(a, *, b):
        """Words."""
        return a, b, active_recipe()

    assert named(1, b=2) == (1, 2, NV)
    assert named.__name__ == "named" and named.__doc__ == "Words."
    with quire.autocast(recipe=MX):
        assert named(1, b=2)[2] is NV
        assert active_recipe() is MX
        assert quire.autocast(enabled=False)(active_recipe)() is None


def test_functions_whose_body_runs_later_are_not_decorated():
    def generator():
        yield 1

    async def coroutine():
        return 1

    async def both():
        yield 1

    for function in (generator, coroutine, both):
        with pytest.raises(TypeError, match=rf"autocast: .*{function.__name__} is a generator or a coroutine function"):
            quire.autocast(recipe="mxfp8")(function)


def test_a_decorated_function_may_run_in_many_threads():
    barrier = threading.Barrier(4)
    seen = []

    @quire.autocast(recipe=NV)
    def work():
        barrier.wait()
        seen.append(active_recipe())
        barrier.wait()

    threads = [threading.Thread(target=lambda: seen.append((work(), active_recipe())[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [NV] * 4 + [None] * 4


def test_a_recipe_belongs_to_its_thread():
    seen = []
    with quire.autocast(recipe=MX):
        thread = threading.Thread(target=lambda: seen.append(active_recipe()))
        thread.start()
        thread.join()
        assert active_recipe() is MX
    assert seen == [None]


def test_a_layer_computes_as_the_innermost_autocast_says(make_layer, make_x, equal_bits):
    layer, x = make_layer(), make_x(8, 96)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with quire.autocast(recipe=MX):
        mx = layer(x)
        with quire.autocast(enabled=False):
            assert equal_bits(layer(x), plain)
        with quire.autocast(recipe=NV):
            nv = layer(x)
        assert equal_bits(layer(x), mx)
    assert equal_bits(layer(x), plain)
    assert not (equal_bits(mx, plain) or equal_bits(nv, plain) or equal_bits(mx, nv))


def test_backward_needs_no_autocast(make_layer, make_x, step, any_recipe):
    layer, x = make_layer(), make_x(8, 96)
    outside = step(layer, x, any_recipe)
    layer.zero_grad()
    x.grad, layer.sr_state[1] = None, 0
    with quire.autocast(recipe=any_recipe):
        y = layer(x)
        with quire.autocast(recipe=FP8):
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    assert outside == type(outside)(y.detach(), x.grad, layer.weight.grad, layer.bias.grad)


WRONG = [
    ({"enabled": MX}, TypeError, "enabled must be a bool, got MXFP8BlockScaling.*recipe="),
    ({"enabled": None}, TypeError, "enabled must be a bool, got None"),
    ({"recipe": "nvpf4"}, ValueError, "there is no recipe 'nvpf4'.*did you mean 'nvfp4'"),
    ({"recipe": "x=mxfp8,w=mxfp8"}, ValueError, "a spec for each of x, w and dy.*got 'x=mxfp8,w=mxfp8'"),
    ({"recipe": "x=mxfp8,w=mxfp9,dy=mxfp8"}, ValueError, "unknown family in '>>mxfp9<<'"),
    ({"recipe": NVFP4BlockScaling}, TypeError, r"got <class .*; construct it: NVFP4BlockScaling\(\)"),
    ({"recipe": 3}, TypeError, r"a name \(nvfp4, .*or a text.*got 3; pass an instance"),
    ({"calibrating": 1}, TypeError, "calibrating must be a bool, got 1"),
    ({"amax_reduction_group": object()}, TypeError, "amax_reduction_group must be a process group"),
]


@pytest.mark.parametrize("arguments, error, words", WRONG)
def test_arguments_of_a_wrong_kind_are_refused_in_words(arguments, error, words):
    with pytest.raises(error, match=words):
        quire.autocast(**arguments)
    assert active_recipe() is None


def test_a_recipe_in_the_place_of_another_argument_is_refused():
    with pytest.raises(TypeError, match="calibrating must be a bool, got NVFP4BlockScaling.*passed as recipe="):
        quire.autocast(True, NV)


def test_what_a_thread_has_ends_with_it():
    class Mark:
        pass

    marks = []

    def work():
        with quire.autocast(recipe="mxfp8"):
            mark = Mark()
        sys.modules["quire.autocast"]._STATE.mark = mark
        marks.append(weakref.ref(mark))

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert [mark() for mark in marks] == [None] * 5
