"""Defects that other projects had with many processes, and that quire must not have. What other tests cover:

| defect elsewhere | test |
|---|---|
| columnwise codes that are gathered in a wrong order, so that the gradient of the weight is wrong | test_linear.py, test_results_are_those_of_one_process: dw, tokens sharded |
| amaxes that are not reduced with reduce_amax=False | the same, recipe delayed_of_each_rank |
| amaxes that are reduced over a wrong group | delayed/test_distributed.py |
| LayerNormLinear with sharded tokens casts another tensor | test_linear.py, test_layers_with_a_norm |
| sharded tokens whose number is no multiple of 8 or 128 | test_linear.py, tokens of 14, 2 and 0 |
| gradients of norms and biases that are partial sums | test_linear.py, test_layers_with_a_norm; biases of row layers |
| a right forward pass with a sum missing in backward | test_linear.py: dx |
| a quantized tensor within a DTensor | test_styles.py, test_what_cannot_be_sharded_is_refused_and_stays_as_it_is |
| checkpoints with an _extra_state, or without some formats | test_training_state.py, test_codes_of_quantized_weights_are_kept |
| codes that are decoded and quantized again when they are loaded | the same; test_saving_a_new_optimizer_leaves_codes_as_they_are |
| processes that stall without an error | test_failing_ranks.py |
"""  # noqa: E501 (rows of a table)

import pytest

from python.distributed.defect_ranks import (
    bytes_after_steps,
    gathered_bytes,
    gradient_norm,
    group_of_one,
    kept_codes_are_used,
    main_grad_of_shards,
    only_one_makes_a_layer,
    part_of_zeros,
    parts_that_end_within_a_block,
    uneven_shards,
)


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "delayed"])
def test_a_part_of_zeros_does_not_give_a_scale_of_its_own(two, recipe):
    two.run(part_of_zeros, recipe)


def test_a_group_of_one_process_does_not_change_a_bit(two):
    two.run(group_of_one)


def test_a_weight_that_all_processes_have_does_not_count_twice_in_the_norm_of_gradients(two):
    for one, sharded in two.run(gradient_norm):
        # The weight of a LayerNorm that counts twice adds 2e-4 of the norm. Sums in another order differ by 1e-6.
        assert sharded == pytest.approx(one, rel=1e-5)


# Bytes of a code and its part of a scale, against the 2 of bfloat16.
@pytest.mark.parametrize(("recipe", "most"), [("fp8_current", 0.51), ("mxfp8", 0.53), ("nvfp4", 0.29)])
def test_a_gather_of_codes_does_not_send_values(two, recipe, most):
    for (x, x_again), (nothing, dy) in two.run(gathered_bytes, recipe):
        assert 0 < x <= most and 0 < x_again <= most and nothing == 0 and 0 < dy <= 2 * most


def test_codes_that_are_kept_do_not_get_lost(two):
    for found in two.run(kept_codes_are_used):
        for without, kept, stale in found:
            assert kept == without - 1 and "changed" in stale


# Of recipes without an amax of the whole tensor.
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_a_part_that_ends_within_a_block_does_not_take_scales_of_another(two, recipe):
    two.run(parts_that_end_within_a_block, recipe)


def test_making_a_layer_does_not_wait_for_other_processes(two):
    assert two.run(only_one_makes_a_layer, deadline=30) == [True, True]


@pytest.mark.parametrize("out", [33, 1])
def test_rows_that_do_not_divide_do_not_stop_fully_shard(two, out):
    two.run(uneven_shards, out)


def test_copies_of_weights_do_not_pile_up(two):
    for found in two.run(bytes_after_steps, 4):
        assert found[1] == found[2] == found[3]


def test_a_main_grad_of_shards_does_not_get_lost(two):
    for said in two.run(main_grad_of_shards):
        assert "fuse_wgrad_accumulation=True needs weight.main_grad" in said and "got None" in said
