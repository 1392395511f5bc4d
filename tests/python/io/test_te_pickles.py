"""Pickles under the names of TransformerEngine run nothing, whatever they hold."""

import collections
import copyreg
import io
import os
import pickle

import pytest
import torch

import quire
from python.io.te_classes import DelayedScaling, state
from quire.io import CheckpointError, te_state


class Call:
    def __init__(self, function, *args):
        self.of = function, args

    def __reduce__(self):
        return self.of


def storage_bytes(value):
    """What the pickle of a storage has as the argument of torch.storage._load_from_bytes: here a pickle in it."""
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def attacks(canary):
    touch = Call(os.system, f"touch {canary}")
    write = Call(eval, f"open({str(canary)!r}, 'w').close()")
    return {
        "os.system": touch,
        "builtins.eval": write,
        "builtins.exec": Call(exec, f"open({str(canary)!r}, 'w')"),
        "a file": Call(open, str(canary), "w"),
        "in a state": state() | {"extra": touch},
        "as a key": {"scale_fwd": 1, Call(str, "x"): 2},
        "in a storage": state() | {"scale_fwd": Call(torch.storage._load_from_bytes, storage_bytes(touch))},
        "in a storage in a storage": Call(
            torch.storage._load_from_bytes,
            storage_bytes(Call(torch.storage._load_from_bytes, storage_bytes(write))),
        ),
        "torch.load": Call(torch.load, io.BytesIO(storage_bytes(touch))),
        "an attribute": Call(getattr, os, "system"),
        "an attribute of a class": Call(getattr, DelayedScaling, "__init__"),
        "an import": Call(__import__, "os"),
        "a partial": Call(collections.defaultdict, os.getcwd),
    }


NAMES_OF_ATTACKS = list(attacks("x"))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("attack", NAMES_OF_ATTACKS)
def test_a_pickle_runs_nothing(te, attack, protocol, tmp_path):
    canary = tmp_path / "canary"
    value = attacks(canary)[attack]
    try:
        data = pickle.dumps(value, protocol)
    except TypeError:
        pytest.skip("modules cannot be pickled")
    with pytest.raises(CheckpointError):
        te_state(data)
    assert not canary.exists()
    # The same in a file.
    with open(tmp_path / "model.pt", "wb") as file:
        torch.save({"a": torch.zeros(3), "b": value}, file)
    with pytest.raises(CheckpointError):
        quire.io.read(tmp_path / "model.pt")
    assert not canary.exists()


def test_the_attacks_work_where_pickles_run(te, tmp_path):
    """Or the test above would show nothing."""
    canary = tmp_path / "canary"
    for attack in ("os.system", "builtins.eval", "in a storage"):
        pickle.loads(pickle.dumps(attacks(canary)[attack]))
        assert canary.exists()
        canary.unlink()


def test_the_refused_name_is_named():
    with pytest.raises(CheckpointError, match=r"the pickle names (posix|nt).system, which is not on the list"):
        te_state(pickle.dumps(Call(os.system, "true")))
    with pytest.raises(CheckpointError, match=r"the pickle names builtins.eval"):
        te_state(pickle.dumps(Call(eval, "1")))


@pytest.mark.parametrize(
    "data",
    [
        b"no pickle",
        b"\x80\x04.",
        b"\x80\x04\x82\x01.",  # EXT1: a name of copyreg's registry
        b"\x80\x04Ppath\n.",  # PERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",  # INST
        # BUILD on a function of the table: the state of a partial would replace the function it calls
        b"ctransformer_engine.pytorch.tensor.float8_tensor\n_make_float8_tensor_in_reduce_ex\n(Nt}b.",
        b"cbuiltins\ngetattr\n(N}S'__doc__'\nS'x'\nstb.",
    ],
    ids=repr,
)
def test_bytes_that_no_pickler_writes_are_refused(data):
    with pytest.raises(CheckpointError):
        te_state(data)


def test_functions_of_the_table_cannot_be_changed():
    """BUILD gives an object a state: a plain function or a partial would take it, for all later files."""
    name = b"ctransformer_engine.pytorch.tensor.float8_tensor\n_make_float8_tensor_in_reduce_ex\n"
    for state_of in (b"(Nt", b"}", b"(N}S'__doc__'\nS'x'\nst"):
        with pytest.raises(CheckpointError, match="the pickle sets the state of a function"):
            te_state(name + state_of + b"b.")


def test_names_of_the_extension_registry_are_not_looked_up(tmp_path):
    """Pickle finds these without asking find_class, once they have been used."""
    canary, code = tmp_path / "canary", 0xE7
    extension = b"\x82" + bytes([code])
    copyreg.add_extension(os.system.__module__, "system", code)
    try:
        assert pickle.loads(extension + b".") is os.system
        data = extension + f"(S'touch {canary}'\ntR.".encode()
        with pytest.raises(CheckpointError, match="the pickle has the operation EXT1 at byte 0"):
            te_state(data)
        assert not canary.exists()
        pickle.loads(data)
        assert canary.exists()  # or this would show nothing
    finally:
        copyreg.remove_extension(os.system.__module__, "system", code)


def test_truncated_and_changed_states_never_crash(te):
    """Each either is a state or raises CheckpointError."""
    data, accepted = bytearray(pickle.dumps(state())), 0
    random = torch.Generator().manual_seed(0)
    for index in range(0, len(data), max(1, len(data) // 150)):
        changed = bytearray(data)
        changed[index] ^= int(torch.randint(1, 256, (), generator=random))
        for form in (bytes(data[:index]), bytes(changed)):
            try:
                found = te_state(form)
            except CheckpointError:
                continue
            accepted += 1
            assert found is None or found["scale_fwd"].dtype == torch.float32
    assert accepted > 0
